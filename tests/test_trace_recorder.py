"""A recorded run: what the selectors chose, row by row, and what the cache counted.

Guards: a selection under another layer's, row's or step's name; padding that is recorded; lengths
that are one off; the last step lost, or a half one written; counters of other steps than those in
the file; a recording that changes what is decoded; CUDA graphs that know nothing of the recorder.
"""

import json
from collections.abc import Callable

import pytest
import torch
from addon_rig import tiny_addon_file

from minihisparse.assembly import make_runner
from minihisparse.config import HiSparseConfig
from minihisparse.decode_step import DecodeStep
from minihisparse.replay import replay
from minihisparse.request import Request
from minihisparse.runner import Runner
from minihisparse.sampling import SamplingParams
from minihisparse.scheduler import Scheduler
from minihisparse.trace import Trace, read_trace
from minihisparse.trace_recorder import TraceRecorder
from minihisparse.trace_writer import TraceWriter

K, B, PAGE = 8, 16, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Prompts below, at and above B; more requests than rows, so that they come and go.
PROMPTS, NEW = (9, 15, 16, 17, 60, 3, 40), (20, 8, 30, 12, 25, 9, 14)


def make(decoder, *, rows: int = 3, cache: str = "hisparse", **options) -> Runner:
    hisparse = HiSparseConfig(top_k=K, page_size=PAGE, device_buffer_size=options.pop("size", B))
    options = {"selector": "quest"} | options
    return make_runner(
        decoder,
        cache=cache,
        hisparse=hisparse,
        max_model_len=128,
        max_running_requests=rows,
        **options,
    )


def watch(runner: Runner) -> list[dict[int, torch.Tensor]]:
    """Per step, layer -> positions [R, K] that the layer has read; of eager steps."""
    steps: list[dict[int, torch.Tensor]] = []
    decode_layer = runner.decode_layer

    def watched(layer, hidden, batch):
        if layer == 0:
            steps.append({})
        result = decode_layer(layer, hidden, batch)
        steps[-1][layer] = result.positions[: batch.num_real_reqs].clone().cpu()
        return result

    runner.decode_layer = watched
    return steps


def run(scheduler: Scheduler, lengths=PROMPTS, new=NEW) -> list[list[int]]:
    """All requests to their ends; their tokens."""
    requests = []
    for index, (length, max_new_tokens) in enumerate(zip(lengths, new, strict=True)):
        ids = [(7 * i + 3 * length) % 120 for i in range(length)]
        params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
        requests.append(Request(index, None, ids, params))
        scheduler.add(requests[-1])
    while scheduler.has_unfinished:
        scheduler.step()
    return [request.output_ids for request in requests]


def noted(step: Callable) -> tuple[Callable, list[tuple[list[int], list[int]]]]:
    """A step that notes its rows and lengths."""
    notes = []

    def run(token_ids, rows, seq_lens):
        notes.append((list(rows), list(seq_lens)))
        return step(token_ids, rows, seq_lens)

    return run, notes


@pytest.mark.parametrize("selector", ["quest", "dsa", "dsa-shared"])
@pytest.mark.parametrize("prefetch", [None, False])
def test_records_what_every_layer_reads(tiny_decoder, tmp_path, selector, prefetch):
    decoder = tiny_decoder(num_hidden_layers=5)
    options = {}
    if selector != "quest":
        options["selector_weights"] = tiny_addon_file(tmp_path, decoder, selector)
    hisparse = HiSparseConfig(
        top_k=K, page_size=PAGE, device_buffer_size=B, enable_layer_prefetch=prefetch
    )
    runner = make_runner(
        decoder,
        cache="hisparse",
        selector=selector,
        hisparse=hisparse,
        max_model_len=128,
        max_running_requests=3,
        **options,
    )
    file = tmp_path / "trace.safetensors"
    read = watch(runner)
    more = {"metadata": {"model": "tiny"}, "settings": {"seed": 3}}
    with TraceRecorder(runner, file, **more) as recorder:
        step, notes = noted(DecodeStep(runner, progress=False))
        run(Scheduler(runner, recorder.around(step)))
    trace = read_trace(file)
    assert trace.positions.shape == (len(read), 5, 3, K) and recorder.num_steps == len(read) > 30
    expected = torch.full_like(trace.positions, -1)
    seq_lens = torch.zeros_like(trace.seq_lens)
    for number, (rows, lens) in enumerate(notes):
        seq_lens[number, rows] = torch.tensor(lens, dtype=torch.int32)
        for layer, positions in read[number].items():
            expected[number, layer, rows] = positions
    assert torch.equal(trace.positions, expected) and torch.equal(trace.seq_lens, seq_lens)
    assert ((seq_lens > 0).sum(1) == 3).any() and ((seq_lens > 0).sum(1) < 3).any()
    if selector == "dsa-shared":
        assert torch.equal(expected[:, 0], expected[:, 1])
        assert not torch.equal(expected[:, 1], expected[:, 2])
    counted = runner.cache.counters[:, :2].T.tolist()
    counters = json.loads(trace.metadata["counters"])
    assert [counters["hits"], counters["misses"]] == counted == list(recorder.counters.values())
    assert trace.metadata["model"] == "tiny" and trace.metadata["device_buffer_size"] == str(B)
    settings = json.loads(trace.metadata["settings"])
    assert settings["seed"] == 3 and settings["top_k"] == K and settings["dtype"] == "float32"
    anchor_of = runner.selector.anchor_of
    assert trace.anchor_of == tuple(range(5) if anchor_of is None else anchor_of)
    assert (anchor_of is not None) == (selector == "dsa-shared")
    assert 0 < recorder.seconds


