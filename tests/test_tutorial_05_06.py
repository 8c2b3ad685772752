"""Tutorials 5 and 6 run as a reader would run them; what they show is so; their answers are right.

Guards against: a recorder that runs Python in a replay, or that forgets a launch; a bug that is
shown but is none, or whose cure cures nothing; a comparison that cannot fail; formulas, counts and
answers of chapter 6 that differ from the engine; an assertion of it that depends on times.
"""

import random
import runpy
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rig import assert_same_bits

from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.capacity import GIB, plan_capacity
from minihisparse.config import HiSparseConfig
from minihisparse.decode_step import batch_sizes
from minihisparse.kernels.device import Kernel, cuda, int32, int64, kernel
from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.model import Decoder

TUTORIALS = Path(__file__).parents[1] / "tutorials"
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def run_chapter(name: str, folder: Path) -> SimpleNamespace:
    """The chapter's globals, and what it printed, after it ran in an empty folder."""
    random_state, printed = torch.get_rng_state(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.chdir(folder)
        names = runpy.run_path(str(TUTORIALS / name), run_name="__main__")
    assert torch.equal(torch.get_rng_state(), random_state), "draws without a seed of its own"
    assert not list(folder.iterdir()), "writes a file"
    return SimpleNamespace(**names, printed=printed.getvalue())


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    return run_chapter("05_one_graph_no_python.py", tmp_path_factory.mktemp("five"))


@pytest.fixture(scope="module")
def six(tmp_path_factory):
    return run_chapter("06_from_bytes_to_throughput.py", tmp_path_factory.mktemp("six"))


def check_gpu_section(chapter: SimpleNamespace) -> None:
    skipped = "skipped: torch finds no CUDA device" in chapter.printed
    assert skipped != torch.cuda.is_available()


# ---- chapter 5: the recorder ----


def some_work(x, table):
    """Views, results in new memory, changes in place, several results, indices from a tensor."""
    low, high = (x * 2 + 1).view(2, -1).unbind(0)
    table.index_add_(0, x.long() % 4, low.repeat(2) + x)
    order, index = high.clone().mul_(-1).sort()
    return torch.cat([order, index.float(), table[index]]), x[1:3]


def test_a_replay_does_the_work_again(five):
    x, table = torch.tensor([3.0, 1.0, 4.0, 1.0, 5.0, 9.0]), torch.zeros(4)
    with five.Recorder() as graph:
        result, view = some_work(x, table)
    addresses = result.data_ptr(), view.data_ptr()
    for values in ([2.0, 7.0, 1.0, 8.0, 2.0, 8.0], [0.0, 5.0, 0.5, 7.0, 1.0, 3.0]):
        x.copy_(torch.tensor(values))
        other_table = table.clone()
        expected = some_work(x.clone(), other_table)
        graph.replay()
        assert_same_bits(result, expected[0])
        assert_same_bits(view, expected[1])
        assert_same_bits(table, other_table)
    assert (result.data_ptr(), view.data_ptr()) == addresses


def test_a_replay_runs_no_python(five, monkeypatch):
    runner, inputs = five.make_mixed(), five.Inputs(1)
    with five.Recorder() as graph:
        inputs.decode(runner, **five.LARGEST, num_real_reqs=1)

    def fail(*args, **kwargs):
        raise AssertionError("Python ran")

    for part in (runner, runner.cache, runner.selector, runner.model):
        for name in dir(type(part)):
            if not name.startswith("_") and callable(getattr(part, name)):
                monkeypatch.setattr(part, name, fail, raising=False)
    with pytest.raises(AssertionError, match="Python ran"):
        inputs.decode(runner, **five.LARGEST, num_real_reqs=1)
    graph.replay()


@kernel(max_threads=32)
def add(values: int32[::1], number: int64):  # values: changed
    if cuda.threadIdx.x < values.shape[0]:
        values[cuda.threadIdx.x] += number


def test_a_launch_is_noted_once_and_its_numbers_are_frozen(five):
    launch, values, number = Kernel.launch, torch.zeros(3, dtype=torch.int32), 5
    with five.Recorder() as graph:
        add.launch(1, 32, values, number)
    number = 7
    assert len(graph.calls) == 1  # nothing of what the simulator does
    values.fill_(10)
    graph.replay()
    assert values.tolist() == [15, 15, 15]
    assert Kernel.launch is launch
    add.launch(1, 32, values, number)
    assert len(graph.calls) == 1 and values.tolist() == [22, 22, 22]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x[0].item(),
        lambda x: int(x.sum()),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: 0 if x[1] > 0 else 1,
    ],
    ids=["item", "int", "bool", "nonzero", "if"],
)
def test_what_tells_python_something_is_refused(five, ask):
    launch = Kernel.launch
    with pytest.raises(RuntimeError, match="a graph cannot wait for it"), five.Recorder():
        ask(torch.tensor([1.0, 2.0]))
    assert Kernel.launch is launch


