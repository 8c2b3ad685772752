"""What the commands on traces say of a trace: a line on stderr, a field of the report, a title."""

from __future__ import annotations

import sys
from pathlib import Path

from minihisparse.trace import Trace


def say(text: str) -> None:
    """Prints on stderr: stdout is for the report, one JSON object."""
    print(text, file=sys.stderr)


def report_trace(report: dict, file: str | Path, trace: Trace) -> None:
    """Prints a line on stderr; report["trace"] gets the same: file, bytes, sizes, metadata.

    longest: most tokens of a request.
    """
    steps, layers, requests, top_k = trace.positions.shape
    lens = trace.seq_lens[trace.seq_lens > 0].tolist() or [0]
    report["trace"] = {
        "file": str(file),
        "bytes": Path(file).stat().st_size,
        "steps": steps,
        "layers": layers,
        "requests": requests,
        "top_k": top_k,
        "longest": max(lens),
        "metadata": dict(trace.metadata),
    }
    about = [
        *_names(trace),
        f"{steps} steps",
        f"{layers} layers",
        f"{requests} requests",
        f"K = {top_k}",
        f"{min(lens)} to {max(lens)} tokens",
        f"{report['trace']['bytes'] / 2**20:.1f} MiB",
    ]
    say(f"{file}: " + ", ".join(about))
    if trace.is_unfinished:
        say(f"its recording was cut off: these are its whole steps, {steps}")


def config_line(file: str | Path, trace: Trace) -> str:
    """What a figure shows, for its title."""
    longest = int(trace.seq_lens.max())
    return ", ".join(
        [*_names(trace), f"K = {trace.positions.shape[3]}", f"{longest} tokens", Path(file).name]
    )


def _names(trace: Trace) -> list[str]:
    names = (trace.metadata.get(key) for key in ("model", "selector"))
    return [name for name in names if name]
