"""What each command does, from parsed flags to printed text and the fields of its report.

Every command is `command(args, report) -> exit code`. It fills `report` as it goes, so that what
was measured before an error or Ctrl-C is still printed.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from minihisparse.assembly import make_runner
from minihisparse.config import choose_device
from minihisparse.decode_step import DecodeStep
from minihisparse.engine import LLM
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.runner import Runner
from minihisparse.sampling import SamplingParams
from minihisparse.stats import (
    Timings,
    Workspace,
    cache_report,
    environment_report,
    memory_report,
)
from minihisparse.step_view import StepView
from minihisparse.synthetic import fill
from minihisparse.tokenizer import Detokenizer, Tokenizer
from minihisparse.verify import Lockstep

DEMO_MODULE, DEMO_TOKENS = "calendar", 6_000
QUESTION = "Explain in a few sentences what this Python module is for."


def generate(args: argparse.Namespace, report: dict) -> int:
    """Completes prompts; a lone one is streamed, several are printed in their order."""
    prompts = _prompts(args)
    rows = args.max_running_requests
    if rows is None and args.hbm_budget_gib is None:
        rows = min(8, len(prompts))
    llm = _llm(args, report, rows)
    params = _sampling_params(args)
    if len(prompts) == 1:
        _stream(llm, llm.tokenizer.encode(prompts[0]), params, report)
        return 0
    try:
        outputs = llm.generate(prompts, params)
    except KeyboardInterrupt:
        _report_run(report, llm, [])
        raise
    for index, output in enumerate(outputs):
        print(f"--- prompt {index}")
        print(output["text"] if output.error is None else f"refused: {output.error}")
    done = [output for output in outputs if output.error is None]
    report["errors"] = [output.error for output in outputs if output.error is not None]
    lengths = [len(output.prompt_token_ids) + len(output["token_ids"]) for output in done]
    _report_run(report, llm, lengths)
    return 1 if report["errors"] else 0


def chat(args: argparse.Namespace, report: dict) -> int:
    """A conversation on the terminal: each line of stdin is a message, end of file ends it."""
    llm = _llm(args, report, max_running_requests=1)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    _report_run(report, llm, [])
    for line in _lines("you> "):
        messages.append({"role": "user", "content": line})
        prompt = llm.chat_prompt(messages)
        answer = _stream(llm, prompt, _sampling_params(args), report)
        messages.append({"role": "assistant", "content": answer})
    return 0


def step(args: argparse.Namespace, report: dict) -> int:
    """Decodes one prompt and stops after each layer to show the cache."""
    prompts = _prompts(args)
    if len(prompts) != 1:
        raise ValueError(f"step shows one prompt, but {len(prompts)} were given")
    llm = _llm(args, report, max_running_requests=1)
    view = StepView(_lines(StepView.QUESTION))
    num_tokens = 0
    try:
        for event in llm.step(prompts, SamplingParams(max_new_tokens=args.max_new_tokens)):
            (num_tokens,) = event.seq_lens
            if view.wants(event):
                print(view.render(event))
                if not view.go_on(event):
                    break
    finally:
        _report_run(report, llm, [num_tokens])
    return 0


def verify(args: argparse.Namespace, report: dict) -> int:
    """Runs both caches in lockstep and compares everything that they compute."""
    texts, longest = [], None
    if args.synthetic_context is None:
        texts = _prompts(args)
    elif args.prompt or args.prompt_file or args.prompt_tokens or args.synthetic_context < 1:
        raise ValueError("--synthetic-context takes a number above 0, and no prompt beside it")
    else:
        longest = args.synthetic_context + args.max_new_tokens
    model, tokenizer = _load(args, report, longest)
    prompts = [tokenizer.encode(text) for text in texts] or [[0] * args.synthetic_context]
    if args.prompt_tokens:
        prompts = _cut(prompts, args.prompt_tokens)
    lockstep = _lockstep(args, model, prompts, check_integrity=args.check_integrity)
    if args.synthetic_context is not None:
        for runner in lockstep.runners.values():
            runner.prefill = partial(fill, runner)
    broken = None
    try:
        with tqdm(total=args.max_new_tokens, unit="step", disable=args.disable_tqdm) as bar:
            for _ in lockstep.run(prompts, args.max_new_tokens):
                bar.update()
    except AssertionError as error:  # what was compared before counts all the same
        broken = str(error)
        print(f"error: {broken}", file=sys.stderr)
    finally:
        _report_lockstep(report, lockstep, prompts)
    if broken:
        report["exact"], report["error"] = False, broken
    if report["exact"]:
        print(f"exact: {len(prompts)} requests, {lockstep.num_steps} decode steps, all bits equal")
        return 0
    if lockstep.exact:
        print(f"NOT exact; all bits were equal, but the cache is broken: {broken}")
    else:
        print(f"NOT exact; the first difference is in {lockstep.first_difference}")
    return 1


def demo(args: argparse.Namespace, report: dict) -> int:
    """Gets a small real model, asks it about a long document, both ways, and compares."""
    if args.model is None:
        from minihisparse.weights_scripts.get_smollm2 import get_smollm2

        args.model = str(get_smollm2(progress=not args.disable_tqdm))
    model, tokenizer = _load(args, report)
    document, name = _document(args, tokenizer)
    message = {"role": "user", "content": f"{document}\n\n{args.question}"}
    text = tokenizer.apply_chat_template([message])
    prompt = tokenizer.encode(text, add_special_tokens=False)
    lockstep = _lockstep(args, model, [prompt], check_integrity=False)
    print(f"document: {name}, {len(prompt)} tokens\nquestion: {args.question}\nanswer: ", end="")
    answer = Detokenizer(tokenizer)
    eos = model.config.eos_token_ids
    total = 2 * model.config.num_hidden_layers
    off = args.disable_tqdm
    with tqdm(
        total=total, desc="prefill, both ways", unit="layer", disable=off, leave=False
    ) as bar:
        tokens = lockstep.run([prompt], args.max_new_tokens, eos, progress=bar.update)
        try:
            for (token,) in tokens:
                bar.close()
                print(answer.add(token), end="", flush=True)
        finally:  # on Ctrl-C too: what was streamed stays
            tokens.close()
            print(answer.finish(), flush=True)
            _report_lockstep(report, lockstep, [prompt])
    print(_side_by_side(report, lockstep))
    return 0 if lockstep.exact else 1


def bench_decode(args: argparse.Namespace, report: dict) -> int:
    """Throughput and latency of many requests; see bench_decode.py."""
    from minihisparse import bench_decode

    bench_decode.check_flags(args)
    longest = max(args.input_len) + args.output_len
    if args.random_weights is None:
        model, tokenizer = _load(args, report, longest)
    else:
        model, tokenizer = _random_model(args, report, longest), None
        args.synthetic_context = True
    bench_decode.bench_decode(args, model, tokenizer, report)
    return 0


def bench_serve(args: argparse.Namespace, report: dict) -> int:
    """Latency under requests that come at random times; see bench_serve.py."""
    from minihisparse import bench_serve

    bench_serve.check_flags(args)
    longest = max(point.num_tokens for point, _, _ in bench_serve.jobs_of(args))
    model, tokenizer = _load(args, report, longest)
    bench_serve.bench_serve(args, model, tokenizer, report)
    return 0


def bench_resolve(args: argparse.Namespace, report: dict) -> int:
    """Times Resolve alone, without a model; see bench_resolve.py."""
    from minihisparse import bench_resolve  # needs Numba, which the other commands may do without

    bench_resolve.bench_resolve(args, report)
    return 0


def _load(
    args: argparse.Namespace, report: dict, longest: int | None = None
) -> tuple[Decoder, Tokenizer]:
    """The model of --model. longest: tokens of a request, without --max-model-len."""
    device, dtype = _choose_device(args, report)
    model = Decoder.from_folder(
        args.model,
        device=device,
        dtype=dtype,
        max_model_len=_limit_beyond(args, ModelConfig.from_folder(args.model), longest),
        progress=not args.disable_tqdm,
    )
    return model, Tokenizer.from_folder(args.model, args.chat_template)


def _random_model(args: argparse.Namespace, report: dict, longest: int) -> Decoder:
    """A model of the config's shape, and of --num-layers layers, with random weights."""
    device, dtype = _choose_device(args, report)
    config = ModelConfig.from_file(args.random_weights)
    if args.num_layers is not None:
        if not 1 <= args.num_layers <= config.num_hidden_layers:
            raise ValueError(
                f"--num-layers {args.num_layers} is not in 1..{config.num_hidden_layers}, which is "
                f"what {args.random_weights} has"
            )
        config = replace(config, num_hidden_layers=args.num_layers)
    return Decoder.random(
        config,
        seed=args.seed,
        device=device,
        dtype=dtype,
        max_model_len=_limit_beyond(args, config, longest),
        drawn_on=device,
    )


