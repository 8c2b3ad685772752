"""Guards: a graph that froze what changes from step to step; padding that writes into a request's
state; a step that needs numbers on the host; graphs of two engines that share what they must not;
a capture that runs out of memory without saying what helps.

What a graph does is compared with the same steps without one: logits and every state tensor, in
bits. Where there is no GPU, the same padded steps run with simulated kernels.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from rig import assert_near, assert_same_bits
from torch import Tensor

from minihisparse.assembly import make_runner
from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.decode_step import DecodeStep, batch_sizes
from minihisparse.engine import LLM
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.model import Decoder
from minihisparse.runner import Runner
from minihisparse.sampling import SamplingParams

SETUP = HiSparseConfig(top_k=16, device_buffer_size=32, page_size=4)
MAX_MODEL_LEN = 256
both_caches = pytest.mark.parametrize("cache", ["hisparse", "full"])


def small_runner(decoder: Decoder, cache: str, max_requests: int = 6, **settings) -> Runner:
    """Whatever nobody writes is NaN."""
    runner = make_runner(
        decoder,
        cache=cache,
        selector="quest",
        hisparse=SETUP,
        max_model_len=MAX_MODEL_LEN,
        max_running_requests=max_requests,
        **settings,
    )
    for state in (*runner.cache.records, runner.selector.bounds):
        state.fill_(torch.nan)
    if runner.cache.host is not None:
        runner.cache.host.records.fill_(torch.nan)
    return runner


def prompt_of(seed: int, length: int) -> Tensor:
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed))


def state_of(runner: Runner) -> dict[str, Tensor]:
    """Copies of all that a step may change, by name."""
    cache, selector = runner.cache, runner.selector
    state = {f"records of layer {i}": records for i, records in enumerate(cache.records)}
    state |= {"bounds": selector.bounds, "first page": selector.extents.first}
    state["first slot"] = cache.first_slots(0)
    if isinstance(cache, HiSparseCache):
        state |= {
            "device_buffer_tokens": cache.device_buffer_tokens,
            "lru_slots": cache.lru_slots,
            "counters": cache.counters,
            "req_to_host_pool": cache.host.req_to_host_pool,
            "host records": cache.host.records,
        }
    return {name: tensor.cpu().clone() for name, tensor in state.items()}


def assert_same_state(actual: Runner, expected: Runner, where: str) -> None:
    expected_state = state_of(expected)
    for name, tensor in state_of(actual).items():
        assert_same_bits(tensor, expected_state[name], f"{where}, {name}")


# ---- sizes ----


@pytest.mark.parametrize(
    "max_running_requests", [1, 2, 3, 4, 5, 7, 8, 9, 12, 16, 17, 100, 256, 300]
)
def test_batch_sizes(max_running_requests):
    """Ascending, from 1 to the most there can be; few of them; and never much padding."""
    sizes = batch_sizes(max_running_requests)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, max_running_requests)
    assert len(sizes) <= 2 * max_running_requests.bit_length()
    for num_requests in range(1, max_running_requests + 1):
        size = next(size for size in sizes if size >= num_requests)
        assert 2 * (size - num_requests) <= num_requests + 1  # about a half more at most


def test_the_first_sizes_of_many():
    assert batch_sizes(64) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64]


# ---- without a GPU ----


@both_caches
def test_on_a_cpu(tiny_decoder, cache):
    """No graphs, no padding: what the runner does, to the bit."""
    decoder = tiny_decoder()
    plain, other = (small_runner(decoder, cache) for _ in range(2))
    step = DecodeStep(other)
    assert not step.use_graphs and not step.on_gpu and step.graph_bytes == 0
    lengths = [5, 90, 33]
    for runner in (plain, other):
        for seed, length in enumerate(lengths):
            assert runner.admit(length + 8) == seed
            runner.prefill(seed, prompt_of(seed, length))
    for i in range(8):
        rows = [2, 0, 1] if i % 2 else [1, 2]
        lengths = [n + (row in rows) for row, n in enumerate(lengths)]
        token_ids, seq_lens = [3 * i + row for row in rows], [lengths[row] for row in rows]
        logits = step(token_ids, rows, seq_lens)
        expected = plain.decode(torch.tensor(token_ids), Batch.make(rows, seq_lens, "cpu"))
        assert_same_bits(logits, expected, f"step {i}")
    assert_same_state(other, plain, "in the end")


def padded_step(runner: Runner) -> DecodeStep:
    """Steps as on a GPU without graphs: padded, and all that they are told is in tensors."""
    step = DecodeStep(runner)
    step.on_gpu = True
    step._inputs = torch.zeros(3 * step.sizes[-1] + 1, dtype=torch.int64)
    step._host_inputs = torch.zeros_like(step._inputs)
    return step


@both_caches
def test_a_padded_step(tiny_decoder, cache):
    """Three requests in a step of four rows, with simulated kernels: the logits and the tables are
    those of an unpadded step, and request row 0, where padding points, is as it was.
    """
    decoder = tiny_decoder(num_hidden_layers=2)
    plain, padded = (small_runner(decoder, cache, kernels=True) for _ in range(2))
    step = padded_step(padded)
    assert step.sizes == [1, 2, 4, 6]
    lengths = [9, 40, 31, 3]
    for runner in (plain, padded):
        for row, length in enumerate(lengths):
            assert runner.admit(length + 4) == row
            runner.prefill(row, prompt_of(row, length))
    before = state_of(padded)
    token_ids, rows, seq_lens = [7, 8, 9], [3, 1, 2], [4, 41, 32]
    logits = step(token_ids, rows, seq_lens)
    expected = plain.decode(torch.tensor(token_ids), Batch.make(rows, seq_lens, "cpu"))
    assert logits.shape == (3, 128)
    assert_near(logits, expected, 2e-5, "logits")  # other shapes
    after, expected = state_of(padded), state_of(plain)
    for name, tensor in after.items():
        if tensor.is_floating_point():
            assert torch.equal(tensor.isnan(), expected[name].isnan()), name
            assert_near(tensor.nan_to_num(), expected[name].nan_to_num(), 2e-5, name)
        else:
            assert_same_bits(tensor, expected[name], name)
    assert_row_unchanged(padded, 0, before, after)


def assert_row_unchanged(
    runner: Runner, row: int, before: dict[str, Tensor], after: dict[str, Tensor]
) -> None:
    """All that belongs to a request row, in every layer."""
    cache = runner.cache
    if isinstance(cache, HiSparseCache):
        slots = slice(row, row + 1)
        rows_of_page = cache.host.records.shape[1] // cache.host.num_pages
        for page in cache.host._pages[row]:
            host_rows = slice(page * rows_of_page, (page + 1) * rows_of_page)
            name = "host records"
            assert_same_bits(after[name][:, host_rows], before[name][:, host_rows], name)
        for name in ("device_buffer_tokens", "lru_slots"):
            assert_same_bits(after[name][:, row], before[name][:, row], name)
    else:
        slots = slice(*cache.slots.extent_of(row))
    for layer in range(cache.num_layers):
        name = f"records of layer {layer}"
        assert_same_bits(after[name][slots], before[name][slots], name)
    pages = slice(*runner.selector.extents.extent_of(row))
    assert_same_bits(after["bounds"][:, pages], before["bounds"][:, pages], "bounds")


@both_caches
def test_num_real_reqs_alone_decides(tiny_decoder, cache):
    """A padded row looks like a step of request row 0, lengths and all; it is none."""
    runner = small_runner(tiny_decoder(num_hidden_layers=2), cache, kernels=True)
    for row, length in enumerate([40, 9]):
        runner.prefill(runner.admit(length + 4), prompt_of(row, length))
    before, step = state_of(runner), padded_step(runner)
    token_ids, rows, seq_lens, num_real_reqs = [5, 6], [1, 0], [10, 41], 1
    step._inputs[:7] = torch.tensor([*token_ids, *rows, *seq_lens, num_real_reqs])
    step._run(2)
    after = state_of(runner)
    assert_row_unchanged(runner, 0, before, after)
    with pytest.raises(AssertionError, match="records"):
        assert_row_unchanged(runner, 1, before, after)


def test_padding_alone_changes_nothing(tiny_decoder):
    """What runs before a capture: no request is real."""
    runner = small_runner(tiny_decoder(num_hidden_layers=2), "hisparse", kernels=True)
    runner.prefill(runner.admit(40), prompt_of(0, 36))
    before, step = state_of(runner), padded_step(runner)
    step._run(2)
    for name, tensor in state_of(runner).items():
        assert_same_bits(tensor, before[name], name)


def out_of_memory(*_) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.5 GiB.\nAnd more.")


def test_out_of_memory_at_capture_is_explained(tiny_decoder, monkeypatch):
    """Where the capture begins, without a GPU to capture on."""
    step = padded_step(small_runner(tiny_decoder(), "full"))
    for name, answer in [("synchronize", None), ("memory_allocated", 0), ("mem_get_info", (1, 2))]:
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    step._run = out_of_memory
    with pytest.raises(RuntimeError) as error:
        step._capture(progress=False)
    assert str(error.value) == (
        "no device memory for the decode graph of 6 requests (CUDA out of memory. Tried to "
        "allocate 3.5 GiB.); lower --max-running-requests or --hbm-budget-gib, or pass "
        "--enforce-eager"
    )
    assert not step._graphs


# ---- on a GPU ----


class Twins:
    """Two runners at the same work, one with graphs and one without."""

    def __init__(self, decoder: Decoder, cache: str, max_requests: int = 6) -> None:
        self.runners = [small_runner(decoder, cache, max_requests) for _ in range(2)]
        self.steps = [
            DecodeStep(runner, enforce_eager=eager, progress=False)
            for runner, eager in zip(self.runners, (False, True), strict=True)
        ]
        assert [step.use_graphs for step in self.steps] == [True, False]
        self.device = decoder.device
        self.lengths: dict[int, int] = {}  # by request row
        self.num_admitted = 0

    def admit(self, length: int, room: int) -> int:
        rows = [runner.admit(length + room) for runner in self.runners]
        assert rows[0] == rows[1]
        self.num_admitted += 1
        ids = prompt_of(self.num_admitted, length).to(self.device)
        graph, eager = (runner.prefill(rows[0], ids).cpu() for runner in self.runners)
        assert_same_bits(graph, eager, "logits of the prompt")
        self.lengths[rows[0]] = length
        return rows[0]

    def release(self, row: int) -> None:
        for runner in self.runners:
            runner.release(row)
        del self.lengths[row]

    def decode(self, rows: list[int], token_ids: list[int]) -> Tensor:
        for row in rows:
            self.lengths[row] += 1
        seq_lens = [self.lengths[row] for row in rows]
        graph, eager = (step(token_ids, rows, seq_lens).cpu() for step in self.steps)
        assert graph.shape[0] == len(rows) and graph.isfinite().all()
        assert_same_bits(graph, eager, f"rows {rows}, S {seq_lens}, logits")
        return graph

    def check(self, where: str) -> None:
        assert_same_state(*self.runners, where)
        for runner in self.runners:
            runner.cache.check_integrity()
            runner.selector.extents.check_integrity()


@pytest.mark.gpu
@both_caches
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_graphs_equal_eager_steps(tiny_decoder, cache, dtype):
    """200 steps of requests that come and go, in batches of any size and order."""
    rng = random.Random(0)
    twins = Twins(tiny_decoder(dtype, device="cuda"), cache)
    most = {}
    for step in range(200):
        if len(twins.lengths) < 6 and (rng.random() < 0.2 or not twins.lengths):
            length = rng.choice([1, 5, 31, 32, 33, rng.randint(1, 150)])
            row = twins.admit(length, room=60)
            most[row] = length + 60
        for row in list(twins.lengths):
            if twins.lengths[row] == most[row] or (rng.random() < 0.02 and len(twins.lengths) > 1):
                twins.release(row)
        if not twins.lengths:
            continue
        rows = rng.sample(list(twins.lengths), rng.randint(1, len(twins.lengths)))
        twins.decode(rows, [rng.randrange(128) for _ in rows])
        if step % 10 == 0:
            twins.check(f"step {step}")
    twins.check("in the end")
    assert twins.num_admitted > 10
    if cache == "hisparse":
        counts = twins.runners[0].cache.counters.sum(0)
        assert counts.min() > 0  # hits, misses, evictions


@pytest.mark.gpu
@both_caches
def test_padded_rows_change_nothing_on_a_gpu(tiny_decoder, cache):
    """Padding points at request row 0, which is not in the batch."""
    twins = Twins(tiny_decoder(device="cuda"), cache)
    for length in (40, 100, 31, 7):
        twins.admit(length, room=20)
    before = state_of(twins.runners[0])
    for step in range(6):
        twins.decode([3, 1, 2], [step, step + 1, step + 2])  # a graph of four rows
    assert_row_unchanged(twins.runners[0], 0, before, state_of(twins.runners[0]))
    twins.check("after the steps")


@pytest.mark.gpu
@both_caches
def test_a_replay_takes_what_is_new(tiny_decoder, cache):
    """One graph of two rows: other tokens, rows and lengths each time, and fewer real rows."""
    twins = Twins(tiny_decoder(device="cuda"), cache)
    for length in (40, 100, 31):
        twins.admit(length, room=20)
    seen = []
    for rows in ([0, 1], [1, 0], [2, 1], [2, 0], [0, 1]):
        seen.append(twins.decode(rows, [5, 5]))
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(seen, seen[1:], strict=False))
    again = twins.decode([0, 1], [5, 6])
    assert (again[1] - seen[-1][1]).abs().max() > 1e-3
    assert len(twins.steps[0]._graphs) == len(twins.steps[0].sizes)
    twins.check("after the steps")


def make_llm(decoder: Decoder, **settings) -> LLM:
    defaults = {"hisparse": SETUP, "max_model_len": MAX_MODEL_LEN, "use_tqdm": False}
    return LLM(decoder, **defaults | settings)


PROMPTS = [prompt_of(seed, length).tolist() for seed, length in enumerate([3, 60, 31, 120, 17])]
RANDOM = SamplingParams(temperature=1.0, max_new_tokens=40, ignore_eos=True)


def ids_of(llm: LLM, params: SamplingParams = RANDOM) -> list[list[int]]:
    return [out["token_ids"] for out in llm.generate(PROMPTS, params)]


@pytest.mark.gpu
def test_two_engines_in_one_process(tiny_decoder):
    """Their streams take turns token by token; each gives what it gives alone, graphs or not."""
    decoder = tiny_decoder(device="cuda")
    settings: list[dict] = [
        {"cache": "hisparse", "max_running_requests": 3},
        {"cache": "full", "max_running_requests": 5},
        {"cache": "hisparse", "hisparse": replace(SETUP, top_k=8), "max_running_requests": 2},
    ]
    expected = [ids_of(make_llm(decoder, **one, enforce_eager=True)) for one in settings]
    engines = [make_llm(decoder, **one) for one in settings]
    assert all(llm.scheduler.decode.use_graphs for llm in engines)
    streams = [llm.stream(PROMPTS, RANDOM) for llm in engines]
    got: list[list[list[int]]] = [[[] for _ in PROMPTS] for _ in engines]
    while streams.count(None) < len(streams):
        for i, stream in enumerate(streams):
            delta = next(stream, None) if stream else None
            if delta is None:
                streams[i] = None
            else:
                got[i][delta.index].append(delta.token_id)
    assert got == expected
    assert [ids_of(llm) for llm in engines] == expected


@pytest.mark.gpu
def test_no_graphs_where_they_cannot_be(tiny_decoder):
    """A checked cache asks the device after each call; with enforce_eager nobody wants them."""
    decoder = tiny_decoder(device="cuda")
    for settings in ({"checked": True}, {"enforce_eager": True}):
        llm = make_llm(decoder, max_running_requests=2, **settings)
        step = llm.scheduler.decode
        assert not step.use_graphs and step.graph_bytes == 0 and not step._graphs
        assert len(ids_of(llm)[0]) == 40


@pytest.fixture
def fail_while_capturing(monkeypatch) -> Callable[[], None]:
    right = DecodeStep._run

    def run(self, size: int) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            out_of_memory()
        return right(self, size)

    return lambda: monkeypatch.setattr(DecodeStep, "_run", run)


@pytest.mark.gpu
def test_out_of_memory_at_capture(tiny_decoder, fail_while_capturing, monkeypatch):
    """The flags that help are named; without graphs the engine runs, and later ones capture."""
    decoder = tiny_decoder(device="cuda")
    with monkeypatch.context():
        fail_while_capturing()
        with pytest.raises(RuntimeError, match="of 2 requests .*3.5 GiB") as error:
            make_llm(decoder, max_running_requests=2)
        for flag in ("--max-running-requests", "--hbm-budget-gib", "--enforce-eager"):
            assert flag in str(error.value)
        expected = ids_of(make_llm(decoder, max_running_requests=2, enforce_eager=True))
        monkeypatch.undo()
    assert ids_of(make_llm(decoder, max_running_requests=2)) == expected


@pytest.mark.gpu
def test_out_of_memory_in_the_first_step(tiny_decoder, monkeypatch):
    """Before any graph, and where none is wanted: the same words."""
    monkeypatch.setattr(DecodeStep, "_run", out_of_memory)
    for eager in (False, True):
        with pytest.raises(RuntimeError, match="--max-running-requests or --hbm-budget-gib"):
            make_llm(tiny_decoder(device="cuda"), max_running_requests=2, enforce_eager=eager)
