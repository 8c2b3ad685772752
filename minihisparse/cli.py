"""The command line: `python -m minihisparse demo | generate | chat | verify | step | bench |
trace`.

Flags are SGLang's and vLLM's where they have the thing; `--top-k` is always the selector's K, the
sampler's is `--sampling-top-k`. Progress goes to stderr; the last line on stdout is one JSON
object. Exit codes: 0 done; 1 refused, failed, or not exact; 2 bad usage; 130 interrupted by Ctrl-C.

Which commands there are, and which flags each has, is said here; the flags are in `flags.py`,
`bench_flags.py` and `trace_flags.py`. It deliberately does not know what a command does; to parse
flags, neither Numba nor matplotlib is loaded.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from minihisparse import (
    __version__,
    commands,
    demo_command,
    record_command,
    replay_command,
    sizing_command,
    verify_command,
)
from minihisparse.bench_flags import add_decode_flags, add_resolve_flags, add_serve_flags
from minihisparse.config import HiSparseConfig
from minihisparse.flags import (
    add_batch_flags,
    add_cache_flag,
    add_eager_flag,
    add_engine_flags,
    add_hisparse_flags,
    add_length_flag,
    add_prompt_flags,
    add_prompt_tokens_flag,
    add_sampling_flags,
    add_sharing_flag,
)
from minihisparse.trace_flags import add_record_flags, add_replay_flags, add_size_flags

ERRORS = (OSError, ValueError, MemoryError, RuntimeError, ImportError)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = build_parser().parse_args(argv)
    report: dict = {"command": args.command, "version": __version__}
    try:
        if hasattr(args, "hisparse_config"):  # others have no cache to configure
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
    """Parses into `run`, the command's function, and its flags; `hisparse_config` is among them
    where there is a cache to configure.
    """
    parser = argparse.ArgumentParser(
        prog="minihisparse", description="A minimal, exact engine for HiSparse.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def group(name: str, help: str):
        sub = subparsers.add_parser(name, help=help, description=help, allow_abbrev=False)
        return sub.add_subparsers(dest="what", required=True, metavar="WHAT")

    def bare(name: str, run: Callable, help: str, of=subparsers) -> argparse.ArgumentParser:
        sub = of.add_parser(name, help=help, description=help, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    def command(
        name: str, run: Callable, help: str, of=subparsers, model_required: bool = True
    ) -> argparse.ArgumentParser:
        sub = bare(name, run, help, of)
        add_engine_flags(sub, model_required)
        add_hisparse_flags(sub)
        return sub

    help = "ask a small real model about a long text, both ways"
    sub = command("demo", demo_command.demo, help, model_required=False)
    help = "what to ask about the document"
    sub.add_argument("--question", default=demo_command.QUESTION, help=help)
    help = "the document; default: a module of the standard library"
    sub.add_argument("--prompt-file", help=help)
    add_length_flag(sub, default=96)
    add_eager_flag(sub)

    sub = command("generate", commands.generate, "complete prompts")
    add_cache_flag(sub)
    add_batch_flags(sub)
    add_prompt_flags(sub)
    add_sharing_flag(sub)
    add_sampling_flags(sub)

    sub = command("chat", commands.chat, "talk to the model; one message per line")
    add_cache_flag(sub)
    sub.add_argument("--system", help="a system message to start with")
    add_sampling_flags(sub)

    sub = command("verify", verify_command.verify, "compare full-HBM and HiSparse to the bit")
    add_prompt_flags(sub)
    add_prompt_tokens_flag(sub)
    add_sharing_flag(sub)
    help = "in place of a prompt: random KV of N tokens, written straight into both caches"
    sub.add_argument("--synthetic-context", type=int, metavar="N", help=help)
    help = "check every slot of the cache against the host pool after each step"
    check = argparse.BooleanOptionalAction
    sub.add_argument("--check-integrity", action=check, default=True, help=help)
    add_length_flag(sub, default=64)
    add_eager_flag(sub)

    sub = command("step", commands.step, "stop after each layer and look at the cache")
    add_cache_flag(sub)
    add_prompt_flags(sub)
    add_length_flag(sub, default=8)

    benches = group("bench", "measure: `bench decode`, `bench serve`, `bench resolve`")
    help = "throughput and latency of many clients in a closed loop, per cache and budget"
    add_decode_flags(
        command("decode", commands.bench_decode, help, of=benches, model_required=False)
    )
    help = "what clients see who come at random times, per cache and budget"
    add_serve_flags(command("serve", commands.bench_serve, help, of=benches))
    help = "time Resolve on a GPU, with and without IO, beside the limit of the link; no model"
    add_resolve_flags(bare("resolve", commands.bench_resolve, help, of=benches))

    traces = group("trace", "what was selected: `trace record`, `trace replay`, `trace size`")
    help = "complete prompts, and write every step's selections to a file"
    add_record_flags(command("record", record_command.record, help, of=traces))
    help = "what other caches would have fetched: the paper's Figure 6"
    add_replay_flags(bare("replay", replay_command.replay, help, of=traces))
    help = "which B is best: misses, predicted throughput, flags for this engine and SGLang"
    add_size_flags(bare("size", sizing_command.size, help, of=traces))
    return parser