# ---- chapter 5: bugs and cures ----


def test_one_graph_no_python(five):
    """By hand: S is 10 in the recorded step; the fourth page of 4 begins at position 12."""
    assert [*five.stale.values()][0] == "equal"
    assert all(how.startswith("differs") for how in [*five.stale.values()][1:])
    assert {S: how for S, how in five.half.items() if S < 13} == dict.fromkeys(
        (10, 11, 12), "equal"
    )
    assert five.half[13] == "index 3 is out of bounds for dimension 1 with size 3"
    # B = 16: position 16 is the first that was in slot 16 only; the next step reads its page.
    assert [S for S, how in five.late.items() if how != "equal"] == [18, 19]
    assert five.late[18] == "differs by nan"  # a host row that nobody wrote
    assert [*five.cured] == [*five.fixed] == [*range(10, 22)]  # past B and several pages
    assert five.operations > 100 and five.launches == 12  # 6 kernels in each of 2 layers
    check_gpu_section(five)


@pytest.mark.gpu
def test_chapter_5_on_a_gpu(five):
    assert five.gpu_is_equal is True
    assert "replayed" in five.printed


def test_compare_can_fail(five):
    """It says "equal" for equal bits only, and feeds what it says that it feeds."""
    runner = five.with_prompts(five.make("full"))

    def eager(token, S, wrong=0.0):
        logits = runner.decode(torch.tensor([token]), Batch.make([0], [S], "cpu")).clone()
        logits[0, 3] += wrong
        return logits

    assert {*five.compare(eager, 4).values()} == {"equal"}
    runner = five.with_prompts(five.make("full"))
    found = five.compare(lambda token, S: eager(token, S, wrong=1e-6 * (S == 11)), 3)
    assert found == {10: "equal", 11: "differs by 0.000", 12: "equal"}


def test_comparing_states_can_fail(five):
    expected = five.state_of(five.eager)
    assert all(torch.equal(x, five.state_of(five.eager)[name]) for name, x in expected.items())
    cache, selector = five.eager.cache, five.eager.selector
    tensors = [*cache.records, selector.bounds, cache.host.records, cache.counters]
    tensors += [cache.device_buffer_tokens, cache.lru_slots]
    for name, tensor in zip(expected, tensors, strict=True):
        last = tensor.view(-1)[-1:]
        was = last.clone()
        last.fill_(3)
        changed = five.state_of(five.eager)
        assert [n for n in expected if not torch.equal(expected[n], changed[n])] == [name]
        last.copy_(was)


def test_write_through_in_python_is_right_without_a_graph(five, monkeypatch):
    """So that what goes wrong in bug 3 is the replay."""
    runner = five.make_mixed()
    monkeypatch.setitem(five.write_through_in_python.__globals__, "runner", runner)
    runner.cache.write_through = five.write_through_in_python

    def eager(token, S):
        logits = runner.decode(torch.tensor([token]), Batch.make([0], [S], "cpu"))
        runner.cache.check_integrity([S, 0])
        return logits

    assert {*five.compare(eager, 12).values()} == {"equal"}


def test_only_padding_does_harm_in_bug_2(five, monkeypatch):
    """The same recording, replayed for two real requests, loses nothing."""
    runner, inputs = five.with_prompts(five.make("full")), five.Inputs(2)
    inputs.set([17, 8], [0, 1], [10, 19])
    with five.Recorder() as graph:
        inputs.decode(runner, **five.LARGEST, num_real_reqs=2)
    prompt = torch.arange(9)
    before = runner.cache.read(0, 0, prompt).clone()
    inputs.set([4, 5], [0, 1], [11, 20])
    graph.replay()
    assert_same_bits(runner.cache.read(0, 0, prompt), before)
    inputs.set([4], [0], [12])
    graph.replay()
    assert not torch.equal(runner.cache.read(0, 0, prompt), before)


@pytest.mark.parametrize("device", DEVICES)
def test_decode_steps(five, device):
    """What the GPU section runs: the same bits eager and replayed; not the same in each step."""
    steps, state, seconds = five.decode_steps(device, enforce_eager=True)
    others, other_state, _ = five.decode_steps(device, enforce_eager=False)
    assert len(steps) == len(others) == 14 and seconds > 0
    assert [len(logits) for logits in steps][:5] == [2, 2, 2, 1, 2]
    for i, (logits, other) in enumerate(zip(steps, others, strict=True)):
        assert_same_bits(other, logits, f"step {i}")
        assert i == 0 or not torch.equal(logits[0], steps[i - 1][0])
    assert all(logits.isfinite().all() for logits in steps)
    for name, tensor in state.items():
        assert torch.equal(tensor, other_state[name]), name


