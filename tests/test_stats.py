"""The numbers that commands print, each against one worked out by hand.

Guards: an account that misses what is freed, aliased or changed in place; a cost that is reported
under no name, or under two; an engine whose prefill keeps the KV of more than one layer, or whose
device memory grows with the context; rates over the wrong count; JSON that is not JSON.
"""

import gc
import json
import math
import time

import pytest
import torch
import torch.nn.functional as F

import minihisparse
from minihisparse import runner, stats
from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.decode_step import DecodeStep
from minihisparse.engine import LLM
from minihisparse.host_store import ALIGNMENT
from minihisparse.model import Decoder
from minihisparse.runner import Runner
from minihisparse.sampling import SamplingParams
from minihisparse.stats import (
    AllocationAccount,
    Timings,
    Workspace,
    cache_report,
    environment_report,
    memory_report,
    report_run,
)

CPU = torch.device("cpu")

# ---- AllocationAccount ----

OLD = torch.ones(1000)  # 4000 bytes that no account must count
COUNTED = {  # operation -> (bytes of its results, peak on the way)
    "zeros": (lambda: torch.zeros(1000), 4000, 4000),
    "from a list": (lambda: torch.tensor([1.0] * 1000), 4000, 4000),
    "another dtype": (lambda: OLD.double(), 8000, 8000),
    "clone": (lambda: OLD.clone(), 4000, 4000),
    "a temporary": (lambda: (OLD + 1) * 2, 4000, 8000),
    "two results": (lambda: OLD.sort(), 4000 + 8000, 12000),
    "results that share": (lambda: (OLD + 1).chunk(4), 4000, 4000),
    "a slice keeps all": (lambda: (OLD + 1)[:10], 4000, 4000),
    "inference mode": (torch.inference_mode()(lambda: OLD + 1), 4000, 4000),
    "in a container": (lambda: torch.cat([OLD[:500], OLD[:250]]), 3000, 3000),
    "a composite": (lambda: F.linear(OLD[:10], torch.ones(5, 10), torch.ones(5)), 20, 240),
    "nothing": (lambda: torch.empty(0), 0, 0),
}
NOT_COUNTED = {
    "a view": lambda: OLD.view(10, 100).t()[2:],
    "in place": lambda: OLD.add_(0).mul_(1),
    "out=": lambda: torch.add(OLD, 0, out=OLD),
    "the same dtype": lambda: OLD.to(torch.float32),
    "a number": lambda: OLD[3].item(),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_counted(name):
    operation, size, peak = COUNTED[name]
    with AllocationAccount() as account:
        result = operation()
        assert (account.live_bytes, account.peak_bytes) == (size, peak)
        del result
        assert (account.live_bytes, account.peak_bytes) == (0, peak)


@pytest.mark.parametrize("name", NOT_COUNTED)
def test_what_is_not_counted(name):
    with AllocationAccount() as account:
        NOT_COUNTED[name]()
    assert (account.live_bytes, account.peak_bytes) == (0, 0)


def test_a_storage_lives_as_long_as_its_last_view():
    with AllocationAccount() as account:
        whole = OLD + 1
        view, storage = whole[:1], whole.untyped_storage()
        del whole
        assert account.live_bytes == 4000
        del view
        assert account.live_bytes == 4000
        del storage
        assert account.live_bytes == 0


def test_an_address_that_is_used_again():
    """The allocator gives a freed block out again at once: it counts again, and only once."""
    with AllocationAccount() as account:
        for _ in range(50):
            block = OLD + 1
            assert account.live_bytes == 4000
            del block
        blocks = [OLD + i for i in range(3)]
        assert account.live_bytes == account.peak_bytes == 12000
        blocks.pop(1)
        assert account.live_bytes == 8000


def test_the_end_of_an_account():
    """What is allocated afterwards does not count; what is freed afterwards does no harm."""
    with AllocationAccount() as account:
        inside = OLD + 1
    outside = OLD + 1
    assert (account.live_bytes, account.peak_bytes) == (4000, 4000)
    del inside, outside
    assert (account.live_bytes, account.peak_bytes) == (0, 4000)
    with AllocationAccount() as second:
        pass
    assert second.peak_bytes == 0


def test_accounts_within_each_other():
    with AllocationAccount() as outer:
        first = OLD + 1
        with AllocationAccount() as inner:
            second = first + 1
            assert inner.live_bytes == 4000
        assert outer.live_bytes == 8000
        del first, second
    assert outer.live_bytes == inner.live_bytes == 0


def test_results_are_not_changed():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 50, generator=generator)
    expected = F.softmax(x @ x.t(), dim=-1)
    with AllocationAccount():
        assert torch.equal(F.softmax(x @ x.t(), dim=-1), expected)


