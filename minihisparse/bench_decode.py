"""`bench decode`: decoding of many long requests, per cache, at equal device memory.

A point is a cache (mode), a device memory budget and a number of clients (concurrency) in a closed
loop. Everything goes through the engine's own scheduler and decode step; only text is left out.
Each point gives a row, `bench_engine.make_row`.

    full       all KV on the device                  hisparse    GPU cache and host pool
    prefetch   hisparse that fetches ahead for layers that share a selection
    no-io      hisparse that fetches nothing: what the mechanism costs without the bus; its output
               is wrong, so its selections are others

Where full KV was measured at two batch sizes, the cost model's prediction for hisparse is printed
beside what was measured; where no-io was, what IO adds to a token, and the share of its throughput
that was reached.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

from tqdm import tqdm

from minihisparse import compare
from minihisparse.bench_engine import (
    Point,
    check_counts,
    check_plot,
    check_prefix,
    free_memory,
    make_point_runner,
    make_scheduler,
    measure_link,
    modes_of,
    num_rows,
    point_prompts,
    run_point,
    save_figure,
    start_report,
    token_ids,
)
from minihisparse.bench_table import compare_with_no_io, head, line, predict
from minihisparse.model import Decoder
from minihisparse.resolve_timer import ResolveTimer, check_device
from minihisparse.synthetic import GivenSelections, fill, sliding_selections
from minihisparse.tokenizer import Tokenizer
from minihisparse.trace import read_trace
from minihisparse.workload import percentiles, run_closed_loop

SYNTHETIC = "synthetic:miss="


def check_flags(args: argparse.Namespace) -> None:
    """What can be refused before a model is loaded. Raises ValueError or ImportError."""
    if (args.model is None) == (args.random_weights is None):
        raise ValueError("bench decode needs --model or --random-weights, one of them")
    if args.random_weights is None and args.num_layers is not None:
        raise ValueError("--num-layers cuts a model with --random-weights, not a --model")
    modes_of(args)
    check_counts(args, "output_len", "num_iters")
    if args.num_requests is not None:
        check_counts(args, "num_requests")
    if args.compare is not None:
        if args.model is None:
            raise ValueError("--compare transformers needs --model; --random-weights has no files")
        compare.check_installed()
    check_prefix(args)
    made_up = args.synthetic_context or args.random_weights is not None
    if made_up and (args.enable_prefix_sharing or args.prefix_len):
        raise ValueError(
            "--prefix-len and --enable-prefix-sharing need a prefill, which is left out with "
            "--synthetic-context and --random-weights"
        )
    check_plot(args)


def bench_decode(
    args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer | None, report: dict
) -> None:
    """Prints a table and fills `report["rows"]`; args have passed `check_flags`.

    tokenizer: None for random prompts. Raises ValueError, before anything is measured, for what
    cannot be.
    """
    if args.resolve_latency:
        check_device(model.device)
    jobs = [(point, load_of(args, point, model)) for point in points_of(args)]
    selections = selections_of(args, model)
    link = measure_link(model.device)
    rows = start_report(args, report, link)
    ids = token_ids(args, model, tokenizer)
    print(head("clients"))
    total = sum(load.num_requests for _, load in jobs)
    with tqdm(total=total, unit="request", disable=args.disable_tqdm) as bar:
        for point, load in jobs:
            bar.set_description(point.mode)
            rows.append(measure(args, point, load, model, ids, link, selections, bar))
            free_memory(model.device)
            bar.write(line(rows[-1]), file=sys.stdout)
    if args.compare == "transformers":
        for row in compare.transformers_rows(args, model, ids):
            rows.append(row)
            print(line(row))
    predict(
        rows,
        num_layers=model.config.num_hidden_layers,
        top_k=args.hisparse.top_k,
        record_bytes=model.config.record_width * model.dtype.itemsize,
        link_gb_per_s=link,
    )
    compare_with_no_io(rows)
    save_figure(args, report, "decode.png")


def points_of(args: argparse.Namespace) -> list[Point]:
    """All combinations, `--num-iters` times; modes take turns, so that a slow minute of the machine
    hits all of them.
    """
    budgets = args.hbm_budget_gib or [None]
    concurrency = args.concurrency or ([1] if budgets == [None] else [None])
    combinations = product(
        args.input_len, budgets, concurrency, range(args.num_iters), modes_of(args)
    )
    return [
        Point(input_len, input_len + args.output_len, budget_gib, clients, mode)
        for input_len, budget_gib, clients, _, mode in combinations
    ]


class Load(NamedTuple):
    """rows: request rows of the engine. concurrency: clients, who send num_requests in all."""

    rows: int
    concurrency: int
    num_requests: int


def load_of(args: argparse.Namespace, point: Point, model: Decoder) -> Load:
    """As many clients as asked for, or as the budget holds; no more rows than clients."""
    without_budget = point.concurrency if point.budget_gib is None else None
    rows = num_rows(args, point, model, without_budget)
    concurrency = rows if point.concurrency is None else point.concurrency
    num_requests = concurrency if args.num_requests is None else args.num_requests
    return Load(min(rows, concurrency), concurrency, num_requests)


def measure(
    args: argparse.Namespace,
    point: Point,
    load: Load,
    model: Decoder,
    ids: list[int],
    link_gb_per_s: float | None,
    selections: Callable[[int, int], GivenSelections] | None,
    bar: tqdm,
) -> dict:
    """One closed loop in an engine of its own; its row, and Resolve's times if asked for."""
    # The rows say it all: with the budget too, more than they need would be allocated.
    given = selections(point.input_len, load.rows) if selections else None
    runner = make_point_runner(args, point, model, load.rows, None, given)
    if args.synthetic_context:
        runner.prefill = partial(fill, runner)
    timer = ResolveTimer(runner) if args.resolve_latency else None
    prompts = point_prompts(args, ids, point.input_len)
    scheduler = make_scheduler(args, runner, next(prompts), sizes=[load.rows] if timer else None)
    step = scheduler.decode
    if timer is not None:
        scheduler.decode = timer.around(step)
    loop = partial(
        run_closed_loop,
        scheduler,
        prompts,
        args.output_len,
        concurrency=load.concurrency,
        num_requests=load.num_requests,
        progress=bar.update,
    )
    row = run_point(point, scheduler, step, link_gb_per_s, {"concurrency": load.concurrency}, loop)
    row["resolve_us"] = percentiles(timer.microseconds) if timer else None
    return row


