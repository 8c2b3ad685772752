"""Requests at once and what they give, by hand.

Guards: a budget that is counted otherwise than the engine counts; a limit that is ignored; a best B
that is best by noise.
"""

import pytest

from minihisparse.capacity import GIB, plan_capacity
from minihisparse.config import HiSparseConfig
from minihisparse.cost_model import CostModel
from minihisparse.deployment import Deployment
from minihisparse.model_config import ModelConfig
from minihisparse.selector import SelectorSize

COST = CostModel(
    1000.0, 10.0, num_layers=4, top_k=32, record_bytes=256, link_gb_per_s=1.0, bookkeeping_us=3.0
)


def deployment(**limits) -> Deployment:
    return Deployment(COST, 1000, **limits)


def test_the_budget_is_counted_as_the_engine_does():
    model = ModelConfig(256, 32, 48, 4, 4, 2, 16)  # K and V, 2 heads of 16 in fp32: 256 bytes
    assert model.record_width * 4 == 256
    config = HiSparseConfig(top_k=32, device_buffer_size=64)
    planned = plan_capacity(
        model,
        config,
        cache="hisparse",
        itemsize=4,
        max_model_len=1000,
        hbm_budget_gib=0.01,
        selector=SelectorSize(1, 48, 0),
    )
    ours = deployment(hbm_budget_gib=0.01, selector_bytes_per_token=48)
    assert ours.num_requests(64) == planned.max_running_requests > 5
    assert ours.num_requests((64, 64, 64, 64)) == ours.num_requests(64)
    assert ours.num_requests(128) < ours.num_requests((32, 32, 32, 128)) < ours.num_requests(32)


def test_the_least_of_the_limits_counts():
    assert deployment(max_running_requests=7).num_requests(64) == 7
    per_request = 1000 * 4 * 256
    assert deployment(max_running_requests=7).host_bytes_per_request == per_request
    on_host = deployment(host_gib=3.5 * per_request / GIB, max_running_requests=7)
    assert on_host.num_requests(64) == 3
    assert deployment(hbm_budget_gib=1e-5, max_running_requests=7).num_requests(64) == 0


def test_without_any_limit_there_is_no_number():
    with pytest.raises(ValueError, match="--hbm-budget-gib, --host-gib or --max-running-requests"):
        deployment()


def test_prediction_by_hand():
    """5 requests: 1050 us, 12 of bookkeeping, 5 * 4 * 32 * 0.1 records of 256 bytes at 1 GB/s."""
    found = deployment(max_running_requests=5).predict(64, 0.1)
    step_us = 1000 + 50 + 12 + 64 * 0.256
    assert found["requests"] == 5 and found["tpot_ms"] == pytest.approx(step_us / 1e3, abs=1e-3)
    assert found["tokens_per_second"] == pytest.approx(5e6 / step_us, abs=0.1)
    nothing = deployment(hbm_budget_gib=1e-5).predict(64, 0.1)
    assert nothing == {"requests": 0, "tpot_ms": None, "tokens_per_second": None}


def test_sizes_per_layer_are_scanned_as_their_mean():
    slow = Deployment(
        CostModel(0.0, 0.0, 4, 32, 256, 1.0, scan_us_per_slot=1.0), 1000, max_running_requests=1
    )
    assert slow.predict((40, 50, 60, 70), 0.0) == slow.predict(55, 0.0)
    assert slow.predict(55, 0.0)["tpot_ms"] == pytest.approx(4 * 55e-3)


def test_the_best_is_the_smallest_that_is_as_good():
    clients = deployment(max_running_requests=100)
    assert clients.best([32, 64, 128, 256], {32: 0.5, 64: 0.1, 128: 0.1, 256: 0.1}.get) == 64
    assert clients.best([32, 64, 128], {32: 0.5, 64: 0.2, 128: 0.1}.get) == 128
    assert clients.best([32, 64, 128], {32: 0.1, 64: 0.0999, 128: 0.0998}.get) == 32
    budget = deployment(hbm_budget_gib=0.002)  # larger B, fewer requests
    assert budget.best([32, 64, 128], lambda b: 0.01) == 32


def test_no_request_at_any_size():
    with pytest.raises(ValueError, match="not one request of 1000 tokens fits"):
        deployment(hbm_budget_gib=1e-5).best([32, 64], lambda b: 0.1)
