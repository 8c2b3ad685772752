"""Flags that several commands have, in the groups in which `--help` shows them, and the types of
their values.

To read flags, nothing is loaded that needs Numba or matplotlib. This file deliberately does not
know which command has which flags (`cli.py`), nor what is done with them (`command_inputs.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from minihisparse.assembly import SELECTORS
from minihisparse.config import parse_device_buffer_size

T = TypeVar("T")

# ---- the engine ----


def add_engine_flags(parser: argparse.ArgumentParser, model_required: bool) -> None:
    """The model and where it runs."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", required=model_required, help="a Hugging Face model folder")
    group.add_argument("--dtype", default="auto", help="auto, fp32, bf16 or fp16")
    group.add_argument("--max-model-len", type=int, help="most tokens of a request")
    group.add_argument(
        "--allow-beyond-model-limit",
        action="store_true",
        help="let --max-model-len be more than the model was made for",
    )
    group.add_argument("--chat-template", help="a file, or the template itself")
    add_process_flags(group)


def add_process_flags(group) -> None:
    """What a command needs that has no model, but a device."""
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_seed_flag(group)
    add_output_flags(group)


def add_seed_flag(group) -> None:
    group.add_argument("--seed", type=int, default=0)


def add_output_flags(group) -> None:
    """Every command has these: what goes to stderr, and where the report goes."""
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bars")
    group.add_argument("--output-json", metavar="FILE", help="write the JSON object there too")


def add_plot_flag(group) -> None:
    help = "figures, and their data as JSON, go there"
    group.add_argument("--plot", metavar="DIR", help=help)


# ---- the cache ----


def add_hisparse_flags(parser: argparse.ArgumentParser) -> None:
    """The selector, and the fields of HiSparseConfig, one by one or as JSON."""
    group = parser.add_argument_group("cache")
    group.add_argument("--selector", choices=SELECTORS, default="quest")
    group.add_argument(
        "--selector-weights",
        metavar="FILE",
        help="add-on with the trained selector (the shipped one, for SmolLM2-135M-Instruct)",
    )
    group.add_argument("--hisparse-config", metavar="JSON", help="the next eight in one, as JSON")
    group.add_argument("--top-k", type=int, help="positions selected per step and layer (256)")
    group.add_argument(
        "--device-buffer-size",
        type=layer_sizes,
        metavar="N[,N...]",
        help="slots per request and layer (2K): one number, or one per layer",
    )
    group.add_argument("--cache-size-mb", type=float, help="instead: MiB per request")
    group.add_argument("--host-to-device-ratio", type=float, help="host pool over device slots")
    group.add_argument("--page-size", type=int, help="tokens per page (16)")
    group.add_argument(
        "--swap-in-block-size",
        type=int,
        help="threads per block of the Resolve kernel (one per slot, at most 1024)",
    )
    group.add_argument("--index-dtype", help="of DSA's index keys: auto, the model's, or fp8")
    group.add_argument(
        "--enable-layer-prefetch",
        action=argparse.BooleanOptionalAction,
        help="fetch early for layers that share a selection (where the selector shares)",
    )


def add_cache_flag(parser: argparse.ArgumentParser) -> None:
    """For commands that run one of the two caches."""
    help = "where KV lives: host pool and GPU cache, or all on the device"
    parser.add_argument("--cache", choices=["hisparse", "full"], default="hisparse", help=help)


# ---- the batch ----


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    add_rows_flag(group)
    group.add_argument(
        "--hbm-budget-gib",
        type=float,
        help="device memory for KV, selector and tables (as much as the requests need)",
    )
    add_step_flags(group)


def add_rows_flag(group) -> None:
    help = "most requests in a batch (8, or what the budget holds)"
    group.add_argument("--max-running-requests", type=int, help=help)


def add_step_flags(group) -> None:
    """How steps are run and take turns."""
    add_eager_flag(group)
    help = "prompt tokens that are prefilled before it is the others' turn to decode (8192)"
    group.add_argument("--max-prefill-tokens", type=int, help=help)


def add_eager_flag(group) -> None:
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")


# ---- the requests ----


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument("--prompt", action="append", help="text; may be given several times")
    group.add_argument("--prompt-file", help="a file whose whole text is one more prompt")


def add_prompt_tokens_flag(parser: argparse.ArgumentParser) -> None:
    help = "cut the prompt to one request of each of these lengths, in tokens"
    parser.add_argument("--prompt-tokens", type=counts, metavar="N[,N...]", help=help)


def add_sharing_flag(parser: argparse.ArgumentParser) -> None:
    """For commands that run several prompts at once; a lone one has nobody to share with."""
    parser.add_argument(
        "--disable-prefix-sharing",
        action="store_true",
        help="prefill every prompt as a whole, into host pages of its own, also where it begins "
        "like another (SGLang: --disable-radix-cache)",
    )


def add_length_flag(parser: argparse.ArgumentParser, default: int) -> None:
    names = ("--max-new-tokens", "--max-tokens")
    parser.add_argument(*names, dest="max_new_tokens", type=int, default=default)


def add_sampling_flags(parser: argparse.ArgumentParser, stop: bool = True) -> None:
    """stop: whether there is text in which a string could end the answer."""
    add_length_flag(parser, default=128)
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--sampling-top-k", type=int, default=-1)
    if stop:
        help = "a string that ends the text"
        group.add_argument("--stop", action="append", default=[], help=help)
    group.add_argument("--ignore-eos", action="store_true")


# ---- types of values, for argparse: each raises ArgumentTypeError ----


def read_list(
    text: str, read: Callable[[str], T], allowed: Callable[[T], bool], what: str
) -> list[T]:
    """Values with commas between them. read: raises ValueError; what: for the message."""
    try:
        values = [read(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(map(allowed, values)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what}")
    return values


def counts(text: str, least: int = 1) -> list[int]:
    """ "100,511" -> [100, 511]."""
    what = f"numbers like 100,511, each at least {least}"
    return read_list(text, int, lambda count: count >= least, what)


def sizes(text: str) -> list[float]:
    """ "0.5,8" -> [0.5, 8.0]."""
    what = "numbers like 0.5,8, above 0"
    return read_list(text, float, lambda size: 0 < size < float("inf"), what)


def layer_sizes(text: str) -> int | tuple[int, ...]:
    """ "512" -> 512; "512,768" -> (512, 768), one per layer."""
    try:
        return parse_device_buffer_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