# ---- --selections ----


def selections_of(
    args: argparse.Namespace, model: Decoder
) -> Callable[[int, int], GivenSelections] | None:
    """(prompt length, request rows) -> the selector that `--selections` asks for; None: the model's
    own.

    Raises FileNotFoundError or ValueError, naming file or flag and the limit.
    """
    if args.selections is None:
        return None
    if args.selections.startswith("synthetic"):
        return _synthetic_selections(args, model)
    name, top_k, num_layers = (
        f"--selections {args.selections}",
        args.hisparse.top_k,
        len(model.layers),
    )
    trace = read_trace(args.selections)
    _, trace_layers, _, trace_k = trace.positions.shape
    if trace_layers < num_layers:
        raise ValueError(f"{name} has {trace_layers} layers, the model {num_layers}")
    if trace_k != top_k:
        raise ValueError(f"{name} has K = {trace_k}, not --top-k {top_k}")
    if trace.context_len > min(args.input_len):
        raise ValueError(
            f"{name} begins with {trace.context_len} tokens, more than --input-len "
            f"{min(args.input_len)}"
        )
    anchor_of = model.config.anchor_of
    return lambda input_len, _: GivenSelections(trace.positions, input_len, model.device, anchor_of)


def _synthetic_selections(
    args: argparse.Namespace, model: Decoder
) -> Callable[[int, int], GivenSelections]:
    config, top_k = model.config, args.hisparse.top_k
    try:
        rate = float(args.selections.removeprefix(SYNTHETIC))
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise ValueError(
            f"--selections {args.selections!r} is neither a file nor like {SYNTHETIC}0.13, a share "
            "in 0..1"
        )
    sizes = args.hisparse.device_buffer_sizes_for(
        config.num_hidden_layers, config.record_width * model.dtype.itemsize
    )
    needed = top_k + max(sizes)
    if min(args.input_len) < needed:
        raise ValueError(
            f"--selections {args.selections} needs --input-len {needed} or more, K + B, got "
            f"{min(args.input_len)}: in a shorter context what has been evicted comes too soon"
        )

    def make(input_len: int, num_rows: int) -> GivenSelections:
        positions = sliding_selections(
            num_steps=args.output_len,
            num_layers=config.num_hidden_layers,
            num_requests=num_rows,
            top_k=top_k,
            context_len=input_len,
            num_misses=round(rate * top_k),
            seed=args.seed,
        )
        return GivenSelections(positions, input_len, model.device, config.anchor_of)

    return make