def assert_replayed(trace: Trace) -> None:
    """The engine's rule at the recorded B counts what the file says."""
    counters = json.loads(trace.metadata["counters"])
    result = replay(trace, "engine", json.loads(trace.metadata["device_buffer_size"]))
    assert result.misses.sum(0).tolist() == counters["misses"]
    assert result.hits.sum(0).tolist() == counters["hits"]
    assert min(counters["misses"]) > 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [B, K, (16, 24, 9)], ids=str)
def test_replay_counts_what_the_engine_counted(tiny_decoder, tmp_path, device, size):
    """A B per layer too; on a GPU the steps are graphs."""
    runner = make(tiny_decoder(device=device), size=size, rows=len(PROMPTS))
    file = tmp_path / "trace.safetensors"
    with TraceRecorder(runner, file) as recorder:
        step = DecodeStep(runner, progress=False)
        run(Scheduler(runner, recorder.around(step), sum(PROMPTS)))
    trace = read_trace(file)
    assert_replayed(trace)
    alone = trace.seq_lens[0].tolist()  # all begin together
    assert alone == [length + 1 for length in PROMPTS]


@pytest.mark.gpu
@pytest.mark.parametrize("selector", ["quest", "dsa-shared"])
def test_graphs_record_what_eager_steps_do(tiny_decoder, tmp_path, selector):
    decoder = tiny_decoder(num_hidden_layers=5, device="cuda")
    options = {"selector": selector}
    if selector != "quest":
        options["selector_weights"] = tiny_addon_file(tmp_path, decoder, selector)
    traces = []
    for name, eager in (("graphs", False), ("eager", True)):
        runner = make(decoder, **options)
        with TraceRecorder(runner, tmp_path / name) as recorder:
            step = DecodeStep(runner, progress=False, enforce_eager=eager)
            assert step.use_graphs != eager
            run(Scheduler(runner, recorder.around(step)))
        traces.append(read_trace(tmp_path / name))
    assert torch.equal(traces[0].positions, traces[1].positions)
    assert torch.equal(traces[0].seq_lens, traces[1].seq_lens)
    assert traces[0].metadata == traces[1].metadata


@pytest.mark.parametrize("device", DEVICES)
def test_recording_changes_nothing(tiny_decoder, tmp_path, device):
    decoder = tiny_decoder(device=device)
    plain = make(decoder)
    expected = run(Scheduler(plain, DecodeStep(plain, progress=False)))
    runner = make(decoder)
    with TraceRecorder(runner, tmp_path / "trace.safetensors") as recorder:
        step = DecodeStep(runner, progress=False)
        assert run(Scheduler(runner, recorder.around(step))) == expected
    assert torch.equal(runner.cache.counters, plain.cache.counters)


def test_full_cache_has_nothing_to_count(tiny_decoder, tmp_path):
    files = [tmp_path / name for name in ("full", "hisparse")]
    for file in files:
        runner = make(tiny_decoder(), cache=file.name)
        with TraceRecorder(runner, file) as recorder:
            run(Scheduler(runner, recorder.around(DecodeStep(runner, progress=False))))
    full, hisparse = map(read_trace, files)
    assert torch.equal(full.positions, hisparse.positions)
    assert set(full.metadata) == {"settings"}
    assert set(hisparse.metadata) == {"settings", "device_buffer_size", "counters"}


