"""The same decode steps in transformers, with its cache on the device and offloaded to the host.

A batch of prompts of one length is prefilled at once, and decodes as many steps as a request of
`bench decode` does. Its time to the first token is that of the whole batch.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from minihisparse.model import Decoder
from minihisparse.workload import percentiles, prompts_of

WARM_UP_STEPS = 2


def check_installed() -> None:
    """Raises ImportError without transformers."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("--compare transformers: pip install transformers")


def transformers_rows(
    args: argparse.Namespace, model: Decoder, ids: Sequence[int]
) -> Iterator[dict]:
    """A row like those of `bench decode` for each prompt length, concurrency and kind of cache."""
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging

    if args.disable_tqdm:
        logging.disable_progress_bar()
    reference = AutoModelForCausalLM.from_pretrained(args.model, dtype=model.dtype)
    reference = reference.to(model.device).eval()
    kinds = {"transformers": False}
    if model.device.type == "cuda":
        kinds["transformers-offloaded"] = True
    for input_len, concurrency in product(args.input_len, args.concurrency or [1]):
        prompts = prompts_of(ids, input_len)
        batch = torch.tensor([next(prompts) for _ in range(concurrency)], device=model.device)
        for (mode, offloading), _ in product(kinds.items(), range(args.num_iters)):
            cache = DynamicCache(config=reference.config, offloading=offloading)
            ttft, steps = _decode(reference, batch, cache, args.output_len - 1)
            yield _row(mode, input_len, concurrency, ttft, steps)


@torch.inference_mode()
def _decode(reference, batch: Tensor, cache, num_steps: int) -> tuple[float, list[float]]:
    """Seconds of the prefill of batch [R, T], and of each decode step after the warm-up."""

    def timed(tokens: Tensor) -> tuple[float, Tensor]:
        start = _now(batch.device)
        # Passed by position: the parameter is `past_key_values` or `cache`, by version.
        logits = reference(tokens, None, None, cache, logits_to_keep=1).logits
        return _now(batch.device) - start, logits[:, -1].argmax(dim=-1, keepdim=True)

    reference(batch[:1, :1])  # warm-up: the libraries load their kernels
    ttft, tokens = timed(batch)
    seconds = []
    for _ in range(WARM_UP_STEPS + num_steps):
        step, tokens = timed(tokens)
        seconds.append(step)
    return ttft, seconds[WARM_UP_STEPS:]


def _row(mode: str, input_len: int, concurrency: int, ttft: float, steps: list[float]) -> dict:
    """See `bench_engine.make_row`. ttft and steps in seconds."""
    step_ms = percentiles([1e3 * seconds for seconds in steps])
    num_tokens = concurrency * len(steps)
    return {
        "mode": mode,
        "input_len": input_len,
        "hbm_budget_gib": None,
        "concurrency": concurrency,
        "requests": concurrency,
        "running_mean": float(concurrency) if steps else None,
        "running_max": concurrency,
        "decode_tokens_per_second": round(num_tokens / sum(steps), 2) if steps else None,
        "tokens_per_second": round((num_tokens + concurrency) / (ttft + sum(steps)), 2),
        "step_ms": step_ms,
        "ttft_ms": percentiles([1e3 * ttft]),
        "tpot_ms": step_ms,
        "itl_ms": step_ms,
        "hit_rate": None,
        "bytes_h2d_per_step": None,
        "link_share": None,
        "joules_per_token": None,
        "memory": None,
        "prefix": None,  # it shares nothing
        "resolve_us": None,
    }


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