# ---- Workspace ----


def test_workspace_keeps_the_largest():
    workspace = Workspace(CPU)
    assert workspace.peak_bytes == 0
    for size, expected in [(100, 400), (1000, 4000), (10, 4000)]:
        with workspace.measure():
            torch.zeros(size)
        assert workspace.peak_bytes == expected


def test_workspace_lets_exceptions_through():
    workspace = Workspace(CPU)
    with pytest.raises(KeyboardInterrupt), workspace.measure():
        raise KeyboardInterrupt
    with workspace.measure():
        torch.zeros(100)
    assert workspace.peak_bytes == 400


# ---- Timings ----


def test_timings():
    """The rate is over the time of decode steps; a step of a batch gives several tokens."""
    timings = Timings(ttft_ms=[30.0, 10.0, 20.0])
    for milliseconds, num_tokens in [(100.0, 3), (200.0, 3), (400.0, 1), (300.0, 2)]:
        timings.add_step(milliseconds / 1e3, num_tokens)
    assert timings.step_ms == pytest.approx([100.0, 200.0, 400.0, 300.0])
    assert timings.num_decode_tokens == 9
    assert timings.report() == {
        "steps": 4,
        "tokens_per_second": 9.0,
        "ttft_ms": 20.0,
        "tpot_ms_p50": 250.0,
        "tpot_ms_p99": 397.0,
    }


def test_timings_of_nothing():
    report = Timings().report()
    assert report.pop("steps") == 0 and set(report.values()) == {None}
    json.dumps(report, allow_nan=False)
    assert Timings().step_ms is not Timings().step_ms


def test_timings_of_the_engine(tiny_decoder):
    """One step for the whole batch; the token of the prefill counts as no decode token."""
    llm = LLM(tiny_decoder(), max_running_requests=2, max_model_len=64, use_tqdm=False)
    params = [SamplingParams(max_new_tokens=n) for n in (1, 6, 4)]
    outputs = llm.generate([[5], [6], [7]], params)
    assert [len(out.itl_ms) for out in outputs] == [0, 5, 3]
    assert len(llm.timings.ttft_ms) == 3  # the third joins when the first has ended: at once
    assert len(llm.timings.step_ms) == 5
    assert llm.timings.num_decode_tokens == 0 + 5 + 3
    for out, engine in zip(outputs, llm.timings.ttft_ms, strict=True):
        assert 0 < out.ttft_ms <= engine  # both from the arrival on


def test_a_caller_who_looks_is_not_timed(tiny_decoder):
    """`step` stops between layers for as long as the user likes."""
    llm = LLM(tiny_decoder(), max_running_requests=1, max_model_len=64, use_tqdm=False)
    for _ in llm.step([5], SamplingParams(max_new_tokens=3)):
        time.sleep(0.05)
    assert len(llm.timings.step_ms) == 2 and llm.timings.num_decode_tokens == 2
    assert 0 < sum(llm.timings.step_ms) < 2 * LAYERS * 50


# ---- reports ----

LAYERS, W, R, K, B, PAGE = 3, 32, 2, 8, 16, 4


