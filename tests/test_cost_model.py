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
