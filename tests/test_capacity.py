"""Guards: a budget that is exceeded, or left unused; a plan that is not what is allocated; a
request of full length that does not fit although it was promised; a refusal that does not help.
"""

import gc
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minihisparse.assembly import make_runner
from minihisparse.capacity import GIB, Capacity, plan_capacity
from minihisparse.config import HiSparseConfig
from minihisparse.model import Decoder
from minihisparse.model_config import ModelConfig
from minihisparse.runner import Runner

# As many heads and layers as a small real model, so that tables are as small beside KV as there.
MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=20,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
)
HISPARSE = HiSparseConfig(top_k=32, device_buffer_size=64, page_size=16)
LENGTH = 1000
CACHES = ("full", "hisparse")


def plan(cache: str, **changes) -> Capacity:
    options = {"itemsize": 2, "max_model_len": LENGTH} | changes
    return plan_capacity(MODEL, HISPARSE, cache=cache, **options)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.random(MODEL, seed=0, dtype=torch.bfloat16)


def allocated_bytes(runner: Runner) -> int:
    cache = runner.cache
    return cache.device_kv_bytes + runner.selector.state_bytes + cache.metadata_bytes


# ---- the plan and what is allocated ----


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "sizes",
    [
        {"max_running_requests": 3},
        {"hbm_budget_gib": 0.07},
        {"hbm_budget_gib": 0.05, "max_running_requests": 5},
        {"hbm_budget_gib": 0.0402, "max_running_requests": 2, "max_model_len": 1537},
    ],
    ids=lambda sizes: " ".join(f"{key}={value}" for key, value in sizes.items()),
)
def test_what_is_planned_is_allocated(decoder, cache, sizes, kernels):
    """Within half a percent, which is less than a slot more or less of each request."""
    planned = plan(cache, **sizes)
    runner = make_runner(
        decoder,
        cache=cache,
        selector="quest",
        hisparse=HISPARSE,
        kernels=kernels,
        **{"max_model_len": LENGTH} | sizes,
    )
    assert runner.cache.max_requests == planned.max_running_requests
    assert runner.selector.extents.num_units == planned.selector_units
    if cache == "full":
        assert runner.cache.slots.num_units == planned.device_slots
    allocated = allocated_bytes(runner)
    assert planned.total_bytes == pytest.approx(allocated, rel=0.005)
    assert runner.longest_request[0] >= sizes.get("max_model_len", LENGTH)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("length", [1, 33, 100, 1000, 1025, 2100])
def test_a_budget_that_is_just_enough_is_kept(decoder, cache, length, kernels):
    """What is really allocated is above it by no more than the counters of the whole cache."""
    budget = 7 * plan(cache, max_model_len=length, max_running_requests=1).total_bytes
    runner = make_runner(
        decoder,
        cache=cache,
        selector="quest",
        hisparse=HISPARSE,
        kernels=kernels,
        max_model_len=length,
        hbm_budget_gib=budget / GIB,
    )
    assert runner.cache.max_requests == 7
    assert 0.9 * budget < allocated_bytes(runner) <= budget + 1024


@pytest.mark.gpu
@pytest.mark.parametrize("cache", CACHES)
def test_what_is_planned_is_allocated_on_a_gpu(cache):
    """As torch's allocator sees it; it rounds each tensor up to 512 bytes, large ones to 2 MiB."""
    decoder = Decoder.random(MODEL, seed=0, dtype=torch.bfloat16, device="cuda")
    gc.collect()  # what other tests have left must not be freed in between
    before = torch.cuda.memory_allocated()
    runner = make_runner(
        decoder,
        cache=cache,
        selector="quest",
        hisparse=replace(HISPARSE, host_to_device_ratio=1.0),  # a small host pool will do
        max_model_len=8192,
        hbm_budget_gib=2,
    )
    allocated = torch.cuda.memory_allocated() - before
    assert allocated == pytest.approx(allocated_bytes(runner), rel=0.02)
    assert 1.7 * GIB < allocated <= 2.02 * GIB


SIZES_OF_LAYERS = (32,) * 7 + (200, 64, 33) * 4 + (100,)


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_a_buffer_size_per_layer_is_planned_and_allocated(decoder, kernels):
    """Records to the byte; tables, as wide as the largest B, within 0.2 percent of the whole."""
    hisparse = replace(HISPARSE, device_buffer_size=SIZES_OF_LAYERS)
    sizes = {"max_model_len": LENGTH, "max_running_requests": 5}
    planned = plan_capacity(MODEL, hisparse, cache="hisparse", itemsize=2, **sizes)
    runner = make_runner(
        decoder, cache="hisparse", selector="quest", hisparse=hisparse, kernels=kernels, **sizes
    )
    record_bytes = 2 * MODEL.record_width
    slots = sum(SIZES_OF_LAYERS) + len(SIZES_OF_LAYERS)
    assert runner.cache.device_kv_bytes == 5 * slots * record_bytes
    assert planned.total_bytes == pytest.approx(allocated_bytes(runner), rel=2e-3)
    even = replace(HISPARSE, device_buffer_size=(64,) * 20)  # as good as one number
    assert plan_capacity(MODEL, even, cache="hisparse", itemsize=2, **sizes) == plan(
        "hisparse", max_running_requests=5
    )


def test_a_buffer_size_per_layer_of_other_layers():
    hisparse = replace(HISPARSE, device_buffer_size=(64,) * 19)
    with pytest.raises(ValueError, match="--device-buffer-size: got 19 sizes for 20 layers"):
        plan_capacity(MODEL, hisparse, cache="hisparse", itemsize=2, max_model_len=LENGTH)
    plan_capacity(MODEL, hisparse, cache="full", itemsize=2, max_model_len=LENGTH)  # has no slots