def small_runner(
    decoder: Decoder, max_model_len: int = 128, cache: str = "hisparse", **settings
) -> Runner:
    return make_runner(
        decoder,
        cache=cache,
        selector="quest",
        hisparse=HiSparseConfig(top_k=K, device_buffer_size=B, page_size=PAGE),
        max_model_len=max_model_len,
        max_running_requests=R,
        **settings,
    )


def test_cache_report_is_arithmetic(tiny_decoder):
    cache = small_runner(tiny_decoder(torch.bfloat16)).cache
    empty = cache_report(cache)
    assert empty == {"hits": 0, "misses": 0, "hit_rate": None, "evictions": 0, "bytes_h2d": 0}
    cache.counters[:] = torch.tensor([[10, 5, 1], [20, 0, 0], [0, 2, 2]])
    assert cache_report(cache) == {
        "hits": 30,
        "misses": 7,
        "hit_rate": round(30 / 37, 6),
        "evictions": 3,
        "bytes_h2d": 7 * W * 2,
    }
    json.dumps(cache_report(cache), allow_nan=False)


def test_cache_report_of_a_run(tiny_decoder):
    """Every selected position is one hit or one miss; a cold cache starts with misses."""
    one = small_runner(tiny_decoder())
    row, length, steps = one.admit(100), 60, 6
    one.prefill(row, torch.arange(length))
    assert cache_report(one.cache)["hits"] == 0  # a prefill looks nothing up
    first = None
    num_selected = 0
    for step in range(steps):
        seq_len = length + 1 + step
        one.decode(torch.tensor([step]), Batch.make([row], [seq_len], CPU))
        num_selected += LAYERS * (K - (-seq_len % PAGE))  # the newest page may not be full
        first = first or cache_report(one.cache)
    report = cache_report(one.cache)
    assert report["hits"] + report["misses"] == num_selected
    assert first["hits"] == LAYERS and first["evictions"] == 0  # only the newest was there
    assert report["bytes_h2d"] == report["misses"] * W * 4
    assert 0 < report["hit_rate"] < 1


def test_cache_report_of_full_kv(tiny_decoder):
    """Nothing is looked up, so there is nothing to count: no numbers, not zeros."""
    one = small_runner(tiny_decoder(), cache="full")
    row = one.admit(100)
    one.prefill(row, torch.arange(60))
    one.decode(torch.tensor([1]), Batch.make([row], [61], CPU))
    report = cache_report(one.cache)
    assert set(report) == {"hits", "misses", "hit_rate", "evictions", "bytes_h2d"}
    assert set(report.values()) == {None}
    json.dumps(report, allow_nan=False)


def test_report_of_a_run(tiny_decoder):
    """All kinds of cost, beside what a command has said before."""
    one, workspace, timings = small_runner(tiny_decoder()), Workspace(CPU), Timings()
    timings.add_step(0.5, num_tokens=2)
    row = one.admit(100)
    one.prefill(row, torch.arange(60))
    one.decode(torch.tensor([1]), Batch.make([row], [61], CPU))
    report = {"command": "step"}
    report_run(report, one, timings, workspace, [61])
    assert report == {
        "command": "step",
        **timings.report(),
        "cache": cache_report(one.cache),
        "memory": memory_report(one.cache, one.selector, workspace, [61]),
        "prefix": one.prefix_report(),
    }
    assert report["steps"] == 1 and report["cache"]["misses"] and report["prefix"]["requests"] == 1
    step = DecodeStep(one)
    report_run(report, one, timings, workspace, [61], step)
    assert report["memory"] == memory_report(one.cache, one.selector, workspace, [61], step)
    json.dumps(report, allow_nan=False)


