"""Rows of `bench decode` and `bench serve` as lines of a table, and beside the cost model.

It prints; it deliberately does not know engines: a row is the dict that `make_row` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from minihisparse.cost_model import CostModel

LOAD = ("input_len", "hbm_budget_gib", "concurrency")  # equal for rows that can be compared


def head(load: str) -> str:
    """The line over a table. load: what its column says, "clients" or "req/s"."""
    return (
        f"{'mode':<22}{'tokens':>8}{'GiB':>6}{load:>9}{'running':>8}{'step, ms':>9}{'tok/s':>9}"
        f"{'decode tok/s':>13}{'TTFT, ms':>10}{'TPOT, ms':>9}{'hit rate':>9}{'of link':>8}"
    )


def line(row: dict) -> str:
    """A row under `head`: median of steps, means of TTFT and TPOT; "-" for what nobody knows."""

    def number(value: float | None, width: int, digits: int = 1) -> str:
        return f"{'-' if value is None else f'{value:.{digits}f}':>{width}}"

    def percent(value: float | None, width: int, digits: int) -> str:
        return f"{'-' if value is None else f'{100 * value:.{digits}f}%':>{width}}"

    def of(name: str, key: str) -> float | None:
        return None if row[name] is None else row[name][key]

    load = row["concurrency"] if "concurrency" in row else row["request_rate"]
    return (
        f"{row['mode']:<22}{row['input_len']:>8}{number(row['hbm_budget_gib'], 6, 2)}"
        f"{'-' if load is None else f'{load:g}':>9}"
        f"{number(row['running_mean'], 8)}{number(of('step_ms', 'p50'), 9, 3)}"
        f"{number(row['tokens_per_second'], 9)}{number(row['decode_tokens_per_second'], 13)}"
        f"{number(of('ttft_ms', 'mean'), 10)}{number(of('tpot_ms', 'mean'), 9, 3)}"
        f"{percent(row['hit_rate'], 9, 2)}{percent(row['link_share'], 8, 1)}"
    )


def predict(
    rows: Sequence[dict],
    *,
    num_layers: int,
    top_k: int,
    record_bytes: int,
    link_gb_per_s: float | None,
) -> None:
    """Adds "predicted_decode_tokens_per_second" to the rows of hisparse, and prints it beside what
    was measured.

    From the steps of full KV with prompts of the same length, where two batch sizes of them were
    measured, and the row's own miss rate. Nothing without a link, that is, on a CPU.
    """
    if link_gb_per_s is None:
        return
    for input_len in dict.fromkeys(row["input_len"] for row in rows):
        same = [row for row in rows if row["input_len"] == input_len and row["step_ms"]]
        full = [row for row in same if row["mode"] == "full"]
        batches = [row["running_mean"] for row in full]
        if len(set(batches)) < 2:
            continue
        cost = CostModel.fit(
            batches,
            # Means: requests come and go, and a mean step goes with a mean batch.
            [1e3 * row["step_ms"]["mean"] for row in full],
            num_layers=num_layers,
            top_k=top_k,
            record_bytes=record_bytes,
            link_gb_per_s=link_gb_per_s,
        )
        for row in same:
            if row["mode"] == "hisparse":
                running, misses = row["running_mean"], 1 - row["hit_rate"]
                predicted = round(cost.tokens_per_second(running, misses), 1)
                row["predicted_decode_tokens_per_second"] = predicted
                print(
                    f"hisparse, {input_len} tokens, {running:g} running: predicted "
                    f"{predicted:.0f} decode tok/s, measured {row['decode_tokens_per_second']:.0f}"
                )


def compare_with_no_io(rows: Sequence[dict]) -> None:
    """Adds to the rows of hisparse and prefetch what they lose to IO, and prints it, where the same
    load was measured without IO.

    exposed_io_ms: of a mean step, that is, of a token of each request, what IO adds to it.
    share_of_no_io: decode throughput over that of the no-IO oracle.
    """
    for row in rows:
        if row["mode"] not in ("hisparse", "prefetch") or not row["step_ms"]:
            continue
        oracle = [
            other
            for other in rows
            if other["mode"] == "no-io"
            and other["step_ms"]
            and all(other.get(key) == row.get(key) for key in LOAD)
        ]
        if not oracle:
            continue
        step_ms = mean(other["step_ms"]["mean"] for other in oracle)
        rate = mean(other["decode_tokens_per_second"] for other in oracle)
        exposed = row["step_ms"]["mean"] - step_ms
        share = row["decode_tokens_per_second"] / rate
        row["exposed_io_ms"], row["share_of_no_io"] = round(exposed, 3), round(share, 4)
        print(
            f"{row['mode']}, {row['input_len']} tokens, {row['running_mean']:g} running: IO adds "
            f"{exposed:.3f} ms per token; {100 * share:.1f}% of the no-IO oracle's tok/s"
        )
