"""`bench resolve`: the time of a Resolve call, with and without IO, beside the limit of the link.

It needs a GPU, and no model: `resolve_case.py` makes tables with a known number of misses. Each
point (batch, misses, record bytes, K, B) is measured thus, for every rung of the ladder:

    check     one call against resolve_torch, to the bit, every record byte included: what is wrong
              is never timed
    graphs    two CUDA graphs: both restore the tables of all layers, then one calls Resolve for a
              few of them, the other for many
    time      the graphs take turns, back to back, so that the GPU never waits for Python; the
              difference of their times over the difference of their calls is one call: what it
              costs to restore the tables and to launch a graph cancels out

The limit is the time of all missed bytes at the speed of a large memcpy of the same pinned pool, in
the same run. Median and 10th to 90th percentile are over the pairs of replays.

Simplified: nothing else runs in between, so most tables come from the GPU's L2 cache; and each
replay reads the same host rows, so where they are few, the CPU's caches may have them.

It deliberately does not know models, selectors or the engine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import groupby, pairwise, product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minihisparse import plots
from minihisparse.bench_engine import check_counts
from minihisparse.config import MAX_DEVICE_BUFFER_SIZE, choose_device
from minihisparse.host_store import HostPool, free_host_bytes
from minihisparse.kernels.resolver import MAX_POSITIONS_PER_THREAD, RUNGS, Resolver
from minihisparse.resolve_case import PAGE_SIZE, Case, Point, make_pool
from minihisparse.stats import environment_report

BATCH_SIZES, MISSES = [1, 4, 16, 64], [0, 64, 256, 1024]
PAPER_BATCH = 16
HOST_POOL_BYTES = 2**30
NUM_LAYERS, FEWEST_CALLS = 24, 4  # so many calls at most, and at least, are in the longer graph
REPLAY_US = 20_000  # what the longer graph should take at most


def bench_resolve(args: argparse.Namespace, report: dict) -> None:
    """Prints a table and fills `report["rows"]`, whose keys `make_row` lists; draws for `--plot`.

    Raises ValueError or MemoryError, before anything is measured, for what cannot be.
    """
    points, rungs = checked(args)
    if args.plot is not None:  # what is missing is better known now than after the run
        plots.new_figure(1, 1)
        Path(args.plot).mkdir(parents=True, exist_ok=True)
    device = choose_device(args.device)[0] if torch.cuda.is_available() else torch.device("cpu")
    if device.type != "cuda":
        why = f"--device {args.device} is none" if torch.cuda.is_available() else "torch finds none"
        raise ValueError(
            f"bench resolve measures a GPU, and {why}; tutorial 04 runs the same kernels "
            "simulated, on any machine"
        )
    with torch.cuda.device(device):
        check_memory(points, torch.cuda.mem_get_info(device)[0])
        run(args, points, rungs, device, report)
    if args.plot is not None:
        for name, data in figures(report):
            path = plots.save(plots.plot_resolve(data), data, Path(args.plot) / name)
            print(f"saved {path}", file=sys.stderr)


# ---- what is asked for ----


def checked(args: argparse.Namespace) -> tuple[list[Point], list[str]]:
    """The points and the rungs. Raises ValueError that names the flag, the value and its limit."""
    rungs = args.rungs.split(",")
    for rung in rungs:
        if rung not in RUNGS:
            raise ValueError(f"--rungs: {rung!r} is not one of: {', '.join(RUNGS)}")
    check_counts(args, "num_iters")
    if args.plot is not None and "fused" not in rungs:
        raise ValueError("--plot: only the rung 'fused' can leave out IO; see --rungs")
    if args.blocks_per_request is not None:
        check_counts(args, "blocks_per_request")
        if args.blocks_per_request > 1024:
            raise ValueError(f"--blocks-per-request {args.blocks_per_request} is more than 1024")
        if "fused" not in rungs:
            raise ValueError("--blocks-per-request: only the rung 'fused' has it; see --rungs")
    threads = args.swap_in_block_size
    if threads is not None:
        if threads not in range(32, 1025, 32):
            raise ValueError(f"--swap-in-block-size {threads} is not a multiple of 32 in 32..1024")
        if set(rungs) == {"one_thread"}:
            raise ValueError("--swap-in-block-size: the rung 'one_thread' has none; see --rungs")
    if args.points is None:
        batch_sizes = BATCH_SIZES if args.batch_sizes is None else args.batch_sizes
        misses = MISSES if args.misses is None else args.misses
        pairs, flag = list(product(batch_sizes, misses)), "--misses"
    elif args.batch_sizes is None and args.misses is None:
        pairs, flag = args.points, "--points"
    else:
        raise ValueError("--points and --batch-sizes or --misses set the same things; use one")
    points = [
        Point(batch, misses, *sizes)
        for sizes in product(args.record_bytes, args.top_k, args.device_buffer_size)
        for batch, misses in pairs
    ]
    for point in points:
        slots = point.device_buffer_size
        if slots > MAX_DEVICE_BUFFER_SIZE:
            raise ValueError(
                f"--device-buffer-size {slots} is more than {MAX_DEVICE_BUFFER_SIZE} "
                "(lru_slots is int16)"
            )
        if point.top_k > slots:
            raise ValueError(f"--top-k {point.top_k} is more than --device-buffer-size {slots}")
        if threads is not None and point.top_k > MAX_POSITIONS_PER_THREAD * threads:
            raise ValueError(
                f"--swap-in-block-size {threads}: a thread can have {MAX_POSITIONS_PER_THREAD} "
                f"positions, so --top-k {point.top_k} needs more threads"
            )
        if point.misses > point.top_k:
            raise ValueError(
                f"{flag}: {point.misses} misses per request are more than --top-k {point.top_k}"
            )
        if point.record_bytes % 4:
            raise ValueError(f"--record-bytes {point.record_bytes} is not a multiple of 4")
        if point.record_bytes * PAGE_SIZE > HOST_POOL_BYTES:
            raise ValueError(
                f"--record-bytes {point.record_bytes} is more than {HOST_POOL_BYTES // PAGE_SIZE}: "
                f"the host pool of {HOST_POOL_BYTES} bytes holds no page of {PAGE_SIZE} records"
            )
    return points, rungs


def device_bytes(point: Point) -> int:
    """Device memory of a point, about: records, tables, and what is needed to make and check them.

    Per slot: 12 bytes in each layer's tables, and some 200 for sorting 4 B numbers.
    """
    slots = point.device_buffer_size
    records = (slots + 1) * point.record_bytes
    tables = NUM_LAYERS * (4 * point.top_k + 12 * slots) + 200 * slots
    return max(point.batch * (records + tables) + 2 * records, HOST_POOL_BYTES)


def check_memory(points: Sequence[Point], free_device_bytes: int) -> None:
    """Raises MemoryError, with both numbers, if the GPU or the host has too little free."""
    largest = max(points, key=device_bytes)
    if device_bytes(largest) > free_device_bytes:
        raise MemoryError(
            f"batch {largest.batch} with --device-buffer-size {largest.device_buffer_size} and "
            f"--record-bytes {largest.record_bytes} needs {device_bytes(largest) / 2**30:.2f} GiB "
            f"of GPU memory, only {free_device_bytes / 2**30:.2f} GiB are free; lower one "
            "of them, or free some"
        )
    free = free_host_bytes()
    if free is not None and HOST_POOL_BYTES > free:
        raise MemoryError(
            f"bench resolve pins {HOST_POOL_BYTES / 2**30:.2f} GiB of host memory, only "
            f"{free / 2**30:.2f} GiB are free"
        )


# ---- the measurement ----


def run(
    args: argparse.Namespace,
    points: Sequence[Point],
    rungs: Sequence[str],
    device: torch.device,
    report: dict,
) -> None:
    """Measures every point with every rung; prints and reports each as soon as it is known."""
    report.update(environment_report(args.command, device, torch.uint8, args.seed))
    report["numba"], report["numba_cuda"] = version("numba"), version("numba-cuda")
    for name in ("swap_in_block_size", "blocks_per_request", "num_iters"):
        report[name] = getattr(args, name)
    report["rows"] = []

    def measure(point: Point, rung: str, pool: HostPool) -> dict:
        case = Case(point, pool, args.seed, device, NUM_LAYERS)
        settings = {"rung": rung, "swap_in_block_size": args.swap_in_block_size}
        if rung == "fused":
            settings["blocks_per_request"] = args.blocks_per_request
        times = []
        for skip_io in (False, True) if rung == "fused" else (False,):  # the others have no switch
            resolver = case.resolver(**settings, skip_io=skip_io)
            case.check(resolver)
            times.append(time_calls(case, resolver, args.num_iters))
        return make_row(point, rung, *times, link_gb_per_s=report["link_gb_per_s"])

    def measure_all(record_bytes: int, points: list[Point], bar: tqdm) -> None:
        pool = make_pool(record_bytes, HOST_POOL_BYTES, args.seed, device)
        if "link_gb_per_s" not in report:
            report["link_gb_per_s"] = round(measure_link(pool.records), 3)
            tqdm.write(card(report))
            tqdm.write(HEAD)
        for point, rung in product(points, rungs):
            bar.set_description(f"{rung}, batch {point.batch}, {point.misses} misses")
            row = measure(point, rung, pool)
            report["rows"].append(row)
            tqdm.write(line(row))
            bar.update()

    with tqdm(total=len(points) * len(rungs), unit="point", disable=args.disable_tqdm) as bar:
        for record_bytes, group in groupby(points, key=lambda point: point.record_bytes):
            measure_all(record_bytes, list(group), bar)


def measure_link(host_records: Tensor) -> float:
    """GB/s (10^9 bytes) of a memcpy of pinned memory to the GPU; the median of nine."""
    target = torch.empty_like(host_records, device="cuda")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
    for mark in marks:
        target.copy_(host_records, non_blocking=True)
        mark.record()
    marks[-1].synchronize()
    seconds = [1e-3 * a.elapsed_time(b) for a, b in pairwise(marks)]
    return host_records.nbytes / statistics.median(seconds[1:]) / 1e9


def time_calls(case: Case, resolver: Resolver, num_iters: int) -> list[float]:
    """Microseconds of a call in a CUDA graph, once for each of `num_iters` pairs of replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    case.restore()
    start.record()
    case.call(resolver, 0)
    end.record()
    end.synchronize()
    fitting = int(REPLAY_US / max(1.0, 1e3 * start.elapsed_time(end)))
    many = min(max(fitting, FEWEST_CALLS), len(case.before.positions))
    few = many // 4
    graphs = []
    for num_calls in (few, many):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            case.restore()
            for layer in range(num_calls):
                case.call(resolver, layer)
        graphs.append(graph)
    for graph in 3 * graphs:  # warm-up
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2 * num_iters + 1)]
    marks[0].record()
    for mark, graph in zip(marks[1:], num_iters * graphs, strict=True):
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    times = [1e3 * a.elapsed_time(b) for a, b in pairwise(marks)]
    return [(b - a) / (many - few) for a, b in zip(times[::2], times[1::2], strict=True)]


