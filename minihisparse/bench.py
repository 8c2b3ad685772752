"""`bench decode`: the time of a decode step, per cache, beside transformers.

Every engine decodes the same context with the same weights in the same process. The engines take
turns, round by round, so that a slow minute of the machine hits all of them; the median over all
steps is reported. Prefill is not part of it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from minihisparse.batch import Batch
from minihisparse.model import Decoder
from minihisparse.runner import Runner, make_runner
from minihisparse.tokenizer import Tokenizer

TEXT_MODULE = argparse  # any long module of the standard library
WARM_UP_STEPS = 4


def bench_decode(
    args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer, report: dict
) -> None:
    """Prints a table and fills `report["rows"]`: {mode ms_per_step_p50 ms_per_step_min steps}."""
    check_counts(args, "input_len", "output_len", "num_iters", "batch_size")
    ids = tokenizer.encode(Path(TEXT_MODULE.__file__).read_text(encoding="utf-8"))
    if len(ids) < args.input_len:
        raise ValueError(
            f"--input-len {args.input_len} is more than the text has, {len(ids)} tokens; lower it"
        )
    prompt = ids[: args.input_len]
    num_tokens = args.input_len + args.output_len + WARM_UP_STEPS
    rounds: dict[str, Callable[[], list[float]]] = {}
    if args.compare == "transformers":
        rounds["transformers"] = _transformers_round(args, model, prompt)
    for mode in args.modes.split(","):
        if mode not in ("full", "hisparse"):
            raise ValueError(f"--modes: {mode!r} is not one of: full, hisparse")
        runner = make_runner(
            model,
            cache=mode,
            selector=args.selector,
            hisparse=args.hisparse,
            max_model_len=num_tokens if args.max_model_len is None else args.max_model_len,
            max_running_requests=args.batch_size,
        )
        rounds[mode] = _engine_round(args, runner, prompt)
    times: dict[str, list[float]] = {name: [] for name in rounds}
    with tqdm(total=args.num_iters * len(rounds), unit="round", disable=args.disable_tqdm) as bar:
        for _ in range(args.num_iters):
            for name, run in rounds.items():
                bar.set_description(name)
                times[name] += run()
                bar.update()
    report["input_len"], report["batch_size"] = args.input_len, args.batch_size
    report["threads"] = torch.get_num_threads()
    report["rows"] = [
        {
            "mode": name,
            "ms_per_step_p50": round(statistics.median(values), 3),
            "ms_per_step_min": round(min(values), 3),
            "steps": len(values),
        }
        for name, values in times.items()
    ]
    print(f"{'mode':<14}{'ms/step, median':>18}{'fastest':>10}")
    for row in report["rows"]:
        print(f"{row['mode']:<14}{row['ms_per_step_p50']:>18.2f}{row['ms_per_step_min']:>10.2f}")


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError, with flag and value, if one of these arguments is less than 1."""
    for name in names:
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {getattr(args, name)} is less than 1")


def _engine_round(
    args: argparse.Namespace, runner: Runner, prompt: list[int]
) -> Callable[[], list[float]]:
    """A function that prefills, decodes, and returns the milliseconds of each decode step."""
    device = runner.model.device
    num_tokens = len(prompt) + WARM_UP_STEPS + args.output_len
    ids = torch.tensor(prompt, device=device)

    def run() -> list[float]:
        rows = [runner.cache.admit(num_tokens) for _ in range(args.batch_size)]
        tokens = torch.stack([runner.prefill(row, ids).argmax() for row in rows])
        milliseconds = []
        for i in range(WARM_UP_STEPS + args.output_len):
            batch = Batch.make(rows, [len(prompt) + 1 + i] * len(rows), device)
            start = time.perf_counter()
            tokens = runner.decode(tokens, batch).argmax(dim=-1)
            _synchronize(device)
            milliseconds.append(1e3 * (time.perf_counter() - start))
        for row in rows:
            runner.cache.release(row)
        return milliseconds[WARM_UP_STEPS:]

    return run


def _transformers_round(
    args: argparse.Namespace, model: Decoder, prompt: list[int]
) -> Callable[[], list[float]]:
    """The same with transformers' model of the same folder, its default cache and attention."""
    try:
        from transformers import AutoModelForCausalLM, DynamicCache
    except ImportError:
        raise ImportError("--compare transformers: pip install transformers") from None

    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=model.dtype)
    reference = reference.to(model.device).eval()
    ids = torch.tensor([prompt] * args.batch_size, device=model.device)

    @torch.inference_mode()
    def run() -> list[float]:
        # Passed by position: the parameter is `past_key_values` or `cache`, by version.
        cache = DynamicCache(config=reference.config)
        out = reference(ids, None, None, cache, logits_to_keep=1)
        milliseconds = []
        for _ in range(WARM_UP_STEPS + args.output_len):
            tokens = out.logits[:, -1].argmax(dim=-1, keepdim=True)
            _synchronize(model.device)
            start = time.perf_counter()
            out = reference(tokens, None, None, cache, logits_to_keep=1)
            _synchronize(model.device)
            milliseconds.append(1e3 * (time.perf_counter() - start))
        return milliseconds[WARM_UP_STEPS:]

    return run


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
