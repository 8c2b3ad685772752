"""`bench serve`: what clients see who come when they like, prefill and decode sharing the device.

Requests arrive by a Poisson process of a given rate, or as a file says. At a rate above what a
cache can serve, requests queue, and TTFT grows with the queue: the cache that holds more requests
at the same budget serves more of them at once.

A row per cache, budget, prompt length and rate, `bench_engine.make_row`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product

from tqdm import tqdm

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
from minihisparse.bench_table import head, line
from minihisparse.model import Decoder
from minihisparse.tokenizer import Tokenizer
from minihisparse.workload import Arrival, poisson, read_arrivals, run_open_loop

DEFAULTS = {"input_len": [1024], "output_len": 64, "num_requests": 64, "request_rate": [1.0]}


def check_flags(args: argparse.Namespace) -> None:
    """What can be refused before a model is loaded; fills in what was not given.

    Raises ValueError or ImportError; `jobs_of` afterwards raises what the arrivals' file does.
    """
    modes_of(args)
    if args.max_running_requests is not None:
        check_counts(args, "max_running_requests")
    given = [name for name in DEFAULTS if getattr(args, name) is not None]
    if args.arrivals is None:
        for name in set(DEFAULTS) - set(given):
            setattr(args, name, DEFAULTS[name])
        check_counts(args, "output_len", "num_requests")
    elif given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"--arrivals and {flags} set the same things; use one of them")
    check_prefix(args)
    check_plot(args)


def bench_serve(
    args: argparse.Namespace, model: Decoder, tokenizer: Tokenizer, report: dict
) -> None:
    """Prints a table and fills `report["rows"]`; args have passed `check_flags`.

    Raises ValueError, before anything is measured, for what cannot be.
    """
    jobs = jobs_of(args)
    for point, _, _ in jobs:
        num_rows(args, point, model, args.max_running_requests)
    link = measure_link(model.device)
    rows = start_report(args, report, link)
    ids = token_ids(args, model, tokenizer)
    print(head("req/s"))
    total = sum(len(arrivals) for _, _, arrivals in jobs)
    with tqdm(total=total, unit="request", disable=args.disable_tqdm) as bar:
        for point, rate, arrivals in jobs:
            bar.set_description(point.mode)
            rows.append(measure(args, point, rate, arrivals, model, ids, link, bar))
            free_memory(model.device)
            bar.write(line(rows[-1]), file=sys.stdout)
    save_figure(args, report, "serve.png")


def jobs_of(args: argparse.Namespace) -> list[tuple[Point, float | None, list[Arrival]]]:
    """What to measure: points, requests per second, and when they come. Every cache is sent the
    same. Raises what `read_arrivals` does.
    """
    if args.arrivals is None:
        loads = []
        for input_len, rate in product(args.input_len, args.request_rate):
            arrivals = poisson(rate, args.num_requests, input_len, args.output_len, args.seed)
            loads.append((rate, arrivals))
    else:
        arrivals = read_arrivals(args.arrivals)
        seconds = arrivals[-1].seconds
        loads = [(round(len(arrivals) / seconds, 3) if seconds else None, arrivals)]
    jobs = []
    for (rate, arrivals), budget, mode in product(
        loads, args.hbm_budget_gib or [None], modes_of(args)
    ):
        input_len = max(a.input_len for a in arrivals)
        num_tokens = max(a.input_len + a.output_len for a in arrivals)
        jobs.append((Point(input_len, num_tokens, budget, None, mode), rate, arrivals))
    return jobs


def measure(
    args: argparse.Namespace,
    point: Point,
    rate: float | None,
    arrivals: Sequence[Arrival],
    model: Decoder,
    ids: Sequence[int],
    link_gb_per_s: float | None,
    bar: tqdm,
) -> dict:
    """One open loop in an engine of its own; its row."""
    runner = make_point_runner(args, point, model, args.max_running_requests, point.budget_gib)
    prompts = point_prompts(args, ids, point.input_len)
    scheduler = make_scheduler(args, runner, next(prompts))
    loop = partial(run_open_loop, scheduler, prompts, arrivals, progress=bar.update)
    return run_point(
        point, scheduler, scheduler.decode, link_gb_per_s, {"request_rate": rate}, loop
    )
