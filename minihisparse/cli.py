"""The command line: `python -m minihisparse demo | generate | chat | verify | step | bench`.

Flags are SGLang's and vLLM's where they have the thing; `--top-k` is always the selector's K, the
sampler's is `--sampling-top-k`. Progress goes to stderr; the last line on stdout is one JSON
object. Exit codes: 0 done; 1 refused, failed, or not exact; 2 bad usage; 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

from minihisparse import __version__, commands
from minihisparse.assembly import SELECTORS
from minihisparse.config import HiSparseConfig

ERRORS = (OSError, ValueError, MemoryError, RuntimeError, ImportError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = build_parser().parse_args(argv)
    report: dict = {"command": args.command, "version": __version__}
    try:
        if hasattr(args, "hisparse_config"):  # `bench resolve` has no cache to configure
            args.hisparse = hisparse_config(args)
        code = args.run(args, report)
    except KeyboardInterrupt:
        report["interrupted"] = True
        print("interrupted", file=sys.stderr)
        code = 130
    except ERRORS as error:
        report["error"] = " ".join(str(error).split())  # one line
        print(f"error: {report['error']}", file=sys.stderr)
        code = 1
    for key in ("exact", "max_abs_diff"):  # null: this command, or this run, compared nothing
        report.setdefault(key, None)
    line = json.dumps(report, allow_nan=False)
    print(line, flush=True)
    if args.output_json:
        try:
            Path(args.output_json).write_text(line + "\n", encoding="utf-8")
        except OSError as error:
            print(f"error: --output-json: {error}", file=sys.stderr)
            code = code or 1
    return code


def hisparse_config(args: argparse.Namespace) -> HiSparseConfig:
    """From `--hisparse-config` or from the flags of its fields; raises ValueError on both."""
    names = [field.name for field in fields(HiSparseConfig)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.hisparse_config is None:
        return HiSparseConfig(**given)
    if given:
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ValueError(f"--hisparse-config and {flags} set the same things; use one of them")
    return HiSparseConfig.from_json(args.hisparse_config)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="minihisparse", description="A minimal, exact engine for HiSparse.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(
        name: str, run, help: str, of=subparsers, model_required: bool = True
    ) -> argparse.ArgumentParser:
        sub = of.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(run=run)
        _add_engine_flags(sub, model_required)
        return sub

    help = "ask a small real model about a long text, both ways"
    sub = command("demo", commands.demo, help, model_required=False)
    sub.add_argument("--question", default=commands.QUESTION, help="what to ask about the document")
    sub.add_argument(
        "--prompt-file", help="the document; default: a module of the standard library"
    )
    _add_length_flag(sub, default=96)
    _add_eager_flag(sub)

    sub = command("generate", commands.generate, "complete prompts")
    _add_cache_flag(sub)
    _add_batch_flags(sub)
    _add_prompt_flags(sub)
    _add_sampling_flags(sub)

    sub = command("chat", commands.chat, "talk to the model; one message per line")
    _add_cache_flag(sub)
    sub.add_argument("--system", help="a system message to start with")
    _add_sampling_flags(sub)

    sub = command("verify", commands.verify, "compare full-HBM and HiSparse to the bit")
    _add_prompt_flags(sub)
    sub.add_argument(
        "--prompt-tokens",
        type=_counts,
        metavar="N[,N...]",
        help="cut the prompt to one request of each of these lengths, in tokens",
    )
    sub.add_argument(
        "--synthetic-context",
        type=int,
        metavar="N",
        help="in place of a prompt: random KV of N tokens, written straight into both caches",
    )
    sub.add_argument(
        "--check-integrity",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="check every slot of the cache against the host pool after each step",
    )
    _add_length_flag(sub, default=64)
    _add_eager_flag(sub)

    sub = command("step", commands.step, "stop after each layer and look at the cache")
    _add_cache_flag(sub)
    _add_prompt_flags(sub)
    _add_length_flag(sub, default=8)

    help = "measure: `bench decode`, `bench serve`, `bench resolve`"
    bench = subparsers.add_parser("bench", help=help, description=help, allow_abbrev=False)
    benches = bench.add_subparsers(dest="what", required=True, metavar="WHAT")

    help = "throughput and latency of many clients in a closed loop, per cache and budget"
    sub = command("decode", commands.bench_decode, help, of=benches, model_required=False)
    _add_decode_flags(sub)

    help = "what clients see who come at random times, per cache and budget"
    sub = command("serve", commands.bench_serve, help, of=benches)
    _add_serve_flags(sub)

    help = "time Resolve on a GPU, with and without IO, beside the limit of the link; no model"
    sub = benches.add_parser("resolve", help=help, description=help, allow_abbrev=False)
    sub.set_defaults(run=commands.bench_resolve)
    _add_process_flags(sub)
    _add_resolve_flags(sub)
    return parser


def _add_engine_flags(parser: argparse.ArgumentParser, model_required: bool) -> None:
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
    _add_process_flags(group)

    group = parser.add_argument_group("cache")
    group.add_argument("--selector", choices=SELECTORS, default="quest")
    group.add_argument(
        "--selector-weights",
        metavar="FILE",
        help="add-on with the trained selector (the shipped one, for SmolLM2-135M-Instruct)",
    )
    group.add_argument("--hisparse-config", metavar="JSON", help="the next eight in one, as JSON")
    group.add_argument("--top-k", type=int, help="positions selected per step and layer (256)")
    group.add_argument("--device-buffer-size", type=int, help="slots per request and layer (2K)")
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


def _add_process_flags(group) -> None:
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bars")
    group.add_argument("--output-json", metavar="FILE", help="write the JSON object there too")


def _add_cache_flag(parser: argparse.ArgumentParser) -> None:
    help = "where KV lives: host pool and GPU cache, or all on the device"
    parser.add_argument("--cache", choices=["hisparse", "full"], default="hisparse", help=help)


def _add_batch_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    group.add_argument(
        "--max-running-requests",
        type=int,
        help="most requests in a batch (8, or what the budget holds)",
    )
    group.add_argument(
        "--hbm-budget-gib",
        type=float,
        help="device memory for KV, selector and tables (as much as the requests need)",
    )
    _add_step_flags(group)


def _add_eager_flag(group) -> None:
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")


def _add_step_flags(group) -> None:
    """How steps are run and take turns."""
    _add_eager_flag(group)
    help = "prompt tokens that are prefilled before it is the others' turn to decode (8192)"
    group.add_argument("--max-prefill-tokens", type=int, help=help)


def _add_decode_flags(parser: argparse.ArgumentParser) -> None:
    group = _add_point_flags(parser)
    parser.set_defaults(input_len=[1024])
    group.add_argument(
        "--concurrency",
        type=_counts,
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
    _add_step_flags(group)
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


def _add_serve_flags(parser: argparse.ArgumentParser) -> None:
    group = _add_point_flags(parser)
    group.add_argument(
        "--request-rate",
        type=_sizes,
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
    group.add_argument(
        "--max-running-requests",
        type=int,
        help="most requests in a batch (8, or what the budget holds)",
    )
    _add_step_flags(group)


def _add_point_flags(parser: argparse.ArgumentParser):
    """What both benches of the engine have; returns the group of points."""
    parser.add_argument("--plot", metavar="DIR", help="figures, and their data as JSON, go there")
    group = parser.add_argument_group("points", "lists; all combinations are measured")
    help = "full, hisparse, prefetch, no-io; a list"
    group.add_argument("--modes", default="full,hisparse", help=help)
    group.add_argument(
        "--hbm-budget-gib",
        type=_sizes,
        metavar="G[,G...]",
        help="device memory for KV, selector and tables",
    )
    group.add_argument("--input-len", type=_counts, metavar="N[,N...]", help="prompt tokens (1024)")
    return group


def _add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt")
    group.add_argument("--prompt", action="append", help="text; may be given several times")
    group.add_argument("--prompt-file", help="a file whose whole text is one more prompt")


def _add_length_flag(parser: argparse.ArgumentParser, default: int) -> None:
    flags = ("--max-new-tokens", "--max-tokens")
    parser.add_argument(*flags, dest="max_new_tokens", type=int, default=default)


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    _add_length_flag(parser, default=128)
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--sampling-top-k", type=int, default=-1)
    group.add_argument("--stop", action="append", default=[], help="a string that ends the text")
    group.add_argument("--ignore-eos", action="store_true")


def _add_resolve_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("points", "lists; all combinations are measured")
    numbers = {"type": _counts, "metavar": "N[,N...]"}
    group.add_argument("--batch-sizes", **numbers, help="requests (1,4,16,64)")
    missed = numbers | {"type": partial(_counts, least=0)}
    group.add_argument("--misses", **missed, help="per request (0,64,256,1024)")
    group.add_argument(
        "--points",
        type=_points,
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
    parser.add_argument("--plot", metavar="DIR", help="figures, and their data as JSON, go there")


def _counts(text: str, least: int = 1) -> list[int]:
    """ "100,511" -> [100, 511]."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < least:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of numbers like 100,511, each at least {least}"
        )
    return counts


def _sizes(text: str) -> list[float]:
    """ "0.5,8" -> [0.5, 8.0]."""
    try:
        sizes = [float(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or not all(0 < size < float("inf") for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 0.5,8, above 0")
    return sizes


def _points(text: str) -> list[tuple[int, int]]:
    """ "1:0,128:1024" -> [(1, 0), (128, 1024)]."""
    try:
        pairs = [pair.split(":") for pair in text.split(",")]
        points = [(int(batch), int(misses)) for batch, misses in pairs]
    except ValueError:
        points = []
    if not points or any(batch < 1 or misses < 0 for batch, misses in points):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of BATCH:MISSES like 1:0,128:1024, batches at least 1"
        )
    return points
