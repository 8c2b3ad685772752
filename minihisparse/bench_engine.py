"""What `bench decode` and `bench serve` share: a point, its engine, a timed run of it, and the row.

    point    a cache (mode), a prompt length, a device memory budget, a number of clients
    engine   runner, decode step and scheduler as LLM has them, warmed up; text is left out, and
             prefixes are shared only if asked for
    row      what the clients see, what the server does, what it costs; see `make_row`

It deliberately does not know who sends requests and when: that is a loop, which it is given.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from minihisparse import energy, plots
from minihisparse.assembly import Choice, make_runner, num_tables
from minihisparse.capacity import plan_capacity
from minihisparse.config import HiSparseConfig
from minihisparse.decode_step import DecodeStep
from minihisparse.model import Decoder
from minihisparse.request import Request
from minihisparse.runner import Runner
from minihisparse.scheduler import Scheduler
from minihisparse.selector import Selector
from minihisparse.stats import cache_report, memory_report
from minihisparse.tokenizer import Tokenizer
from minihisparse.workload import latencies, percentiles, prompts_of, text_ids

MODES = ("full", "hisparse", "prefetch", "no-io")
LINK_BYTES = 2**28
RANDOM_TOKENS = 4096  # of the "text" of a model without a tokenizer
WARM_UP_TOKENS = 4096


class Point(NamedTuple):
    """What one row is measured for.

    input_len, num_tokens: of the longest prompt, and of the longest request, answer included.
    budget_gib: None: no limit. concurrency: clients; None: as many as there are request rows.
    """

    input_len: int
    num_tokens: int
    budget_gib: float | None
    concurrency: int | None
    mode: str


# ---- what is asked for ----


def modes_of(args: argparse.Namespace) -> list[str]:
    """`--modes`. Raises ValueError for one that there is not."""
    modes = args.modes.split(",")
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"--modes: {mode!r} is not one of: {', '.join(MODES)}")
    return modes


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raises ValueError, with flag and value, if one of these arguments is less than 1."""
    for name in names:
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {getattr(args, name)} is less than 1")


def check_prefix(args: argparse.Namespace) -> None:
    """Raises ValueError if `--prefix-len` is negative, or leaves nothing of a prompt.

    With a file of arrivals, shorter prompts are all prefix.
    """
    shortest = min(args.input_len or [args.prefix_len + 1])
    if not 0 <= args.prefix_len < shortest:
        raise ValueError(
            f"--prefix-len {args.prefix_len} is not in 0..{shortest - 1}, below --input-len"
        )


def check_plot(args: argparse.Namespace) -> None:
    """Raises ImportError if `--plot` lacks something: better known now than after the run."""
    if args.plot is not None:
        plots.new_figure(1, 1)


def max_model_len_of(args: argparse.Namespace, point: Point, model: Decoder) -> int:
    """Most tokens of a request: `--max-model-len`, or what the point needs.

    Raises ValueError if its requests do not fit into it, or it is more than the model allows.
    """
    longest = point.num_tokens if args.max_model_len is None else args.max_model_len
    if point.num_tokens > longest:
        raise ValueError(
            f"a request of {point.num_tokens} tokens, prompt and answer, is more than "
            f"--max-model-len {longest}"
        )
    if longest > model.max_model_len:
        raise ValueError(
            f"requests of {longest} tokens, but the model was made for {model.max_model_len}; "
            "lower --input-len, --output-len or --max-model-len, or see --allow-beyond-model-limit"
        )
    return longest


def num_rows(
    args: argparse.Namespace, point: Point, model: Decoder, max_running_requests: int | None
) -> int:
    """Request rows of the point's budget; without one, as many as asked for.

    Raises ValueError, naming the flag, if the budget does not hold one request, or the mode is
    prefetch and no layers share a selection.
    """
    choice = Choice.of(args.selector, args.selector_weights)
    given = getattr(args, "selections", None) is not None
    anchor_of = model.config.anchor_of if given else choice.anchor_of
    if point.mode == "prefetch" and anchor_of is None:
        raise ValueError(
            "--modes prefetch needs layers that share a selection: --selector dsa-shared; or, with "
            "--selections, index_topk_freq in the model's config"
        )
    max_model_len = max_model_len_of(args, point, model)
    capacity = plan_capacity(
        model.config,
        args.hisparse,
        cache=_cache_of(point.mode),
        itemsize=model.dtype.itemsize,
        max_model_len=max_model_len,
        max_running_requests=max_running_requests,
        hbm_budget_gib=point.budget_gib,
        selector=choice.size(model, args.hisparse, max_model_len, model.device.type == "cuda"),
        num_tables=num_tables(anchor_of, _config_of(args, point.mode)),
    )
    return capacity.max_running_requests