# ---- chapter 5: answers ----


def test_answers_of_chapter_5(five):
    assert {*five.admitted_later(new_table=False).values()} == {"equal"}
    assert {*five.admitted_later(new_table=True).values()} == {"differs by nan"}
    # By hand: 1 to 8 requests run in graphs of 1, 2, 4, 4, 8, 8, 8, 8 rows.
    assert five.padding(8) == (pytest.approx(7 / 43), 5, 3 / 8)
    for most in (1, 2, 3, 13, 64, 100):
        rows, worst = 0, (0.0, 1)
        for n in range(1, most + 1):
            size = next(size for size in batch_sizes(most) if size >= n)
            rows += size
            worst = max(worst, ((size - n) / size, -n))
        share, where, largest = five.padding(most)
        assert share == pytest.approx(1 - most * (most + 1) / 2 / rows)
        assert largest == pytest.approx(worst[0])
        assert largest == 0 or where == -worst[1]


# ---- chapter 6: the formulas ----


def test_bytes_and_requests(six):
    """By hand: 30 layers, records of 2 * 3 heads * 64 numbers * 2 bytes, 8192 tokens."""
    assert six.RECORD == 768
    assert six.records == {"full": 30 * 8192 * 768, "hisparse": 30 * 513 * 768}
    assert six.bounds == 30 * 512 * 768
    for cache, tables in (("full", 0), ("hisparse", 30 * 6 * 512)):
        rest = six.one[cache] - six.records[cache] - six.bounds - tables
        assert 0 < rest < 30_000, cache  # what selection and Resolve need beside
    assert (six.fits("full", 0.18), six.fits("hisparse", 0.02)) == (0, 0)
    for cache in six.one:
        assert six.fits(cache, 1) == 2**30 // six.one[cache]
        assert six.fits(cache, 0.999 * six.one[cache] / GIB) == 0
        assert six.fits(cache, 1.001 * six.one[cache] / GIB) == 1


def test_the_cost_model_by_hand(six):
    # 64 requests: 1300 + 64 * 18 + 30 * 4, and 64 * 30 * 256 * 0.07 records of 768 bytes.
    step_us = 1300 + 1152 + 120 + 64 * 30 * 256 * 0.07 * 768 / 50e3
    assert six.cost.hisparse_step_us(64, 0.07) == pytest.approx(step_us)
    assert six.cost.tokens_per_second(64, 0.07) == pytest.approx(64e6 / step_us)
    assert six.compute_limit == pytest.approx(1e6 / 18)
    assert six.bus_limit == pytest.approx(50e9 / (30 * 256 * 0.07 * 768))
    for r in (10**6, 10**9):
        assert six.cost.tokens_per_second(r, 0.07) == pytest.approx(six.both_limit, rel=2e-3)


def test_break_even_miss_rate(six):
    """A little below it HiSparse is faster, a little above full KV."""
    for budget in six.BUDGETS:
        if six.fits("full", budget):
            rate = six.break_even_miss_rate(budget)
            for factor in (0.999, 1.001):
                full, hisparse = six.rates(budget, factor * rate)
                assert (hisparse > full) == (factor < 1)


