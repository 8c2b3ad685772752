"""`trace size`: which B, from a selection trace; the result as flags, for this engine and SGLang.
The paper chose its B so, in Figures 6 and 7.

    1. misses of plain LRU for all B (`sizing.py`), of the engine's rule at some (`replay.py`)
    2. with the bytes of a record, a link and the times of a step (`sizing_cost.py`), and what
       limits the number of requests: predicted TPOT and throughput over B; the best B
    3. --per-layer: so many slots, shared out among layers (`slot_sharing.py`)
    4. the best B, or 2K without a prediction, as SGLang's flags (`sglang.py`)

How sure: both halves of the trace are looked at apart. Tables and lines go to stderr; the report
has the same numbers. It does not run a model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

from minihisparse.capacity import GIB
from minihisparse.config import MAX_DEVICE_BUFFER_SIZE
from minihisparse.deployment import Deployment
from minihisparse.sglang import SGLangFlags
from minihisparse.sizing_cost import make_deployment
from minihisparse.trace import Trace, read_trace
from minihisparse.trace_report import config_line, report_trace, say

if TYPE_CHECKING:  # these need Numba, and reading flags does not
    from minihisparse.sizing import MissCurves

TIMES_K = (1, 1.5, 2, 3, 4, 6, 8)  # of K: the B that are replayed
CURVE_POINTS = 150  # of B that are tried for the best


def size(args: argparse.Namespace, report: dict) -> int:
    """Does what the module's docstring says.

    report: trace; cost, fit: what is predicted with; rows: a B each; largest_gap_to_lru, a
    difference of miss rates; best, with "halves": how sure; per_layer; sglang. Raises ValueError or
    FileNotFoundError that name the flag or the file.
    """
    from minihisparse.replay import replay
    from minihisparse.sizing import miss_curves
    from minihisparse.sizing_report import how_sure, report_misses

    trace = read_trace(args.file)
    _, num_layers, _, top_k = trace.positions.shape
    report_trace(report, args.file, trace)
    _check_per_layer(args, num_layers)
    sizes = _sizes_to_replay(args, top_k, report["trace"]["longest"])
    deployment = make_deployment(args, report, trace)
    with tqdm(total=num_layers, unit="layer", disable=args.disable_tqdm) as bar:
        curves = miss_curves(
            trace, parts=2, warmup_steps=args.warmup_steps, progress=lambda: bar.update()
        )
        grid = _grid(curves, sizes)
        best = deployment.best(grid, curves.miss_rate) if deployment else None
        sizes = sorted({*sizes, *([best] if best else [])})
        bar.total += num_layers * len(sizes)
        results = {b: replay(trace, "engine", b, progress=lambda: bar.update()) for b in sizes}
    report_misses(report, curves, results, args.warmup_steps, deployment, best)
    report["best"] = None
    if best:
        report["best"] = how_sure(curves, grid, results[best], args.warmup_steps, deployment, best)
    chosen = best or min(2 * top_k, MAX_DEVICE_BUFFER_SIZE)
    if args.per_layer:
        _per_layer(args, report, trace, curves, deployment, chosen)
    _sglang(args, report, trace, deployment, chosen)
    if args.plot:
        _plot(args, report, trace, curves, grid, deployment, best)
    return 0


# ---- what is asked for ----


def _check_per_layer(args: argparse.Namespace, num_layers: int) -> None:
    """Raises ValueError for flags of --per-layer without it, or with another model's layers."""
    for flag, value in (("--total-slots", args.total_slots), ("--held-out", args.held_out)):
        if value is not None and not args.per_layer:
            raise ValueError(f"{flag} is of --per-layer; pass both")
    if args.per_layer and args.layers not in (None, num_layers):
        raise ValueError(
            f"--per-layer needs a trace of all layers: --layers {args.layers}, the trace has "
            f"{num_layers}"
        )


def _sizes_to_replay(args: argparse.Namespace, top_k: int, longest: int) -> list[int]:
    """The B of the table. Raises ValueError for one below K or above the engine's limit."""
    if args.device_buffer_size is None:
        sizes = [int(times * top_k) for times in TIMES_K]
        limit = min(MAX_DEVICE_BUFFER_SIZE, max(longest, top_k))
        return [b for b in sizes if b <= limit]
    for b in args.device_buffer_size:
        if not top_k <= b <= MAX_DEVICE_BUFFER_SIZE:
            raise ValueError(
                f"--device-buffer-size {b} is not in {top_k}..{MAX_DEVICE_BUFFER_SIZE}: from the "
                "trace's K, since all positions of a step must be resident at once, to the "
                "largest that the engine has"
            )
    return sorted(set(args.device_buffer_size))


def _grid(curves: MissCurves, sizes: Sequence[int]) -> list[int]:
    """B to try: K to the longest request, evenly in log, in steps of 64 if K is; and `sizes`."""
    top_k, unit = curves.top_k, 64 if curves.top_k % 64 == 0 else 1
    points = top_k * (curves.largest / top_k) ** torch.linspace(0, 1, CURVE_POINTS).double()
    tried = {top_k + round((b - top_k) / unit) * unit for b in points.tolist()}
    return sorted(b for b in {*tried, *sizes} if b <= curves.largest)