def _cache_of(mode: str) -> str:
    return "full" if mode == "full" else "hisparse"


def _config_of(args: argparse.Namespace, mode: str) -> HiSparseConfig:
    """Of a mode: hisparse without prefetch, prefetch with it, no-io where layers share."""
    prefetch = {"hisparse": False, "prefetch": True}.get(mode)
    return replace(args.hisparse, enable_layer_prefetch=prefetch)


# ---- before the first point ----


def start_report(args: argparse.Namespace, report: dict, link_gb_per_s: float | None) -> list[dict]:
    """Adds what all points have in common to the report, and "rows", which it returns, empty."""
    report["output_len"] = args.output_len
    report["threads"] = torch.get_num_threads()
    report["link_gb_per_s"] = link_gb_per_s
    report["prefix_len"] = args.prefix_len
    report["enable_prefix_sharing"] = args.enable_prefix_sharing
    report["rows"] = rows = []
    return rows


def token_ids(args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer | None) -> list[int]:
    """What prompts are cut from: real text, or random tokens if there is no tokenizer."""
    if tokenizer is not None:
        return text_ids(tokenizer)
    generator = torch.Generator().manual_seed(args.seed)
    return torch.randint(model.config.vocab_size, (RANDOM_TOKENS,), generator=generator).tolist()


def point_prompts(
    args: argparse.Namespace, ids: Sequence[int], input_len: int
) -> Iterator[list[int]]:
    """`workload.prompts_of`, but all begin with the same `--prefix-len` tokens."""
    first = next(prompts_of(ids, input_len))[: args.prefix_len]
    for prompt in prompts_of(ids, input_len):
        yield first + prompt[args.prefix_len :]


def measure_link(device: torch.device) -> float | None:
    """10^9 bytes per second of a memcpy of pinned memory to the GPU, the fastest of five; None on
    a CPU.
    """
    if device.type != "cuda":
        return None
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device=device)
    fastest = float("inf")
    for _ in range(5):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return round(LINK_BYTES / fastest / 1e9, 1)


# ---- one point ----


def make_point_runner(
    args: argparse.Namespace,
    point: Point,
    model: Decoder,
    max_running_requests: int | None,
    hbm_budget_gib: float | None,
    selector: Selector | None = None,
) -> Runner:
    """A runner of the point's cache, for requests of its length. selector: in place of the one
    that is asked for.
    """
    return make_runner(
        model,
        cache=_cache_of(point.mode),
        selector=selector or args.selector,
        selector_weights=args.selector_weights,
        hisparse=_config_of(args, point.mode),
        max_model_len=max_model_len_of(args, point, model),
        max_running_requests=max_running_requests,
        hbm_budget_gib=hbm_budget_gib,
        skip_io=point.mode == "no-io",
    )


def make_scheduler(
    args: argparse.Namespace,
    runner: Runner,
    prompt: Sequence[int],
    sizes: Sequence[int] | None = None,
) -> Scheduler:
    """A scheduler whose engine has run before. prompt: for that; sizes: see DecodeStep."""
    step = DecodeStep(
        runner, enforce_eager=args.enforce_eager, progress=not args.disable_tqdm, sizes=sizes
    )
    warm_up(runner, step, prompt[:WARM_UP_TOKENS])
    return Scheduler(
        runner,
        step,
        args.max_prefill_tokens,
        enable_prefix_sharing=args.enable_prefix_sharing,
    )


def warm_up(runner: Runner, step: DecodeStep, prompt: Sequence[int]) -> None:
    """One prefill and one decode step that nobody counts: libraries load their kernels in them."""
    row = runner.admit(len(prompt) + 1)
    runner.prefill(row, torch.tensor(prompt, device=runner.model.device))
    step([0], [row], [len(prompt) + 1])
    runner.release(row)
    runner.reset_counters()
    if runner.model.device.type == "cuda":
        torch.cuda.synchronize(runner.model.device)


