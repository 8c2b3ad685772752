"""What `trace size` says of a curve, on stderr and in its report: the table over B, and how sure
the best B is. Rates are misses over selected positions, in 0..1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minihisparse.deployment import Deployment
from minihisparse.replay import ReplayResult
from minihisparse.sizing import MissCurves
from minihisparse.trace_report import say


def report_misses(
    report: dict,
    curves: MissCurves,
    results: dict[int, ReplayResult],
    warmup_steps: int,
    deployment: Deployment | None,
    best: int | None,
) -> None:
    """The table over B: "rows" and "largest_gap_to_lru" of the report.

    results: of the engine's rule, by B, ascending. deployment: None: no prediction.
    """
    line = f"{'B':>7}{'B/K':>6}{'misses':>9}{'plain LRU':>11}{'a layer: least, most':>22}"
    say(line + (f"{'requests':>10}{'TPOT, ms':>10}{'tok/s':>10}" if deployment else ""))
    report["rows"] = []
    for b, result in results.items():
        rate, layers = result.miss_rate(warmup_steps), result.layer_miss_rates(warmup_steps)
        lru = curves.miss_rate(b) if b <= curves.largest else 0.0  # no request is longer
        row = {
            "device_buffer_size": b,
            "miss_rate": round(rate, 6),
            "lru_miss_rate": round(lru, 6),
            "layer_miss_rates": [round(layer, 6) for layer in layers],
        }
        ends = f"{min(layers):.2%}, {max(layers):.2%}"
        line = f"{b:>7}{b / curves.top_k:>6.3g}{rate:>9.2%}{lru:>11.2%}{ends:>22}"
        if deployment:
            predicted = deployment.predict(b, rate)
            row |= predicted
            line += f"{predicted['requests']:>10}"
            if predicted["requests"]:
                line += f"{predicted['tpot_ms']:>10.3f}{predicted['tokens_per_second']:>10.0f}"
        report["rows"].append(row)
        say(line + ("  best" if b == best else ""))
    gap = max((row["miss_rate"] - row["lru_miss_rate"] for row in report["rows"]), key=abs)
    report["largest_gap_to_lru"] = round(gap, 6)
    say(f"largest gap between the engine's rule and plain LRU: {100 * gap:+.3f} points")


def how_sure(
    curves: MissCurves,
    grid: Sequence[int],
    result: ReplayResult,
    warmup_steps: int,
    deployment: Deployment,
    best: int,
) -> dict[str, Any]:
    """The best B, what it gives, and what each half of the trace says of it."""
    middle = warmup_steps + (len(result.misses) - warmup_steps) // 2
    rates = []
    for part in (slice(warmup_steps, middle), slice(middle, None)):
        hits, misses = int(result.hits[part].sum()), int(result.misses[part].sum())
        rates.append(misses / max(1, hits + misses))
    halves = [deployment.predict(best, rate)["tokens_per_second"] for rate in rates]
    own_best = [
        deployment.best(grid, lambda b, part=part: curves.miss_rate(b, part)) for part in (0, 1)
    ]
    in_second = [
        deployment.predict(b, curves.miss_rate(b, 1))["tokens_per_second"] for b in own_best
    ]
    close = [b for b in grid if _is_close(deployment, curves, b, best)]
    off, lost = halves[0] / halves[1] - 1, max(0.0, 1 - in_second[0] / in_second[1])
    rate = result.miss_rate(warmup_steps)
    found = deployment.predict(best, rate)
    say(
        f"best B: {best}, {found['tokens_per_second']:.0f} tok/s with {found['requests']} "
        f"requests; 2% or less are lost from {close[0]} to {close[-1]}"
    )
    say(
        f"how sure: the halves of the trace miss {rates[0]:.2%} and {rates[1]:.2%}; what the first "
        f"predicts is {off:+.1%} off in the second; chosen by the first, B = {own_best[0]} loses "
        f"{lost:.1%} there"
    )
    return {
        "device_buffer_size": best,
        "miss_rate": round(rate, 6),
        **found,
        "within_2_percent": [close[0], close[-1]],
        "halves": {
            "miss_rate": [round(rate, 6) for rate in rates],
            "tokens_per_second": halves,
            "best": own_best,
            "first_predicts_second": round(off, 4),
            "lost_by_choice_of_first": round(lost, 4),
        },
    }


def _is_close(deployment: Deployment, curves: MissCurves, b: int, best: int) -> bool:
    """Whether B gives at least 98% of the best one's throughput."""
    here, there = (
        deployment.predict(b, curves.miss_rate(b))["tokens_per_second"] or 0 for b in (b, best)
    )
    return here >= 0.98 * there