# ---- rows, table, figures ----

HEAD = (
    f"{'rung':<10}{'batch':>6}{'misses':>7}{'bytes':>7}{'K':>6}{'B':>6}"
    f"{'us':>10}{'10%..90%':>18}{'no IO, us':>11}{'GB/s':>7}{'limit, us':>11}"
)


def make_row(
    point: Point,
    rung: str,
    times: Sequence[float],
    times_no_io: Sequence[float] | None = None,
    *,
    link_gb_per_s: float,
) -> dict:
    """One measurement: {rung batch misses record_bytes top_k device_buffer_size us us_p10 us_p90
    us_no_io us_no_io_p10 us_no_io_p90 gb_per_s limit_us}.

    Times are microseconds per call, `us` and `us_no_io` medians; null where a rung has no switch
    for IO. gb_per_s: the missed bytes by the whole call's time. limit_us: by the link's speed.
    """
    row: dict = {"rung": rung, **point._asdict()}
    for name, values in (("us", times), ("us_no_io", times_no_io)):
        quantiles = np.percentile(values, [50, 10, 90]).round(3).tolist() if values else [None] * 3
        row[name], row[f"{name}_p10"], row[f"{name}_p90"] = quantiles
    num_bytes = point.batch * point.misses * point.record_bytes
    row["gb_per_s"] = round(num_bytes / row["us"] / 1e3, 3)  # bytes per us are MB/s
    row["limit_us"] = round(num_bytes / link_gb_per_s / 1e3, 3)
    return row