def _choose_device(args: argparse.Namespace, report: dict) -> tuple[torch.device, torch.dtype]:
    """From the flags; says which, and starts the report."""
    device, dtype, reason = choose_device(args.device, args.dtype)
    print(f"minihisparse: {reason}", file=sys.stderr)
    report.update(environment_report(args.command, device, dtype, args.seed))
    return device, dtype


def _limit_beyond(args: argparse.Namespace, config: ModelConfig, longest: int | None) -> int | None:
    """The model's new limit, if one beyond its own is allowed and needed; says so.

    longest: tokens of a request, where there is no --max-model-len.
    """
    limit = config.max_position_embeddings
    wanted = longest if args.max_model_len is None else args.max_model_len
    if not args.allow_beyond_model_limit:
        return None
    if wanted is None:
        raise ValueError("--allow-beyond-model-limit: say how far, with --max-model-len")
    if wanted <= limit:
        return None
    print(
        f"minihisparse: positions from {limit} on are beyond what the model was made for; "
        "expect nonsense there",
        file=sys.stderr,
    )
    return wanted


def _llm(args: argparse.Namespace, report: dict, max_running_requests: int | None) -> LLM:
    model, tokenizer = _load(args, report)
    return LLM(
        model,
        tokenizer=tokenizer,
        cache=args.cache,
        selector=args.selector,
        selector_weights=args.selector_weights,
        hisparse=args.hisparse,
        max_model_len=args.max_model_len,
        max_running_requests=max_running_requests,
        hbm_budget_gib=getattr(args, "hbm_budget_gib", None),
        enforce_eager=getattr(args, "enforce_eager", False),
        max_prefill_tokens=getattr(args, "max_prefill_tokens", None),
        seed=args.seed,
        use_tqdm=not args.disable_tqdm,
    )