def test_a_budget_where_full_kv_is_faster(six):
    """Exercise 1: nowhere below, and from there on it is."""
    for miss_rate, link in ((0.07, 50), (0.2, 50), (0.07, 20)):
        crossing = six.crossing_gib(miss_rate, link)
        cost = six.CostModel(
            1300, 18, 30, 256, 768, link_gb_per_s=link, bookkeeping_us=4
        )  # not from the chapter's dict

        def full_is_faster(num_bytes, cost=cost, miss_rate=miss_rate):
            r = {cache: num_bytes // six.one[cache] for cache in six.one}
            rate = cost.tokens_per_second(r["hisparse"], miss_rate)
            return r["full"] > 0 and cost.tokens_per_second(r["full"]) >= rate

        at = round(crossing * GIB)
        assert full_is_faster(at)
        assert not any(full_is_faster(n * six.one["full"]) for n in range(at // six.one["full"]))
        assert not full_is_faster(at - 1)
    assert six.crossing_gib(0.0, 50) == float("inf")


# ---- chapter 6: what is measured ----


def test_from_bytes_to_throughput(six):
    for mode, requests in (("full", 7), ("no-io", 23), ("hisparse", 23)):
        assert six.measured[mode]["running"] == [requests] * 32  # two waves of 16 steps
    assert six.trace.positions.shape == (32, 4, 23, 32)
    assert six.trace.seq_lens[:, 0].tolist() == [*range(241, 257)] * 2
    check_gpu_section(six)


def test_chapter_6_whatever_the_clock_says(tmp_path, monkeypatch):
    """No assertion depends on times: steps take from no time to a second here."""
    rng, now = random.Random(0), [0.0]

    def clock() -> float:
        now[0] += rng.choice((1e-6, 1e-4, 1.0)) * rng.random()
        return now[0]

    monkeypatch.setattr(time, "perf_counter", clock)
    chapter = run_chapter("06_from_bytes_to_throughput.py", tmp_path)
    assert "chapter 6: all asserts hold" in chapter.printed


@pytest.mark.parametrize("kib", [300, 777, 1400])
def test_as_many_run_as_planned(six, monkeypatch, kib):
    monkeypatch.setitem(six.planned.__globals__, "BUDGET", kib / 2**20)
    for cache in ("full", "hisparse"):
        runner = six.tiny_runner(cache, hbm_budget_gib=kib / 2**20)
        expected = plan_capacity(
            six.tiny,
            six.tiny_setup,
            cache=cache,
            itemsize=4,
            max_model_len=257,
            hbm_budget_gib=kib / 2**20,
        ).max_running_requests
        assert six.planned(cache) == expected
        got = six.serve(runner, expected + 1)  # the last one waits until others have ended
        assert got["running"] == [expected] * 16 + [1] * 16


def test_misses_by_the_oracle(six):
    """Position by position, request by request; a request ends where its length falls."""
    for slots in (32, 64, 100):
        count = 0
        for layer in range(4):
            for request in range(0, 23, 5):
                last = 10**9
                for step in range(32):
                    seq_len = int(six.trace.seq_lens[step, request])
                    if seq_len < last:
                        tokens, lru_slots = [-1] * slots, [*range(slots)]
                    positions = six.trace.positions[step, layer, request].tolist()
                    count += len(resolve_oracle(positions, seq_len, tokens, lru_slots)[1])
                    last = seq_len
        positions, seq_lens = six.trace.positions[:, :, ::5], six.trace.seq_lens[:, ::5]
        part = six.Trace(positions.contiguous(), seq_lens)
        assert six.misses(part, slots) == count


@pytest.mark.parametrize("slots", [32, 96])
def test_the_trace_tells_the_misses_of_another_cache(six, slots):
    """An engine with so many slots selects the same, and has as many misses as the trace says."""
    setup = HiSparseConfig(top_k=32, device_buffer_size=slots, page_size=16)
    runner = make_runner(
        six.model, cache="hisparse", max_running_requests=23, **six.SHAPE | {"hisparse": setup}
    )
    positions, _ = six.watch(runner)
    six.serve(runner, 46)
    assert torch.equal(torch.stack(positions).view(six.trace.positions.shape), six.trace.positions)
    assert int(runner.cache.counters[:, 1].sum()) == six.misses(six.trace, slots)


@pytest.mark.parametrize("device", DEVICES)
def test_predict_and_measure(six, device):
    """What the GPU section runs, on a tiny model: requests as planned; times are not looked at."""
    model = Decoder.random(six.tiny, seed=0, device=device)
    found = six.predict_and_measure(model, six.tiny_setup, 100, 1 / 2048, 25.0)
    for cache, (requests, predicted, measured) in found.items():
        sizes = {"itemsize": 4, "max_model_len": 117, "hbm_budget_gib": 1 / 2048}
        planned = plan_capacity(six.tiny, six.tiny_setup, cache=cache, **sizes)
        assert requests == planned.max_running_requests > 1
        assert predicted != 0 and measured > 0


def test_the_best_number_of_slots(six):
    """Exercise 2, by formulas of its own."""
    misses_of = {slots: six.misses(six.trace, slots) for slots in six.SLOTS}
    for link, best in six.best.items():
        rates = {}
        for slots in six.SLOTS:
            row = 20 + 4 * 64 * (4 + 1) + 8 * 4 + 4 * 32  # what both caches need per request
            row += 4 * ((slots + 1) * 128 + 6 * slots) + 4 * 17 + 12 * 32 + 64
            requests = 2**20 // (row + 17 * 4 * 128)
            misses = misses_of[slots] / (32 * 4 * 23)  # per step, layer and request
            bus_us = requests * 4 * misses * 128 / link / 1e3
            rates[slots] = requests / (1300 + 18 * requests + 4 * 4 + bus_us)
            assert six.rate_with(slots, link) == pytest.approx(1e6 * rates[slots])
        assert best == max(rates, key=rates.get)
