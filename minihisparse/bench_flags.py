"""The flags of `bench decode`, `bench serve` and `bench resolve`; those of the engine, which the
first two have as well, are in `flags.py`.

To read flags, nothing is loaded that needs Numba or matplotlib, as the benches do. This file
deliberately does not know them: which flags go together, each bench checks.
"""

from __future__ import annotations

import argparse
from functools import partial

from minihisparse.flags import (
    add_plot_flag,
    add_process_flags,
    add_rows_flag,
    add_step_flags,
    counts,
    read_list,
    sizes,
)


def add_decode_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of `bench decode` but the engine's."""
    group = _add_point_flags(parser)
    parser.set_defaults(input_len=[1024])
    group.add_argument(
        "--concurrency",
        type=counts,
        metavar="N[,N...]",
        help="clients (1; with a budget: as many as it holds)",
    )
    group = parser.add_argument_group("work")
    group.add_argument("--output-len", type=int, default=64, help="new tokens per request (64)")
    group.add_argument("--num-requests", type=int, help="in all (one per client)")
    group.add_argument("--num-iters", type=int, default=1, help="runs of each point (1)")
    group.add_argument(
        "--compare",
        choices=["transformers"],
        help="time this engine too, per --input-len and --concurrency",
    )
    add_step_flags(group)
    group.add_argument(
        "--resolve-latency", action="store_true", help="time each layer's Resolve in the graph"
    )
    group = parser.add_argument_group("without a real model")
    group.add_argument(
        "--random-weights", metavar="CONFIG", help="a config.json, in place of --model"
    )
    group.add_argument("--num-layers", type=int, help="only so many layers of that model")
    group.add_argument(
        "--selections",
        metavar="FILE",
        help="a trace, or synthetic:miss=RATE (misses over K), in place of the selector's choice",
    )
    group.add_argument(
        "--synthetic-context",
        action="store_true",
        help="random KV in place of a prefill (always with --random-weights)",
    )


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of `bench serve` but the engine's."""
    group = _add_point_flags(parser)
    group.add_argument(
        "--request-rate",
        type=sizes,
        metavar="X[,X...]",
        help="requests per second, a Poisson process (1)",
    )
    group = parser.add_argument_group("work")
    group.add_argument("--output-len", type=int, help="new tokens per request (64)")
    group.add_argument("--num-requests", type=int, help="in all (64)")
    group.add_argument(
        "--arrivals",
        metavar="FILE",
        help="instead of rates, lengths and number: lines of seconds, prompt tokens, new tokens",
    )
    add_rows_flag(group)
    add_step_flags(group)


def _add_point_flags(parser: argparse.ArgumentParser):
    """What both benches of the engine have; returns the group of points."""
    add_plot_flag(parser)
    group = parser.add_argument_group("points", "lists; all combinations are measured")
    help = "full, hisparse, prefetch, no-io; a list"
    group.add_argument("--modes", default="full,hisparse", help=help)
    group.add_argument(
        "--hbm-budget-gib",
        type=sizes,
        metavar="G[,G...]",
        help="device memory for KV, selector and tables",
    )
    group.add_argument("--input-len", type=counts, metavar="N[,N...]", help="prompt tokens (1024)")
    prefix = parser.add_argument_group("prefix")
    prefix.add_argument(
        "--prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="first tokens that all prompts have in common (0)",
    )
    prefix.add_argument(
        "--enable-prefix-sharing",
        action="store_true",
        help="share them, as the other commands do: one prefill, one copy in host memory",
    )
    return group


def add_resolve_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of `bench resolve`."""
    add_process_flags(parser)
    group = parser.add_argument_group("points", "lists; all combinations are measured")
    numbers = {"type": counts, "metavar": "N[,N...]"}
    group.add_argument("--batch-sizes", **numbers, help="requests (1,4,16,64)")
    missed = numbers | {"type": partial(counts, least=0)}
    group.add_argument("--misses", **missed, help="per request (0,64,256,1024)")
    group.add_argument(
        "--points",
        type=batch_points,
        metavar="R:M[,R:M...]",
        help="instead of the two before: pairs of batch and misses, like 1:0,128:1024",
    )
    group.add_argument("--record-bytes", **numbers, default=[1152], help="(1152)")
    group.add_argument("--top-k", **numbers, default=[2048], help="positions selected, K (2048)")
    group.add_argument("--device-buffer-size", **numbers, default=[4096], help="slots, B (4096)")

    group = parser.add_argument_group("kernel")
    group.add_argument("--rungs", default="fused", help="one_thread, one_block, fused; a list")
    threads = "threads per block (one per slot, at most 1024)"
    group.add_argument("--swap-in-block-size", type=int, help=threads)
    group.add_argument("--blocks-per-request", type=int, help="that copy; default: by the batch")
    parser.add_argument("--num-iters", type=int, default=20, help="pairs of replays per point")
    add_plot_flag(parser)


def batch_points(text: str) -> list[tuple[int, int]]:
    """ "1:0,128:1024" -> [(1, 0), (128, 1024)]: batches and misses. For argparse."""

    def point(part: str) -> tuple[int, int]:
        batch, misses = part.split(":")
        return int(batch), int(misses)

    what = "BATCH:MISSES like 1:0,128:1024, batches at least 1"
    return read_list(text, point, lambda pair: pair[0] >= 1 and pair[1] >= 0, what)