def _lockstep(
    args: argparse.Namespace, model: Decoder, prompts: list[list[int]], check_integrity: bool
) -> Lockstep:
    longest = max(map(len, prompts))
    num_tokens = longest + args.max_new_tokens
    limit = model.max_model_len if args.max_model_len is None else args.max_model_len
    if num_tokens > limit >= 1:
        raise ValueError(
            f"{longest} prompt tokens and max_new_tokens={args.max_new_tokens} are {num_tokens} "
            f"in all, over the limit max_model_len={limit}; shorten the prompt, lower "
            "--max-new-tokens, or see --max-model-len and --allow-beyond-model-limit"
        )
    runners = [
        make_runner(
            model,
            cache=cache,
            selector=args.selector,
            selector_weights=args.selector_weights,
            hisparse=args.hisparse,
            max_model_len=max(num_tokens, 1) if args.max_model_len is None else limit,
            max_running_requests=len(prompts),
        )
        for cache in ("full", "hisparse")
    ]
    return Lockstep(
        *runners,
        check_integrity=check_integrity,
        enforce_eager=args.enforce_eager,
        use_tqdm=not args.disable_tqdm,
    )


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompt or [])
    if args.prompt_file:
        prompts.append(_read_text(args.prompt_file))
    if not prompts:
        raise ValueError("no prompt; pass --prompt TEXT or --prompt-file FILE")
    return prompts


def _read_text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text: {error}") from None