def test_times_are_reported_of_a_broken_device(tiny_decoder, monkeypatch):
    """After an error on a GPU nothing there can be read any more."""

    def fail(cache):
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(stats, "cache_report", fail)
    one, report, timings = small_runner(tiny_decoder()), {}, Timings()
    timings.add_step(0.5, num_tokens=2)
    with pytest.raises(RuntimeError, match="launch failure"):
        report_run(report, one, timings, Workspace(CPU), [])
    assert report == timings.report()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_report(tiny_decoder, dtype):
    one = small_runner(tiny_decoder(dtype))
    workspace = Workspace(CPU)
    workspace.peak_bytes = 12345
    report = memory_report(one.cache, one.selector, workspace, [70, 5])
    pages = 128 // PAGE
    assert report == {
        "device_kv_bytes": LAYERS * R * (B + 1) * W * dtype.itemsize,
        # Per page a max and a min key; per request where its pages begin.
        "selector_bytes": LAYERS * R * pages * W * dtype.itemsize + R * 8,
        # Per slot and request; then where its slots begin, counters, and the first LRU order.
        "metadata_bytes": LAYERS * R * B * (4 + 2) + R * pages * 4 + R * 8 + LAYERS * 3 * 8 + B * 2,
        "workspace_bytes": 12345,
        "host_pool_bytes": LAYERS * R * 128 * W * dtype.itemsize,
        "full_kv_bytes": LAYERS * 75 * W * dtype.itemsize,
    }
    json.dumps(report, allow_nan=False)
    step = DecodeStep(one)
    held = {"step_bytes": 0, "graph_bytes": 0}  # on a CPU a step keeps nothing
    assert memory_report(one.cache, one.selector, workspace, [70, 5], step) == report | held
    full = small_runner(tiny_decoder(dtype), cache="full")
    report = memory_report(full.cache, full.selector, workspace, [128, 128])
    assert report["device_kv_bytes"] == report["full_kv_bytes"]  # every row of full length
    assert report["host_pool_bytes"] == 0 and report["metadata_bytes"] == R * 8


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("cache", ["hisparse", "full"])
def test_nothing_is_left_out_of_the_memory_report(tiny_decoder, cache, kernels):
    """All that a runner allocates is in the report, but for the attention kernel's scratch, which a
    decode step reports, and what it takes to start the host pool at a page.
    """
    decoder = tiny_decoder()
    with AllocationAccount() as account:
        one = small_runner(decoder, cache=cache, kernels=kernels)
    report = memory_report(one.cache, one.selector, Workspace(CPU), [])
    reported = sum(report[key] for key in report if key != "workspace_bytes")
    assert (one.scratch_bytes > 0) == kernels
    others = one.scratch_bytes + (ALIGNMENT if cache == "hisparse" else 0)
    assert account.live_bytes == reported + others


def test_device_kv_does_not_depend_on_the_context(tiny_decoder):
    """The promise "bounded"; full-HBM KV and selector state do depend on it."""
    short, long = (small_runner(tiny_decoder(), max_model_len=n) for n in (128, 512))
    reports = [memory_report(r.cache, r.selector, Workspace(CPU), []) for r in (short, long)]
    assert reports[0]["device_kv_bytes"] == reports[1]["device_kv_bytes"]
    bounds = [report["selector_bytes"] - R * 8 for report in reports]  # R * 8: where pages begin
    assert 4 * bounds[0] == bounds[1]
    full = [small_runner(tiny_decoder(), n, "full").cache.device_kv_bytes for n in (128, 512)]
    assert 4 * full[0] == full[1]


