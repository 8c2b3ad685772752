"""What `trace size` predicts with: from its flags to a cost model and what limits the requests.

    step times    --steps, the JSON of a `bench decode`, to which the model is fitted; or --fixed-us
                  and --per-request-us
    the link      --link-gb-per-s, or measured where there is a GPU
    requests      --hbm-budget-gib, --host-gib, --max-running-requests  (`deployment.py`)

It deliberately does not know misses.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from minihisparse import cost_model
from minihisparse.cost_model import CostModel
from minihisparse.deployment import Deployment
from minihisparse.trace import Trace
from minihisparse.trace_report import say


def make_deployment(args: argparse.Namespace, report: dict, trace: Trace) -> Deployment | None:
    """None, and a line on stderr that says what is missing, if there is not enough to predict with.

    report: gets "cost" and "fit". Raises ValueError that names the flag or the file.
    """
    if args.input_len is not None and not args.steps:
        raise ValueError("--input-len picks rows of --steps; pass both")
    given = (args.steps, args.fixed_us, args.per_request_us)
    if args.steps and given[1:] != (None, None):
        raise ValueError("--steps and --fixed-us, --per-request-us set the same things; pass one")
    link = args.link_gb_per_s
    if link is None and args.record_bytes and torch.cuda.is_available():
        from minihisparse.bench_engine import measure_link

        link = measure_link(torch.device("cuda"))
    missing = [
        flag
        for flag, value in (
            ("--record-bytes", args.record_bytes),
            ("--link-gb-per-s", link),
            ("--steps, or --fixed-us and --per-request-us", args.steps or None not in given[1:]),
        )
        if not value
    ]
    if missing:
        say(f"no prediction without {'; '.join(missing)}")
        return None
    num_layers = args.layers or trace.positions.shape[1]
    settings: dict[str, Any] = {
        "num_layers": num_layers,
        "top_k": trace.positions.shape[3],
        "record_bytes": args.record_bytes,
        "link_gb_per_s": link * cost_model.KERNEL_SHARE_OF_LINK,
        "io_latency_us": cost_model.IO_LATENCY_US,
        "scan_us_per_slot": cost_model.SCAN_US_PER_SLOT,
        "bookkeeping_us": cost_model.BOOKKEEPING_US
        if args.bookkeeping_us is None
        else args.bookkeeping_us,
    }
    if args.steps:
        cost = _fit(args, report, settings)
    else:
        cost = CostModel(args.fixed_us, args.per_request_us, **settings)
    report["cost"] = {"link_memcpy_gb_per_s": link, **asdict(cost)}
    say(
        f"a step: {cost.fixed_us:.0f} us, {cost.per_request_us:.2f} per request, "
        f"{cost.bookkeeping_us:.1f} per layer and {1e3 * cost.scan_us_per_slot:.1f} per 1,000 "
        f"slots; link {link:g} GB/s by memcpy, {cost.link_gb_per_s:.1f} by kernels"
    )
    return Deployment(
        cost,
        args.max_model_len or int(trace.seq_lens.max()),
        args.hbm_budget_gib,
        args.host_gib,
        args.max_running_requests,
        args.selector_bytes_per_token,
    )


def _fit(args: argparse.Namespace, report: dict, settings: dict[str, Any]) -> CostModel:
    """From the rows of --steps. Raises ValueError that names the file."""
    try:
        found = json.loads(Path(args.steps).read_text(encoding="utf-8"))
        rows = [row for row in found["rows"] if args.input_len in (None, row["input_len"])]
        lengths = sorted({row["input_len"] for row in rows})
        if len(lengths) > 1:
            raise ValueError(f"it has prompts of {lengths} tokens; pick one with --input-len")
        cost = CostModel.fit_rows(rows, **settings)
        measured = [
            (row["mode"], row["running_mean"], 1e3 * row["step_ms"]["mean"], cost.row_us(row))
            for row in rows
            if row["mode"] in ("full", "no-io", "hisparse") and row["step_ms"]
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        missing = isinstance(error, KeyError | TypeError | AttributeError)
        why = f"it is not the JSON of a bench decode ({error!r})" if missing else error
        raise ValueError(f"--steps {args.steps}: {why}") from None
    errors = [predicted / us - 1 for _, _, us, predicted in measured]
    worst = max(errors, key=abs)
    report["fit"] = {"rows": len(errors), "worst_error": round(worst, 4)}
    say(f"fitted to {len(errors)} rows of {args.steps}; the worst is {worst:+.1%} off")
    return cost