def _cut(prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    """One prompt, cut to each of the lengths."""
    if len(prompts) != 1:
        raise ValueError(f"--prompt-tokens cuts one prompt, but {len(prompts)} were given")
    if max(lengths) > len(prompts[0]):
        raise ValueError(
            f"--prompt-tokens {max(lengths)} is more than the prompt has, {len(prompts[0])}; "
            "pass a longer --prompt-file"
        )
    return [prompts[0][:length] for length in lengths]


def _document(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[str, str]:
    """The text that the demo is about, cut to DEMO_TOKENS tokens, and its name."""
    path = args.prompt_file
    if path is None:
        path = importlib.util.find_spec(DEMO_MODULE).origin
    ids = tokenizer.encode(_read_text(path))
    return tokenizer.decode(ids[:DEMO_TOKENS]), Path(path).name


def _sampling_params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.sampling_top_k,
        max_new_tokens=args.max_new_tokens,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
    )


def _stream(llm: LLM, prompt: Sequence[int], params: SamplingParams, report: dict) -> str:
    """Prints the text as it comes; returns it. On Ctrl-C what was printed stays."""
    text, num_tokens = "", 0
    try:
        for delta in llm.stream([prompt], params):
            text += delta.text
            num_tokens += 1  # before the text is out: Ctrl-C may come in between
            print(delta.text, end="", flush=True)
    finally:
        if num_tokens:
            print(flush=True)
            _report_run(report, llm, [len(prompt) + num_tokens])
    return text


def _lines(question: str) -> Iterator[str]:
    """Lines of stdin without their newline; a person at a terminal is asked."""
    while True:
        if sys.stdin.isatty():
            print(question, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.rstrip("\n")


def _report_run(report: dict, llm: LLM, num_tokens: Sequence[int]) -> None:
    """num_tokens: positions of each request, for what full KV would have taken."""
    _report(report, llm.runner, llm.timings, llm.workspace, num_tokens, llm.scheduler.decode)


def _report_lockstep(report: dict, lockstep: Lockstep, prompts: Sequence[Sequence[int]]) -> None:
    compared = bool(lockstep.tokens) or not lockstep.exact
    diff = lockstep.max_abs_diff
    report["exact"] = lockstep.exact if compared else None  # nothing compared: not exact either
    report["max_abs_diff"] = diff if compared and math.isfinite(diff) else None  # JSON has no inf
    lengths = [len(p) + len(t) for p, t in zip(prompts, lockstep.tokens, strict=False)]
    timings, workspace = lockstep.timings["hisparse"], lockstep.workspaces["hisparse"]
    _report(report, lockstep.runners["hisparse"], timings, workspace, lengths)


def _report(
    report: dict,
    runner: Runner,
    timings: Timings,
    workspace: Workspace,
    num_tokens: Sequence[int],
    step: DecodeStep | None = None,
) -> None:
    report.update(timings.report())
    report["cache"] = cache_report(runner.cache)
    report["memory"] = memory_report(runner.cache, runner.selector, workspace, num_tokens, step)


def _side_by_side(report: dict, lockstep: Lockstep) -> str:
    """The demo's closing table."""
    full, memory, cache = lockstep.runners["full"].cache, report["memory"], report["cache"]
    hit_rate = cache["hit_rate"]
    times = {name: timings.report() for name, timings in lockstep.timings.items()}

    def mib(num_bytes: int) -> str:
        return f"{num_bytes / 2**20:.1f} MiB"

    def row(name: str, of_full: object, of_hisparse: object) -> str:
        return f"{name:<28}{of_full!s:>16}{of_hisparse!s:>16}"

    equal = "equal" if lockstep.exact else str(lockstep.first_difference)
    return "\n".join(
        [
            row("", "full", "hisparse"),
            row("KV on the device", mib(full.device_kv_bytes), mib(memory["device_kv_bytes"])),
            row("KV in host memory", mib(0), mib(memory["host_pool_bytes"])),
            row("slot and page tables", mib(0), mib(memory["metadata_bytes"])),
            row("hit rate", "", "" if hit_rate is None else f"{hit_rate:.2%}"),
            row("fetched per decode step", "", mib(cache["bytes_h2d"] / max(1, report["steps"]))),
            row("time to first token, ms", *(t["ttft_ms"] for t in times.values())),
            row("time per token, ms", *(t["tpot_ms_p50"] for t in times.values())),
            f"tokens, attention of every layer, logits of {report['steps']} steps: {equal}",
        ]
    )