# ---- how many ----


@pytest.mark.parametrize("cache", CACHES)
def test_without_a_budget(cache):
    """Everything for as many requests of full length as may run."""
    for rows in (None, 1, 5):
        planned = plan(cache, max_running_requests=rows)
        expected = 8 if rows is None else rows
        assert planned.max_running_requests == expected
        assert planned.device_slots == expected * LENGTH
        assert planned.selector_units == expected * 63


@pytest.mark.parametrize("cache", CACHES)
def test_a_budget_alone(cache):
    """As many requests of full length as it holds: n times the bytes of one give n rows."""
    one = plan(cache, max_running_requests=1).total_bytes
    for n in (1, 2, 7):
        for spare in (0, one - 1):
            planned = plan(cache, hbm_budget_gib=(n * one + spare) / GIB)
            assert planned == plan(cache, max_running_requests=n)


def test_a_budget_and_rows():
    """The rows are as many as asked for; what they leave is shared by all requests."""
    one = plan("full", max_running_requests=1)
    budget = 3 * one.total_bytes
    planned = plan("full", hbm_budget_gib=budget / GIB, max_running_requests=40)
    assert planned.max_running_requests == 40
    assert LENGTH <= planned.device_slots < 3 * LENGTH
    assert planned.total_bytes <= budget
    # So few rows that nothing is short: more memory than they can use is not taken.
    planned = plan("full", hbm_budget_gib=budget / GIB, max_running_requests=2)
    assert planned == plan("full", max_running_requests=2)
    # The slots of HiSparse belong to rows; what is shared are the selector's pages.
    fixed = plan("hisparse", max_running_requests=4)
    planned = plan("hisparse", hbm_budget_gib=0.8 * fixed.total_bytes / GIB, max_running_requests=4)
    assert planned.max_running_requests == 4 and 63 <= planned.selector_units < 4 * 63


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 1000, 1001])
def test_just_enough_for_one(cache, length):
    """A request of full length fits, though its last page is not a whole one."""
    sizes = {"max_model_len": length, "max_running_requests": 1}
    one = plan(cache, **sizes)
    for spare in (0, 1000, 10**6):
        assert plan(cache, hbm_budget_gib=(one.total_bytes + spare) / GIB, **sizes) == one
    with pytest.raises(ValueError, match="is less than one request"):
        plan(cache, hbm_budget_gib=(one.total_bytes - 1) / GIB, **sizes)


def test_hisparse_holds_more_long_requests():
    """What it is for: at equal memory, the longer they are the more."""
    gains = []
    for length in (512, 2048, 8192):
        rows = [
            plan(cache, hbm_budget_gib=4, max_model_len=length).max_running_requests
            for cache in CACHES
        ]
        gains.append(rows[1] / rows[0])
    assert 1 < gains[0] < gains[1] < gains[2]


# ---- any sizes ----

SIZES = {
    "cache": st.sampled_from(CACHES),
    "itemsize": st.sampled_from([2, 4]),
    "max_model_len": st.integers(1, 8192),
    "max_running_requests": st.none() | st.integers(1, 200),
}


@settings(derandomize=True, deadline=None, database=None, max_examples=400)
@given(**SIZES, budgets=st.tuples(st.floats(1e-3, 20), st.floats(1e-3, 20)))
def test_a_budget_is_kept_and_used(budgets, **sizes):
    """For any sizes: within the budget; a request of full length fits; and more memory never holds
    less. Two budgets, the smaller one first.
    """
    plans = []
    for budget in sorted(budgets):
        try:
            planned = plan(**sizes, hbm_budget_gib=budget)
        except ValueError as error:
            assert not plans, "a larger budget is refused, a smaller one was not"
            assert f"--hbm-budget-gib {budget:g}" in str(error)
            continue
        assert planned.total_bytes <= budget * GIB
        if sizes["cache"] == "full":
            assert planned.device_slots >= sizes["max_model_len"]
        assert planned.selector_units * HISPARSE.page_size >= sizes["max_model_len"]
        unlimited = plan(**sizes | {"max_running_requests": planned.max_running_requests})
        assert planned.total_bytes <= unlimited.total_bytes
        plans.append(planned)
    if len(plans) == 2:
        for name in ("max_running_requests", "device_slots", "selector_units", "total_bytes"):
            assert getattr(plans[0], name) <= getattr(plans[1], name), name


# ---- refusals ----


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("rows", [None, 1, 6])
def test_a_budget_below_one_request(cache, rows):
    """Refused with what is needed; that much is enough, and a little less is not."""
    with pytest.raises(ValueError) as error:
        plan(cache, hbm_budget_gib=1e-3, max_running_requests=rows)
    message = str(error.value)
    assert message.startswith("--hbm-budget-gib 0.001 is less than one request of 1000 tokens")
    for flag in ("--max-model-len", "--max-running-requests", "--device-buffer-size"):
        assert flag in message
    needed = float(re.search(r"needs, ([\d.]+) GiB", message)[1])
    enough = plan(cache, hbm_budget_gib=needed + 1e-3, max_running_requests=rows)
    assert enough.max_running_requests == (rows or 1)
    with pytest.raises(ValueError, match="is less than one request"):
        plan(cache, hbm_budget_gib=needed - 1e-3, max_running_requests=rows)


@pytest.mark.parametrize("budget", [0, -1, float("nan")])
def test_a_budget_that_is_none(budget):
    with pytest.raises(ValueError, match=f"--hbm-budget-gib {budget} must be above 0"):
        plan("full", hbm_budget_gib=budget)