def card(report: dict) -> str:
    return (
        f"{report['device_name']}, torch {report['torch']}, numba-cuda {report['numba_cuda']}; "
        f"link {report['link_gb_per_s']:.1f} GB/s (a pinned memcpy of about "
        f"{HOST_POOL_BYTES / 2**30:g} GiB)"
    )


def line(row: dict) -> str:
    """A row as a line under HEAD."""
    spread = f"{row['us_p10']:.1f}..{row['us_p90']:.1f}"
    no_io = "-" if row["us_no_io"] is None else f"{row['us_no_io']:.1f}"
    return (
        f"{row['rung']:<10}{row['batch']:>6}{row['misses']:>7}{row['record_bytes']:>7}"
        f"{row['top_k']:>6}{row['device_buffer_size']:>6}{row['us']:>10.1f}{spread:>18}"
        f"{no_io:>11}{row['gb_per_s']:>7.1f}{row['limit_us']:>11.1f}"
    )


def figures(report: dict) -> Iterator[tuple[str, dict]]:
    """A file name and the data of `plot_resolve` per record size, K and number of misses.

    Over B/K: at the batch that was measured with the most B; of several, the paper's (Figure 7) if
    it is there, else the largest. Over batch likewise: the paper's 2K, else the smallest.
    """
    split = [row for row in report["rows"] if row["us_no_io"] is not None]
    for record_bytes, top_k, misses in dict.fromkeys(
        (row["record_bytes"], row["top_k"], row["misses"]) for row in split
    ):
        wanted = {"record_bytes": record_bytes, "top_k": top_k, "misses": misses}
        rows = [row for row in split if wanted.items() <= row.items()]
        batches = [row["batch"] for row in rows]
        sizes = [row["device_buffer_size"] for row in rows]
        batch = max(batches, key=lambda b: (batches.count(b), b == PAPER_BATCH, b))
        size = max(sizes, key=lambda s: (sizes.count(s), s == 2 * top_k, -s))
        yield (
            f"resolve-K{top_k}-{record_bytes}B-{misses}misses.png",
            {
                "config": f"{report['device_name']}, K = {top_k}, records of {record_bytes} bytes, "
                f"{misses} misses per request, link {report['link_gb_per_s']:.1f} GB/s",
                "by_ratio": sorted(
                    (row for row in rows if row["batch"] == batch),
                    key=lambda row: row["device_buffer_size"],
                ),
                "by_batch": sorted(
                    (row for row in rows if row["device_buffer_size"] == size),
                    key=lambda row: row["batch"],
                ),
            },
        )