def run_point(
    point: Point,
    scheduler: Scheduler,
    step: DecodeStep,
    link_gb_per_s: float | None,
    load: Mapping[str, float | None],
    loop: Callable[[], Sequence[Request]],
) -> dict:
    """Runs a loop of requests to its end; its row."""
    device = scheduler.runner.model.device
    joules = energy.joules(device)
    start = time.perf_counter()
    requests = loop()
    seconds = time.perf_counter() - start
    if joules is not None:
        joules = energy.joules(device) - joules
    return make_row(point, scheduler, step, requests, seconds, joules, link_gb_per_s, load)


def make_row(
    point: Point,
    scheduler: Scheduler,
    step: DecodeStep,
    requests: Sequence[Request],
    seconds: float,
    joules: float | None,
    link_gb_per_s: float | None,
    load: Mapping[str, float | None],
) -> dict:
    """What `report["rows"]` has per point; None where there is nothing to say.

    mode, input_len, hbm_budget_gib, and the load: {"concurrency": clients} or {"request_rate":
        requests per second}. requests: served in all.
    running_mean: requests in a decode step. running_max: request rows, the most that fit in one.
    decode_tokens_per_second: tokens of decode steps over their time. tokens_per_second: all tokens
        over all time, prefill and waiting included.
    step_ms: a decode step; ttft_ms, tpot_ms, itl_ms: see `workload.py`; each {mean p50 p99 p99_9}.
    hit_rate: of all selected positions. bytes_h2d_per_step: fetched in a mean decode step.
        link_share: their rate over the link's.
    joules_per_token: of the whole board. memory: see `memory_report`; its full_kv_bytes is for as
        many requests as run at once. prefix: see `Runner.prefix_report`. allocated_bytes: all that
        torch holds on the GPU but weights.
    """
    runner, timings = scheduler.runner, scheduler.timings
    num_steps, decode_seconds = len(timings.step_ms), sum(timings.step_ms) / 1e3
    cache = cache_report(runner.cache)
    fetched = 0 if point.mode == "no-io" else cache["bytes_h2d"]
    share = None
    if link_gb_per_s and fetched is not None:
        share = _ratio(fetched, 1e9 * link_gb_per_s * decode_seconds, digits=4)
    lengths = sorted((len(r.prompt_ids) + len(r.output_ids) for r in requests), reverse=True)
    at_once = lengths[: runner.cache.max_requests]
    num_tokens = sum(len(r.output_ids) for r in requests)
    row = {
        "mode": point.mode,
        "input_len": point.input_len,
        "hbm_budget_gib": point.budget_gib,
        **load,
        "requests": len(requests),
        "running_mean": _ratio(timings.num_decode_tokens, num_steps),
        "running_max": runner.cache.max_requests,
        "decode_tokens_per_second": _ratio(timings.num_decode_tokens, decode_seconds),
        "tokens_per_second": _ratio(num_tokens, seconds),
        "step_ms": percentiles(timings.step_ms),
        **latencies(requests),
        "hit_rate": cache["hit_rate"],
        "bytes_h2d_per_step": None if fetched is None else _ratio(fetched, num_steps),
        "link_share": share,
        "joules_per_token": None if joules is None else _ratio(joules, num_tokens, digits=4),
        "memory": memory_report(runner.cache, runner.selector, scheduler.workspace, at_once, step),
        "prefix": runner.prefix_report(),
    }
    if runner.model.device.type == "cuda":
        allocated = torch.cuda.memory_allocated(runner.model.device)
        row["allocated_bytes"] = allocated - runner.model.weight_bytes
    return row


def _ratio(part: float, whole: float, digits: int = 2) -> float | None:
    return round(part / whole, digits) if whole else None


# ---- after it ----


def free_memory(device: torch.device) -> None:
    """Gives back what the last point's engine held, so that the next one finds it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def save_figure(args: argparse.Namespace, report: dict, name: str) -> None:
    """Draws the rows into the folder `--plot`, if it is given."""
    if args.plot is None:
        return
    data = {"config": plots.config_line(report, args), "rows": report["rows"]}
    path = plots.save(plots.plot_decode(data), data, Path(args.plot) / name)
    print(f"saved {path}", file=sys.stderr)