@pytest.mark.parametrize("device", DEVICES)
def test_one_recorder_after_another(tiny_decoder, tmp_path, device):
    """The same steps go on, unrecorded too: each file has its own, with its own counts."""
    runner = make(tiny_decoder(device=device))
    first = TraceRecorder(runner, tmp_path / "first")
    step = DecodeStep(runner, progress=False)
    run(Scheduler(runner, first.around(step)))
    first.close()
    run(Scheduler(runner, step))
    before = runner.cache.counters.clone()
    with TraceRecorder(runner, tmp_path / "second") as second:
        run(Scheduler(runner, second.around(step)))
    traces = [read_trace(tmp_path / name) for name in ("first", "second")]
    assert torch.equal(traces[0].positions, traces[1].positions)
    own = (runner.cache.counters - before)[:, :2].T.tolist()
    assert list(json.loads(traces[1].metadata["counters"]).values()) == own
    first.close()  # nothing


def test_a_step_that_is_broken_off_is_not_recorded(tiny_decoder, tmp_path):
    """Ctrl-C in a layer: the counters are those of the whole steps before."""
    runner = make(tiny_decoder(), rows=1)
    decode_layer, calls = runner.decode_layer, []

    def interrupted(layer, *args):
        calls.append(layer)
        if len(calls) == 3 * 7 + 2:
            raise KeyboardInterrupt
        return decode_layer(layer, *args)

    runner.decode_layer = interrupted
    file = tmp_path / "trace.safetensors"
    with pytest.raises(KeyboardInterrupt), TraceRecorder(runner, file) as recorder:
        run(Scheduler(runner, recorder.around(DecodeStep(runner, progress=False))), [60], [20])
    trace = read_trace(file)
    assert len(trace.positions) == recorder.num_steps == 7
    assert_replayed(trace)
    counted = runner.cache.counters[:, :2].sum(1).tolist()
    recorded = [sum(pair) for pair in zip(*recorder.counters.values(), strict=True)]
    assert counted[0] > recorded[0] and counted[2] == recorded[2]


@pytest.mark.parametrize("written", [False, True])
def test_a_write_that_is_broken_off(tiny_decoder, tmp_path, monkeypatch, written):
    """Ctrl-C just before or after a step is in the file: the counters are those of the file."""
    runner, append = make(tiny_decoder(), rows=1), TraceWriter.append

    def interrupted(self, *step):
        if self.num_steps == 5 and not written:
            raise KeyboardInterrupt
        append(self, *step)
        if self.num_steps == 6:
            raise KeyboardInterrupt

    file = tmp_path / "trace.safetensors"
    with pytest.raises(KeyboardInterrupt), TraceRecorder(runner, file) as recorder:
        monkeypatch.setattr(TraceWriter, "append", interrupted)
        run(Scheduler(runner, recorder.around(DecodeStep(runner, progress=False))), [60], [20])
    trace = read_trace(file)
    assert len(trace.positions) == recorder.num_steps == 5 + written
    assert_replayed(trace)


def test_a_recorder_later_than_the_graphs(tiny_decoder, tmp_path):
    """Steps that do not fill the tap are refused, not recorded as they are."""
    runner = make(tiny_decoder())
    recorder = TraceRecorder(runner, tmp_path / "trace.safetensors")
    step = recorder.around(lambda *args: torch.zeros(1))
    step([1], [0], [9])
    with pytest.raises(RuntimeError, match="make the TraceRecorder before the DecodeStep"):
        step([1], [0], [10])
    recorder.close()
    assert not list(tmp_path.iterdir())


def test_limits(tiny_decoder, tmp_path):
    runner = make(tiny_decoder())
    with pytest.raises(OSError):
        TraceRecorder(runner, tmp_path / "nowhere" / "trace.safetensors")
    assert runner.tap is None
    with pytest.raises(ValueError, match="room for 4 steps; pass a larger max_steps"):
        with TraceRecorder(runner, tmp_path / "trace.safetensors", max_steps=4) as recorder:
            run(Scheduler(runner, recorder.around(DecodeStep(runner, progress=False))))
    assert len(read_trace(tmp_path / "trace.safetensors").positions) == 4