# ---- what follows from it ----


def _per_layer(
    args: argparse.Namespace,
    report: dict,
    trace: Trace,
    curves: MissCurves,
    deployment: Deployment | None,
    chosen: int,
) -> None:
    """The split of the whole trace, and what such a split gains where it was not made."""
    from minihisparse.slot_sharing import compare_per_layer, find_layer_groups, share_slots

    num_layers = trace.positions.shape[1]
    total = args.total_slots or num_layers * chosen
    groups, declared = find_layer_groups(trace)
    source = "the trace's anchor_of" if declared else "equal selections"
    sizes = share_slots(curves, total, groups)
    if args.held_out:
        sized_on, measured_on, where = trace, read_trace(args.held_out), str(args.held_out)
    else:
        middle = len(trace.positions) // 2
        sized_on, measured_on = (
            Trace(trace.positions[part], trace.seq_lens[part])
            for part in (slice(0, middle), slice(middle, None))
        )
        where = "the second half, sized on the first"
    gain = compare_per_layer(
        sized_on, measured_on, total, warmup_steps=args.warmup_steps, groups=groups
    )
    report["per_layer"] = {
        "device_buffer_size": sizes,
        "total_slots": sum(sizes),
        "groups": groups,
        "groups_from": source,
        "measured_on": where,
        "uniform_miss_rate": round(gain.uniform, 6),
        "miss_rate": round(gain.per_layer, 6),
        "best_possible_miss_rate": round(gain.own, 6),
        "saved": round(gain.saved, 4),
    }
    among = f"{num_layers} layers, none in lockstep"
    if len(groups) < num_layers:
        among = f"{len(groups)} groups of layers in lockstep"
    say(
        f"per layer: {sum(sizes)} slots, {min(sizes)} to {max(sizes)} in a layer, shared out among "
        f"{among} (by {source})"
    )
    say(
        f"on {where}: {gain.per_layer:.2%} misses, {gain.uniform:.2%} with {gain.uniform_size} in "
        f"each, {gain.saved:.1%} fewer"
    )
    if deployment and deployment.num_requests(sizes) > 0:
        even, split = (
            deployment.predict(b, rate)["tokens_per_second"]
            for b, rate in ((gain.uniform_size, gain.uniform), (sizes, gain.per_layer))
        )
        report["per_layer"]["tokens_per_second"] = [even, split]
        say(f"predicted there: {split:.0f} tok/s, {even:.0f} with equal layers")
    say(f"--device-buffer-size {','.join(map(str, sizes))}")


def _sglang(
    args: argparse.Namespace,
    report: dict,
    trace: Trace,
    deployment: Deployment | None,
    chosen: int,
) -> None:
    """SGLang's flags for the chosen B, and the host memory that it takes."""
    requests = deployment.num_requests(chosen) if deployment else args.max_running_requests or 1
    flags = SGLangFlags(
        trace.positions.shape[3], chosen, args.max_model_len or int(trace.seq_lens.max()), requests
    )
    report["sglang"] = flags.report()
    say(f"SGLang: {flags.config_flag()}")
    if args.record_bytes:
        num_layers = args.layers or trace.positions.shape[1]
        needed = flags.host_bytes(num_layers, args.record_bytes)
        report["sglang"]["host_bytes"] = needed
        say(
            f"pinned host memory: {needed / GIB:.1f} GiB in each rank, for {requests} requests of "
            f"{flags.max_model_len} tokens"
        )
        if args.host_gib is not None and needed > args.host_gib * GIB:
            say(f"warning: more than --host-gib {args.host_gib:g}; host_to_device_ratio is whole")
    if args.model:
        report["sglang"]["launch"] = flags.launch_line(args.model)
        say(report["sglang"]["launch"])


def _plot(
    args: argparse.Namespace,
    report: dict,
    trace: Trace,
    curves: MissCurves,
    grid: Sequence[int],
    deployment: Deployment | None,
    best: int | None,
) -> None:
    """Saves the figure, and its data as JSON, in the folder --plot."""
    from minihisparse.plots import save
    from minihisparse.trace_figures import plot_sizing

    curve, layers = [], {"device_buffer_size": grid, "least": [], "most": []}
    for b in grid:
        rate, by_layer = curves.miss_rate(b), curves.layer_miss_rates(b)
        layers["least"].append(min(by_layer))
        layers["most"].append(max(by_layer))
        point = {"device_buffer_size": b, "miss_rate": rate}
        curve.append(point | (deployment.predict(b, rate) if deployment else {}))
    config = config_line(args.file, trace)
    if deployment:
        cost = deployment.cost
        config += f", {cost.num_layers} layers, records of {cost.record_bytes} bytes"
    data = {
        "config": config,
        "curve": curve,
        "engine": report["rows"],
        "layers": layers,
        "best": best,
    }
    path = save(plot_sizing(data), data, Path(args.plot) / "size.png")
    say(f"figure: {path}")
