"""The flags of `trace record`, `trace replay` and `trace size`; those of the engine, which `record`
has as well, are in `flags.py`.

To read flags, nothing is loaded that needs Numba, as a replay does. This file deliberately does not
know traces: what a flag must be for a given one, its command checks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from minihisparse.cost_model import BOOKKEEPING_US
from minihisparse.flags import (
    add_eager_flag,
    add_output_flags,
    add_plot_flag,
    add_prompt_flags,
    add_prompt_tokens_flag,
    add_sampling_flags,
    add_seed_flag,
    counts,
    read_list,
)
from minihisparse.replay_command import NAMES


def add_record_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of `trace record` but the engine's."""
    help = "the trace, a safetensors file"
    parser.add_argument("--out", metavar="FILE", required=True, help=help)
    add_prompt_flags(parser)
    add_prompt_tokens_flag(parser)
    add_sampling_flags(parser, stop=False)
    add_eager_flag(parser)


def add_replay_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of `trace replay`."""
    parser.add_argument("file", metavar="FILE", help="a trace")
    add_plot_flag(parser)
    parser.add_argument("--per-layer", action="store_true", help="how each layer does")
    group = parser.add_argument_group(
        "caches", "all combinations; default: those of Figure 6, and lru, clock, lfu at 2K"
    )
    names = ", ".join(NAMES)
    group.add_argument("--policies", type=lambda text: text.split(","), help=f"a list of {names}")
    group.add_argument(
        "--device-buffer-size", type=counts, metavar="N[,N...]", help="slots, each for all layers"
    )
    help = "leave the first N steps out of the rates, where caches fill up (0)"
    group.add_argument("--warmup-steps", type=int, default=0, metavar="N", help=help)
    add_seed_flag(parser)
    add_output_flags(parser)


def add_size_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of `trace size`."""
    parser.add_argument("file", metavar="FILE", help="a trace")
    parser.add_argument("--plot", metavar="DIR", help="a figure, and its data as JSON, go there")
    group = parser.add_argument_group("misses")
    group.add_argument(
        "--device-buffer-size",
        type=buffer_sizes,
        metavar="N[,N...]",
        help="replay the engine's own rule at these B (K to 8K)",
    )
    help = "leave the first N steps out, where caches fill up (0)"
    group.add_argument("--warmup-steps", type=int, default=0, metavar="N", help=help)

    group = parser.add_argument_group("cost", "needed to predict: record bytes, a link, step times")
    group.add_argument("--record-bytes", type=number(int), help="KV of a token in one layer")
    help = "of the model, if it has others than the trace"
    group.add_argument("--layers", type=number(int), metavar="N", help=help)
    help = "of a memcpy of pinned memory to the GPU (measured, where there is a GPU)"
    group.add_argument("--link-gb-per-s", type=number(float), metavar="X", help=help)
    help = "step times: the JSON of a `bench decode`, of full KV at two batch sizes or more"
    group.add_argument("--steps", metavar="FILE", help=help)
    help = "of that file, only rows with prompts of N tokens"
    group.add_argument("--input-len", type=number(int), metavar="N", help=help)
    help = "instead: a step of full KV, whatever its requests"
    group.add_argument("--fixed-us", type=number(float, 0), metavar="X", help=help)
    help = "and for each request"
    group.add_argument("--per-request-us", type=number(float, 0), metavar="X", help=help)
    group.add_argument(
        "--bookkeeping-us",
        type=number(float, 0),
        metavar="X",
        help=f"Resolve without IO, a layer, but for its scan of slots (from --steps, or "
        f"{BOOKKEEPING_US:g})",
    )

    group = parser.add_argument_group("requests", "what limits them; at least one, to predict")
    help = "device memory for slots, tables and selector"
    group.add_argument("--hbm-budget-gib", type=number(float), metavar="G", help=help)
    group.add_argument("--host-gib", type=number(float), metavar="G", help="host memory for KV")
    help = "clients"
    group.add_argument("--max-running-requests", type=number(int), metavar="N", help=help)
    help = "of a request (the trace's longest)"
    group.add_argument("--max-model-len", type=number(int), metavar="N", help=help)
    group.add_argument(
        "--selector-bytes-per-token",
        type=number(int, 0),
        default=0,
        metavar="N",
        help="on the device, all layers; Quest: record bytes * layers / 16 (0)",
    )

    group = parser.add_argument_group("results")
    help = "share slots out among layers, by their curves"
    group.add_argument("--per-layer", action="store_true", help=help)
    help = "in all layers together (layers * best B)"
    group.add_argument("--total-slots", type=number(int), metavar="N", help=help)
    help = "another trace, to measure the split on (else: sized on one half, measured on the other)"
    group.add_argument("--held-out", metavar="FILE", help=help)
    group.add_argument("--model", metavar="NAME", help="to name in SGLang's launch line")
    add_output_flags(group)


# ---- types of values, for argparse ----


def buffer_sizes(text: str) -> list[int]:
    """ "512,1024" -> [512, 1024]. Which B there can be, only the trace says."""
    return read_list(text, int, lambda size: True, "numbers like 512,1024")


def number(kind: type, least: float | None = None) -> Callable[[str], float]:
    """A type: a finite number above 0, or from `least` on."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if not (0 < value if least is None else least <= value) or value == float("inf"):
            limit = "above 0" if least is None else f"from {least} on"
            raise argparse.ArgumentTypeError(f"{text!r} is not a number {limit}")
        return value

    return parse
