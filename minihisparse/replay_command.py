"""`trace replay`: what other caches would have fetched of a trace; the paper's Figure 6.

Prints a table on stderr, a line per cache, and whether the engine's rule, replayed at the B that
was recorded, counts what the engine itself has counted. The report has the same numbers: trace;
rows: a cache each, rates in 0..1; engine: what it counted and what the replay did, per layer;
exact. It does not run a model.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from minihisparse.trace import Trace, read_trace
from minihisparse.trace_report import config_line, report_trace, say

# The caches of Figure 6 and three more: the policy, and B over K.
CACHES = [("last_step", 1), ("random", 2), ("fifo", 2), ("engine", 2), ("belady", 2)]
CACHES += [("engine", 4), ("lru", 2), ("clock", 2), ("lfu", 2)]
NAMES = {  # in the words of the figure
    "last_step": "last step only",
    "random": "random",
    "fifo": "FIFO",
    "engine": "engine's LRU",
    "belady": "Belady",
    "lru": "plain LRU",
    "clock": "CLOCK",
    "lfu": "LFU",
}


def replay(args: argparse.Namespace, report: dict) -> int:
    """Does what the module's docstring says. Exit code 1 if the engine counted otherwise: then this
    is not a trace of that run.

    Raises FileNotFoundError, or ValueError that names the file or the flag.
    """
    from minihisparse.replay import replay as run  # needs Numba, which `record` may do without

    trace = read_trace(args.file)
    report_trace(report, args.file, trace)
    caches = _caches(args, trace)
    if not 0 <= args.warmup_steps < len(trace.positions):
        raise ValueError(
            f"--warmup-steps {args.warmup_steps} is not in 0..{len(trace.positions) - 1}: the "
            f"trace has {len(trace.positions)} steps"
        )
    recorded = trace.recorded_cache
    report["rows"], curves = [], {"by_step": {}, "mean": {}}
    num_layers, top_k = trace.positions.shape[1], trace.positions.shape[3]
    say(f"{'policy':<18}{'B':>7}{'B/K':>6}{'misses':>9}   of a layer: least, most")
    total = (len(caches) + (recorded is not None)) * num_layers
    with tqdm(total=total, unit="layer", disable=args.disable_tqdm) as bar:
        run = partial(run, trace, seed=args.seed, progress=bar.update)
        for policy, size in caches:
            result = run(policy, size)
            row = {
                "policy": policy,
                "device_buffer_size": size,
                "miss_rate": round(result.miss_rate(args.warmup_steps), 6),
                "layer_miss_rates": [
                    round(rate, 6) for rate in result.layer_miss_rates(args.warmup_steps)
                ],
                "hits": int(result.hits.sum()),
                "misses": int(result.misses.sum()),
            }
            report["rows"].append(row)
            both = (result.hits + result.misses).sum(1).clamp(min=1)
            rates = (result.misses.sum(1) / both).tolist()
            times = "" if size == top_k else f"{size / top_k:.4g}"
            label = f"B = {times}K, {NAMES[policy]}"
            curves["by_step"][label] = [round(rate, 6) for rate in rates]
            curves["mean"][label] = row["miss_rate"]
            bar.write(_line(row, top_k), file=sys.stderr)
        engine = run("engine", recorded[0]) if recorded else None
    if args.per_layer:
        say(_layer_table(report["rows"]))
    if args.plot:
        _plot(args, trace, curves)
    return _compare(report, engine, recorded)


def _caches(args: argparse.Namespace, trace: Trace) -> list[tuple[str, int]]:
    """Policies and B: Figure 6's, or all combinations of what is asked for."""
    top_k = trace.positions.shape[3]
    if args.policies is None and args.device_buffer_size is None:
        return [(policy, times * top_k) for policy, times in CACHES]
    policies = args.policies or ["engine"]
    unknown = [policy for policy in policies if policy not in NAMES]
    if unknown:
        raise ValueError(f"--policies {unknown[0]!r} is not one of: {', '.join(NAMES)}")
    sizes = args.device_buffer_size or [2 * top_k]
    if min(sizes) < top_k:
        raise ValueError(
            f"--device-buffer-size {min(sizes)} is less than the trace's K = {top_k}: all "
            "positions of a step must be resident at once"
        )
    return [(policy, size) for size in sizes for policy in policies]


def _line(row: dict, top_k: int) -> str:
    size, layers = row["device_buffer_size"], row["layer_miss_rates"]
    return (
        f"{row['policy']:<18}{size:>7}{size / top_k:>6.3g}{row['miss_rate']:>9.2%}   "
        f"{min(layers):.2%}, {max(layers):.2%}"
    )


def _layer_table(rows: Sequence[dict]) -> str:
    """A line per layer, a column per cache."""
    names = [f"{row['policy']} {row['device_buffer_size']}" for row in rows]
    lines = ["layer" + "".join(f"{name:>17}" for name in names)]
    for layer in range(len(rows[0]["layer_miss_rates"])):
        rates = [f"{row['layer_miss_rates'][layer]:>17.2%}" for row in rows]
        lines.append(f"{layer:>5}" + "".join(rates))
    return "\n".join(lines)


# ---- against the engine's own counters ----


def _compare(report: dict, engine, recorded) -> int:
    if recorded is None:
        say("the file has no counters of an engine: nothing to compare with")
        return 0
    size, counted = recorded
    replayed = {name: getattr(engine, name).sum(0).tolist() for name in ("hits", "misses")}
    report["engine"] = {"device_buffer_size": size, "counted": counted, "replayed": replayed}
    report["exact"] = replayed == counted
    where = f"B = {size}" if isinstance(size, int) else "its B per layer"
    misses = sum(counted["misses"])
    if report["exact"]:
        say(
            f"exact: at {where} the engine counted {misses} misses, the replay as many, in every "
            "layer"
        )
        return 0
    layer, name = next(_differences(replayed, counted))
    say(
        f"NOT exact: at {where}, layer {layer}, the engine counted {counted[name][layer]} {name}, "
        f"the replay {replayed[name][layer]}"
    )
    return 1


def _differences(replayed: dict, counted: dict) -> Iterator[tuple[int, str]]:
    for layer in range(len(counted["misses"])):
        for name in ("misses", "hits"):
            if replayed[name][layer] != counted[name][layer]:
                yield layer, name


# ---- figures ----


def _plot(args: argparse.Namespace, trace: Trace, curves: dict[str, dict]) -> None:
    """Saves both figures, and their data as JSON, in the folder --plot."""
    from minihisparse.plots import save
    from minihisparse.sizing import miss_curves
    from minihisparse.trace_figures import plot_miss_rate, plot_reuse

    top_k, folder, config = trace.positions.shape[3], Path(args.plot), config_line(args.file, trace)
    data = {"config": config, **curves}
    paths = [save(plot_miss_rate(data), data, folder / "miss_rate.png")]
    lru = miss_curves(trace, warmup_steps=args.warmup_steps)
    sizes = [top_k]
    while 2 * sizes[-1] <= lru.largest:
        sizes.append(2 * sizes[-1])
    rates = torch.tensor([lru.layer_miss_rates(size) for size in sizes])  # [sizes, layers]
    ones = torch.ones(1, rates.shape[1])
    shares = torch.cat([ones, rates]) - torch.cat([rates, 0 * ones])  # between two sizes
    shares = [[round(share, 6) for share in row] for row in shares.T.tolist()]
    data = {"config": config, "top_k": top_k, "sizes": sizes, "shares": shares}
    paths.append(save(plot_reuse(data), data, folder / "reuse_distance.png"))
    for path in paths:
        say(f"figure: {path}")
