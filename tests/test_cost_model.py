"""The cost model: a fit that finds what is there, and arithmetic that is done by hand here.

Guards: microseconds, bytes and GB/s that are out by a power of ten; a fit that large batches
dominate, or that predicts negative times; one batch size that is taken for a line.
"""

from dataclasses import replace

import numpy as np
import pytest

from minihisparse.cost_model import CostModel

SIZES = {"num_layers": 3, "top_k": 10, "record_bytes": 1000, "link_gb_per_s": 2.0}
MODEL = CostModel(fixed_us=100.0, per_request_us=5.0, bookkeeping_us=4.0, **SIZES)


def test_fit_recovers_the_constants():
    batches = [1, 2, 8, 33]
    fitted = CostModel.fit(batches, [1300 + 18 * r for r in batches], **SIZES, bookkeeping_us=4.0)
    assert fitted.fixed_us == pytest.approx(1300) and fitted.per_request_us == pytest.approx(18)
    assert fitted == replace(
        MODEL, fixed_us=fitted.fixed_us, per_request_us=fitted.per_request_us
    )  # the rest is as given


def test_fit_minimises_relative_errors():
    """No other cost nearby is better; least squares of absolute errors would give another one."""
    batches, steps = np.array([1.0, 4.0, 64.0]), np.array([100.0, 150.0, 900.0])
    fitted = CostModel.fit(batches, steps, **SIZES)
    costs = np.array([fitted.fixed_us, fitted.per_request_us])

    def error(costs: np.ndarray) -> float:
        return float((((costs[0] + costs[1] * batches) / steps - 1) ** 2).sum())

    for change in ([0.01, 0], [-0.01, 0], [0, 0.001], [0, -0.001]):
        assert error(costs) < error(costs + np.array(change))
    assert not np.allclose(costs, np.polyfit(batches, steps, 1)[::-1], rtol=0.01)


@pytest.mark.parametrize(
    ("steps", "fixed", "per_request"),
    [
        (
            [100.0, 99.0],
            (0.01 + 1 / 99) / (0.01**2 + 1 / 99**2),
            0.0,
        ),  # falling: no cost per request
        (
            [10.0, 50.0],
            0.0,
            (0.1 + 0.08) / (0.1**2 + 0.08**2),
        ),  # more than in proportion: nothing fixed
    ],
)
def test_noise_does_not_make_a_cost_negative(steps, fixed, per_request):
    """The other cost alone then has least squares: sum of x / sum of x^2, x = 1 / t or r / t."""
    fitted = CostModel.fit([1, 4], steps, **SIZES)
    assert fitted.fixed_us == pytest.approx(fixed)
    assert fitted.per_request_us == pytest.approx(per_request)
    assert fitted.full_step_us(10_000) > 0


@pytest.mark.parametrize("batches", [[], [4], [4, 4, 4.0]])
def test_one_batch_size_is_refused(batches):
    with pytest.raises(ValueError, match="expected two different ones"):
        CostModel.fit(batches, [100.0] * len(batches), **SIZES)


def test_io_by_hand():
    """2 requests * 3 layers * 10 selected * 0.5 missed = 30 records = 30,000 bytes; 2 GB/s are
    2,000 bytes per microsecond.
    """
    assert MODEL.io_us(2, 0.5) == pytest.approx(15.0)
    assert MODEL.io_us(2, 0.0) == 0.0


def test_steps_and_throughput_by_hand():
    assert MODEL.full_step_us(2) == pytest.approx(110.0)
    assert MODEL.hisparse_step_us(2, 0.5) == pytest.approx(110.0 + 3 * 4.0 + 15.0)
    assert MODEL.tokens_per_second(2) == pytest.approx(2 / 110e-6)
    assert MODEL.tokens_per_second(2, 0.5) == pytest.approx(2 / 137e-6)
    assert MODEL.tokens_per_second(2, 0.0) == pytest.approx(2 / 122e-6)  # 0 is a rate, not none