def test_device_kv_is_the_same_at_1000_and_at_8000_tokens(tiny_decoder):
    """One LLM, two prompts: only what full KV would have taken differs."""
    llm = LLM(
        tiny_decoder(max_position_embeddings=8200),
        hisparse=HiSparseConfig(top_k=K, device_buffer_size=B, page_size=PAGE),
        max_running_requests=1,
        use_tqdm=False,
    )
    reports = []
    for length in (1000, 8000):
        out = llm.generate([5, 6, 7, 8] * (length // 4), SamplingParams(max_new_tokens=4))
        assert len(out["token_ids"]) == 4
        reports.append(memory_report(llm.cache, llm.runner.selector, llm.workspace, [length + 4]))
    for key in ("device_kv_bytes", "metadata_bytes", "selector_bytes", "host_pool_bytes"):
        assert reports[0][key] == reports[1][key] > 0
    assert reports[1]["full_kv_bytes"] - reports[0]["full_kv_bytes"] == 7000 * LAYERS * W * 4


def test_running_allocates_nothing_that_stays(tiny_decoder):
    """Two requests of different lengths come and go: what was reported is still all there is."""
    llm = LLM(
        tiny_decoder(),
        hisparse=HiSparseConfig(top_k=K, device_buffer_size=B, page_size=PAGE),
        max_running_requests=R,
        use_tqdm=False,
    )
    full_kv = []
    for length in (40, 400):
        prompts = [list(range(5, 100)) * 10] * 2
        with AllocationAccount() as account:
            llm.generate([p[:length] for p in prompts], SamplingParams(max_new_tokens=4))
        assert account.live_bytes == 0
        report = memory_report(llm.cache, llm.runner.selector, llm.workspace, [length + 4] * 2)
        assert report["device_kv_bytes"] == LAYERS * R * (B + 1) * W * 4
        full_kv.append(report["full_kv_bytes"])
    assert full_kv[1] - full_kv[0] == 2 * 360 * LAYERS * W * 4


def test_environment_report():
    report = environment_report("verify", CPU, torch.bfloat16, seed=5)
    assert report["command"] == "verify" and report["version"] == minihisparse.__version__
    assert report["torch"] == torch.__version__ and report["device_name"]
    assert (report["device"], report["dtype"], report["seed"]) == ("cpu", "bfloat16", 5)
    json.dumps(report, allow_nan=False)


# ---- memory of a prefill ----

CHUNK = 16  # PREFILL_CHUNK in these tests: the mask of a chunk is small beside a layer's KV
WIDE = {"hidden_size": 256, "head_dim": 128, "max_position_embeddings": 2048}  # W = 512
LENGTHS = (256, 768)


def bytes_per_token(decoder: Decoder, page_size: int) -> int:
    """How much the peak of a prefill may grow with each token of the prompt.

    The hidden states and one layer's KV; their positions; and the largest of what comes and goes:
    a row of the chunk's mask, as bool and as the numbers that attention adds; the index arithmetic
    of the host pool; the page bounds on their way into the selector.
    """
    config, itemsize = decoder.config, decoder.dtype.itemsize
    stays = (config.hidden_size + config.record_width) * itemsize + 8
    mask = CHUNK * (1 + itemsize)
    host_rows = 6 * 8
    page_bounds = 2 * config.record_width * itemsize / page_size
    return math.ceil(stays + max(mask, host_rows, page_bounds))


def prefill_peak(one: Runner, length: int, device: torch.device = CPU) -> int:
    prompt = (torch.arange(length) % 100).to(device)
    row, workspace = one.admit(length), Workspace(device)
    with workspace.measure():
        one.prefill(row, prompt)
    one.release(row)
    return workspace.peak_bytes


def wide_runner(decoder: Decoder, cache: str = "hisparse") -> Runner:
    return make_runner(
        decoder,
        cache=cache,
        selector="quest",
        hisparse=HiSparseConfig(top_k=64, device_buffer_size=64, page_size=64),
        max_model_len=decoder.max_model_len,
        max_running_requests=1,
    )


def growth(one: Runner) -> float:
    """Peak bytes of a prefill for each token more."""
    short, long = (prefill_peak(one, length) for length in LENGTHS)
    return (long - short) / (LENGTHS[1] - LENGTHS[0])


@pytest.fixture
def small_chunk(monkeypatch):
    monkeypatch.setattr(runner, "PREFILL_CHUNK", CHUNK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_prefill_holds_one_layer(tiny_decoder, small_chunk, dtype):
    decoder = tiny_decoder(dtype, **WIDE)
    config, itemsize = decoder.config, decoder.dtype.itemsize
    one = wide_runner(decoder)
    limit = bytes_per_token(decoder, page_size=64)
    assert limit < (config.hidden_size + 2 * config.record_width) * itemsize  # can tell 1 from 2
    assert limit < (2 * config.hidden_size + config.record_width) * itemsize
    assert growth(one) <= limit
    # The rest depends on the chunk alone: six of its widest activations.
    widest = config.record_width + (config.num_attention_heads + 4) * config.head_dim
    for length in (CHUNK, *LENGTHS):
        assert prefill_peak(one, length) <= length * limit + 6 * CHUNK * widest * itemsize


def test_more_layers_cost_a_prefill_nothing(tiny_decoder, small_chunk):
    peaks = [
        prefill_peak(wide_runner(tiny_decoder(num_hidden_layers=n, **WIDE)), 512) for n in (2, 6)
    ]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("fault", ["keeps the layer before", "keeps the hidden states before"])
def test_a_prefill_that_holds_more_is_found(tiny_decoder, small_chunk, fault):
    decoder = tiny_decoder(**WIDE)
    one = wide_runner(decoder)
    right, kept = one.cache.write_prompt, []

    def write_prompt(layer, row, records):
        right(layer, row, records)
        width = WIDE["hidden_size"] if "hidden" in fault else records.shape[1]
        kept[:] = [records[:, :width].clone()] if layer < LAYERS - 1 else []

    one.cache.write_prompt = write_prompt
    assert growth(one) > bytes_per_token(decoder, page_size=64)


def test_the_shipped_chunk(tiny_decoder):
    """With PREFILL_CHUNK as it is the mask is part of the price, and still the only one."""
    decoder = tiny_decoder(**WIDE)
    mask = runner.PREFILL_CHUNK * (1 + decoder.dtype.itemsize)
    assert growth(wide_runner(decoder)) <= bytes_per_token(decoder, page_size=64) + mask


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_prefill_holds_one_layer_on_a_gpu(tiny_decoder, dtype):
    """The same bound, on what torch's allocator was asked for: what it gives can be 1 MiB more.

    The chunk is the shipped one, which fills the GPU: for a small one flash attention splits the
    keys over idle processors and keeps a sum of each part, the more parts the longer the prompt.
    """
    lengths = (2 * runner.GPU_PREFILL_CHUNK, 6 * runner.GPU_PREFILL_CHUNK)
    decoder = tiny_decoder(dtype, device="cuda", **WIDE | {"max_position_embeddings": lengths[1]})
    one = wide_runner(decoder)

    def requested_peak(length: int) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        prefill_peak(one, length, torch.device("cuda"))
        return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before

    requested_peak(lengths[0])  # cuBLAS takes its workspace once
    short, long = (requested_peak(length) for length in lengths)
    per_token = (long - short) / (lengths[1] - lengths[0])
    assert per_token <= bytes_per_token(decoder, page_size=64)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["hisparse", "full"])
def test_device_memory_on_a_gpu(tiny_decoder, cache):
    """What the report says is what torch's allocator gave, within its rounding to 512 bytes: of the
    caches, and then of the step with its graphs.
    """
    decoder = tiny_decoder(device="cuda")
    gc.collect()  # what other tests have left must not be freed in between
    before = torch.cuda.memory_allocated()
    one = small_runner(decoder, cache=cache)
    taken = torch.cuda.memory_allocated() - before
    workspace = Workspace(torch.device("cuda"))
    report = memory_report(one.cache, one.selector, workspace, [])
    keys = ["device_kv_bytes", "selector_bytes", "metadata_bytes"]
    reported = sum(report[key] for key in keys) + one.scratch_bytes
    # Records; tables of cache, pool and selector; buffers of Resolve, Quest and attention.
    num_tensors = LAYERS + 28
    assert reported <= taken <= reported + 512 * num_tensors

    step = DecodeStep(one, progress=False)
    taken = torch.cuda.memory_allocated() - before
    report = memory_report(one.cache, one.selector, workspace, [], step)
    assert report["graph_bytes"] == step.graph_bytes > 0
    reported = sum(report[key] for key in [*keys, "step_bytes", "graph_bytes"])
    assert reported <= taken <= reported + 512 * (num_tensors + 2)