def test_limits():
    """Without a cost per request only the bus is left, whatever the number of requests."""
    bus_bound = replace(MODEL, per_request_us=0.0)
    limit = 2e9 / (3 * 10 * 0.5 * 1000)  # bytes per second over bytes per token
    assert bus_bound.tokens_per_second(10**9, 0.5) == pytest.approx(limit)
    assert bus_bound.tokens_per_second(10, 0.5) < limit
    assert MODEL.tokens_per_second(10**9) == pytest.approx(1e6 / 5.0)


# ---- slots, latency, and rows of `bench decode` ----


def row_of(mode: str, requests: int, step_us: float, slots: int = 0, num_bytes: float = 0) -> dict:
    """What `bench decode` reports, as far as it is read; of the sizes above."""
    records = 3 * 1000 * requests * (slots + 1)
    return {
        "mode": mode,
        "running_mean": float(requests),
        "running_max": requests,
        "step_ms": {"mean": step_us / 1e3},
        "bytes_h2d_per_step": num_bytes if mode == "hisparse" else None,
        "memory": {"device_kv_bytes": records},
    }


MORE = {"io_latency_us": 2.0, "scan_us_per_slot": 0.5}


def rows_by_hand() -> list[dict]:
    """Of 100 us, 5 per request, and 4 of bookkeeping in each of three layers; 2,000 bytes a us."""
    hisparse = 100 + 10 + 3 * (4 + 0.5 * 20) + 3 * 2 + 30_000 / 2000
    return [
        row_of("full", 1, 105),
        row_of("full", 8, 140),
        row_of("no-io", 4, 120 + 3 * (4 + 0.5 * 30), slots=30),
        row_of("hisparse", 2, hisparse, slots=20, num_bytes=30_000),
    ]


def test_slots_and_latency_by_hand():
    more = replace(MODEL, **MORE)
    assert more.hisparse_step_us(2, 0.5, 20) == pytest.approx(110 + 3 * (4 + 10) + 3 * 2 + 15)
    assert more.io_us(2, 0.0) == 0.0  # nothing is fetched, so nothing is waited for
    rate = more.tokens_per_second(2, 0.5, 20)
    assert rate == pytest.approx(2e6 / more.hisparse_step_us(2, 0.5, 20))


def test_rows_give_the_constants_back():
    fitted = CostModel.fit_rows(rows_by_hand(), **SIZES, **MORE)
    assert fitted.fixed_us == pytest.approx(100) and fitted.per_request_us == pytest.approx(5)
    assert fitted.bookkeeping_us == pytest.approx(4)
    for row in rows_by_hand():
        assert fitted.row_us(row) == pytest.approx(1e3 * row["step_ms"]["mean"])
    assert [fitted.slots_of(row) for row in rows_by_hand()[2:]] == [30, 20]
    assert fitted.hisparse_step_us(2, 0.5, 20) == pytest.approx(fitted.row_us(rows_by_hand()[3]))


def test_rows_without_a_cache_leave_bookkeeping_as_given():
    fitted = CostModel.fit_rows(rows_by_hand()[:2], **SIZES, **MORE, bookkeeping_us=7.0)
    assert fitted.bookkeeping_us == 7.0 and fitted.fixed_us == pytest.approx(100)


def test_rows_that_are_no_steps_are_left_out():
    idle = row_of("full", 3, 1) | {"step_ms": None}
    others = [row_of("prefetch", 5, 1), row_of("transformers", 5, 1e6), idle]
    fitted = CostModel.fit_rows(rows_by_hand() + others, **SIZES, **MORE)
    assert fitted == CostModel.fit_rows(rows_by_hand(), **SIZES, **MORE)


def test_rows_with_noise_have_no_negative_cost():
    """No-io faster than full KV: bookkeeping would be below 0."""
    rows = [row_of("full", 1, 105), row_of("full", 8, 140), row_of("no-io", 4, 90, slots=30)]
    fitted = CostModel.fit_rows(rows, **SIZES)
    assert fitted.bookkeeping_us == 0.0 and fitted.fixed_us > 0


def test_rows_of_another_model_are_refused():
    rows = rows_by_hand()
    with pytest.raises(ValueError, match="measured with another model"):
        CostModel.fit_rows(rows, **{**SIZES, "record_bytes": 4000})
    with pytest.raises(ValueError, match="expected two different ones"):
        CostModel.fit_rows(rows[:1], **SIZES)
