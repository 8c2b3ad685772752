"""`trace record` and `trace replay`, through the command line.

Guards: a trace that is not of the run that was asked for; a rate that is not the policy's; "exact"
where nothing was compared, or where one layer differs; a cache with fewer slots than a step needs;
a file that is none, taken for one; what was recorded before Ctrl-C, lost; a figure with no data.
"""

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minihisparse import cli, record_command
from minihisparse.replay import POLICIES, replay
from minihisparse.runner import Runner
from minihisparse.sizing import stack_distances
from minihisparse.synthetic import sliding_selections
from minihisparse.trace import FORMAT, Trace, read_trace, write_trace
from minihisparse.trace_writer import TraceWriter

K, B, PAGE = 8, 16, 4
TEXT = "Once upon a time there was a slot. It held a record, and the record was in the host too. "
FIGURE_6 = [
    ("last_step", K),
    ("random", 2 * K),
    ("fifo", 2 * K),
    ("engine", 2 * K),
    ("belady", 2 * K),
    ("engine", 4 * K),
    ("lru", 2 * K),
    ("clock", 2 * K),
    ("lfu", 2 * K),
]


@pytest.fixture
def trace(capsys, monkeypatch, tmp_path) -> Callable:
    """trace("replay", FILE, ...): exit code, text on stderr, report: all that is on stdout."""

    def run(*argv: object) -> tuple[int, str, dict]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        capsys.readouterr()
        code = cli.main(["trace", *map(str, argv), "--disable-tqdm"])
        out, err = capsys.readouterr()
        assert out.count("\n") == 1
        report = json.loads(out)
        assert "Traceback" not in err and ("error" in report) == ("error:" in err)
        return code, err.rstrip("\n"), report

    return run


@pytest.fixture
def record(trace, tiny_folder, tmp_path) -> Callable:
    """record(*flags): a trace of the tiny model, and what `trace record` printed."""
    prompt = tmp_path / "text.txt"
    prompt.write_text(TEXT * 5, encoding="utf-8")
    file = tmp_path / "trace.safetensors"

    def run(*argv: object, new: int = 40) -> tuple[int, str, dict]:
        sizes = ["--top-k", K, "--device-buffer-size", B, "--page-size", PAGE]
        sizes = [] if "--device-buffer-size" in argv else sizes
        return trace(
            "record",
            *("--model", tiny_folder, "--device", "cpu", "--dtype", "fp32", "--out", file),
            *("--prompt-file", prompt, "--max-new-tokens", new, "--ignore-eos"),
            *(*sizes, *argv),
        )

    run.file = file
    return run


def made_up(num_steps: int = 30, num_layers: int = 3, requests: int = 2) -> Trace:
    positions = sliding_selections(
        num_steps=num_steps,
        num_layers=num_layers,
        num_requests=requests,
        top_k=K,
        context_len=90,
        num_misses=3,
        seed=1,
    )
    seq_lens = 91 + torch.arange(num_steps, dtype=torch.int32)[:, None].expand(-1, requests)
    return Trace(positions, seq_lens.contiguous(), {"model": "made up", "selector": "sliding"})


# ---- record ----


def test_record_and_replay(record, trace):
    code, text, report = record("--prompt-tokens", "100,12,250")
    assert code == 0
    read = read_trace(record.file)
    assert read.positions.shape == (39, 2, 3, K)
    assert read.seq_lens[0].tolist() == [101, 13, 251]  # all in step 0: they decode together
    assert read.seq_lens[-1].tolist() == [139, 51, 289]
    assert report["steps"] == 39 and report["command"] == "trace" and report["exact"] is None
    assert report["trace"] == {
        "file": str(record.file),
        "bytes": record.file.stat().st_size,
        "steps": 39,
        "layers": 2,
        "requests": 3,
        "top_k": K,
        "longest": 289,
        "metadata": dict(read.metadata),
    }
    assert sum(report["counters"]["misses"]) == report["cache"]["misses"] > 0
    assert sum(report["counters"]["hits"]) == report["cache"]["hits"]
    assert 0 < report["recording_share"] < 1
    assert report["prefix"]["tokens_shared"] > 0  # the prompts are one text, cut
    share = report["cache"]["misses"] / (report["cache"]["misses"] + report["cache"]["hits"])
    assert text.splitlines()[-2:] == [
        f"{record.file}: {read.metadata['model']}, quest, 39 steps, 2 layers, 3 requests, K = 8, "
        f"13 to 289 tokens, {record.file.stat().st_size / 2**20:.1f} MiB",
        f"recorded with {share:.2%} misses",
    ]
    settings = json.loads(read.metadata["settings"])
    assert settings["top_k"] == K and settings["prompt_file"] == "text.txt"
    assert settings["page_size"] == PAGE and read.anchor_of == (0, 1)
    assert read.metadata["selector"] == "quest" and read.metadata["device_buffer_size"] == str(B)

    code, text, replayed = trace("replay", record.file)
    assert code == 0 and replayed["exact"] is True
    misses = report["cache"]["misses"]
    assert text.splitlines()[-1] == (
        f"exact: at B = {B} the engine counted {misses} misses, the replay as many, in every layer"
    )
    assert replayed["engine"]["counted"] == replayed["engine"]["replayed"] == report["counters"]


def test_record_with_a_size_per_layer(record, trace):
    sizes = ["--top-k", K, "--page-size", PAGE, "--device-buffer-size", "9,30"]
    code, _, report = record(*sizes)
    assert code == 0
    assert json.loads(read_trace(record.file).metadata["device_buffer_size"]) == [9, 30]
    code, text, replayed = trace("replay", record.file)
    assert code == 0 and replayed["exact"] is True
    assert "exact: at its B per layer the engine counted" in text
    assert report["counters"]["misses"][0] > report["counters"]["misses"][1]


def test_record_samples_as_generate_does(record):
    record("--temperature", "1.5", "--seed", "3")
    first = read_trace(record.file).positions
    record("--temperature", "1.5", "--seed", "3")
    assert torch.equal(read_trace(record.file).positions, first)
    record("--temperature", "1.5", "--seed", "4")
    assert not torch.equal(read_trace(record.file).positions, first)


def test_interrupted_recording(record, monkeypatch, trace):
    """What was recorded stays, and replays to the engine's counters."""
    right, calls = Runner.decode_layer, []

    def decode_layer(self, *args):
        calls.append(1)
        if len(calls) == 2 * 9 + 2:
            raise KeyboardInterrupt
        return right(self, *args)

    monkeypatch.setattr(Runner, "decode_layer", decode_layer)
    code, text, report = record()
    assert code == 130 and report["interrupted"] is True
    assert report["trace"]["steps"] == report["steps"] == 9
    assert len(read_trace(record.file).positions) == 9
    code, _, report = trace("replay", record.file)
    assert code == 0 and report["exact"] is True


# The command, with steps that leave its parent the time to end it; with Ctrl-C as in a terminal: a
# process that was started in the background ignores it.
SLOWLY = """
import signal, sys, time
from minihisparse.cli import main
from minihisparse.trace_writer import TraceWriter

append = TraceWriter.append

def append_slowly(self, *step):
    time.sleep(0.05)
    append(self, *step)

TraceWriter.append = append_slowly
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGKILL"])
@pytest.mark.skipif(sys.platform == "win32", reason="no such signals")
def test_a_process_that_is_ended(trace, tiny_folder, tmp_path, name):
    """Whatever ends the process, whole steps are in the file; after Ctrl-C the counters too."""
    file, prompt = tmp_path / "trace.safetensors", tmp_path / "text.txt"
    prompt.write_text(TEXT * 5, encoding="utf-8")
    argv = ["--model", tiny_folder, "--device", "cpu", "--out", file, "--prompt-file", prompt]
    argv += ["--max-new-tokens", 500, "--ignore-eos", "--top-k", K, "--device-buffer-size", B]
    argv += ["--page-size", PAGE, "--disable-tqdm"]
    command = [sys.executable, "-c", SLOWLY, "trace", "record", *map(str, argv)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert wait_for_steps(process, file, 5), process.communicate()[1]
        process.send_signal(getattr(signal, name))
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    read = read_trace(file)
    assert 5 <= len(read.positions) < 499 and "Traceback" not in err
    code, text, report = trace("replay", file, "--policies", "lru")
    assert code == 0 and report["trace"]["steps"] == len(read.positions)
    if name == "SIGINT":
        assert process.returncode == 130 and not read.is_unfinished
        told = json.loads(out)
        assert told["interrupted"] and told["trace"]["steps"] == len(read.positions)
        assert report["exact"] is True
    else:
        assert process.returncode == -signal.SIGKILL and read.is_unfinished
        assert "its recording was cut off" in text and report["exact"] is None


def wait_for_steps(process: subprocess.Popen, file: Path, num_steps: int) -> bool:
    """Until the file, which grows, can be read and has so many; False if the process ends."""
    while process.poll() is None:
        try:
            if len(read_trace(file).positions) >= num_steps:
                return True
        except (FileNotFoundError, ValueError):  # not there yet, or without a step
            pass
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-new-tokens", "1"], "--max-new-tokens 1: the first token comes from the prompt"),
        (["--max-new-tokens", "1000"], "over the limit max_model_len=1024"),
        (["--prompt-tokens", "9999"], "--prompt-tokens 9999 is more than the prompt has"),
        (["--prompt", "second", "--prompt-tokens", "5"], "--prompt-tokens cuts one prompt, but 2"),
        (["--prompt", ""], "a prompt is empty"),
        (["--out", "/nowhere/at/all/trace.safetensors"], "/nowhere/at/all/trace.safetensors"),
        (["--host-to-device-ratio", "1"], "the host pool"),
        (["--max-model-len", "0"], "--max-model-len 0 is not in 1..1024"),
    ],
)
def test_what_cannot_be_recorded(record, argv, message):
    code, _, report = record(*argv)
    assert code == 1 and message in report["error"]
    assert not record.file.exists()
    record.file.write_text("an older trace")
    assert record(*argv)[0] == 1 and record.file.read_text() == "an older trace"


def test_nothing_to_record(trace, tiny_folder, tmp_path, monkeypatch):
    """Every request ends with its first token: EOS at once."""
    monkeypatch.setattr(record_command, "_decode", lambda *args: None)
    file = tmp_path / "trace.safetensors"
    argv = ["--model", tiny_folder, "--device", "cpu", "--prompt", "a", "--out", file]
    code, _, report = trace("record", *argv)
    assert code == 1 and "pass --ignore-eos" in report["error"] and not file.exists()


# ---- replay ----


def test_the_caches_of_figure_6(trace, tmp_path):
    made = made_up()
    write_trace(tmp_path / "trace", made)
    code, text, report = trace("replay", tmp_path / "trace", "--warmup-steps", 4, "--seed", 7)
    assert code == 0 and report["exact"] is None  # no counters: nothing was compared
    rows = report["rows"]
    assert [(row["policy"], row["device_buffer_size"]) for row in rows] == FIGURE_6
    for row in rows:
        result = replay(made, row["policy"], row["device_buffer_size"], seed=7)
        assert row["miss_rate"] == round(result.miss_rate(4), 6)
        expected = [round(rate, 6) for rate in result.layer_miss_rates(4)]
        assert row["layer_miss_rates"] == expected
        assert row["misses"] == int(result.misses.sum()) > 0
        assert row["hits"] == int(result.hits.sum())
    lines = text.splitlines()
    assert lines[0].endswith(
        "made up, sliding, 30 steps, 3 layers, 2 requests, K = 8, 91 to 120 tokens, 0.0 MiB"
    )
    assert lines[1].split()[:3] == ["policy", "B", "B/K"]
    for line, row in zip(lines[2:11], rows, strict=True):
        size = row["device_buffer_size"]
        expected = [row["policy"], str(size), str(size // K), f"{row['miss_rate']:.2%}"]
        assert line.split()[:4] == expected
    assert lines[11:] == ["the file has no counters of an engine: nothing to compare with"]


def test_other_caches(trace, tmp_path):
    write_trace(tmp_path / "trace", made_up())

    def caches(*argv: object) -> list[tuple[str, int]]:
        code, _, report = trace("replay", tmp_path / "trace", *argv)
        assert code == 0
        return [(row["policy"], row["device_buffer_size"]) for row in report["rows"]]

    assert caches("--policies", "lru,belady") == [("lru", 16), ("belady", 16)]
    assert caches("--device-buffer-size", "8,20") == [("engine", 8), ("engine", 20)]
    both = caches("--policies", "fifo,lfu", "--device-buffer-size", "9,11")
    assert both == [("fifo", 9), ("lfu", 9), ("fifo", 11), ("lfu", 11)]
    everything = caches("--policies", ",".join(POLICIES))
    assert [policy for policy, _ in everything] == list(POLICIES)


def test_per_layer(trace, tmp_path):
    write_trace(tmp_path / "trace", made_up())
    argv = ["--per-layer", "--policies", "lru,fifo"]
    _, text, report = trace("replay", tmp_path / "trace", *argv)
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("layer"))
    assert lines[head].split() == ["layer", "lru", "16", "fifo", "16"]
    for layer in range(3):
        rates = [f"{row['layer_miss_rates'][layer]:.2%}" for row in report["rows"]]
        assert lines[head + 1 + layer].split() == [str(layer), *rates]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--device-buffer-size", "16,7"], "--device-buffer-size 7 is less than the trace's K = 8"),
        (["--policies", "lru,mru"], "--policies 'mru' is not one of: last_step, random"),
        (["--warmup-steps", "30"], "--warmup-steps 30 is not in 0..29: the trace has 30 steps"),
        (["--warmup-steps", "-1"], "--warmup-steps -1 is not in 0..29"),
    ],
)
def test_what_cannot_be_replayed(trace, tmp_path, argv, message):
    write_trace(tmp_path / "trace", made_up())
    code, _, report = trace("replay", tmp_path / "trace", *argv)
    assert code == 1 and message in report["error"] and "rows" not in report


def test_files_that_are_none(trace, tmp_path):
    file = tmp_path / "trace"
    code, _, report = trace("replay", file)
    assert code == 1 and "trace: there is no such file" in report["error"]
    file.write_text("no trace")
    code, _, report = trace("replay", file)
    assert code == 1 and "is no selection trace: it is no safetensors file" in report["error"]
    write_trace(file, made_up())
    file.write_bytes(file.read_bytes()[:-5])
    code, _, report = trace("replay", file)
    assert code == 1 and "it is truncated: tensor" in report["error"]
    tensors = {"positions": torch.zeros(0, 1, 1, 1), "seq_lens": torch.zeros(0, 1)}
    tensors = {name: tensor.int() for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": FORMAT})
    code, _, report = trace("replay", file)
    assert code == 1 and "it is empty: it has no step" in report["error"]


def test_a_recording_that_was_killed(trace, tmp_path):
    made = made_up()
    shape = {"num_layers": 3, "num_requests": 2, "top_k": K}
    writer = TraceWriter(tmp_path / "trace", **shape, max_steps=100)
    for step in range(12):
        writer.append(made.positions[step], made.seq_lens[step])
    code, text, report = trace("replay", tmp_path / "trace", "--policies", "lru")
    assert code == 0 and report["trace"]["steps"] == 12
    assert "its recording was cut off: these are its whole steps, 12" in text
    expected = replay(Trace(made.positions[:12], made.seq_lens[:12]), "lru", 2 * K)
    assert report["rows"][0]["misses"] == int(expected.misses.sum())


def test_counters_that_differ_in_one_layer(record, trace):
    record()
    read = read_trace(record.file)
    for name in ("misses", "hits"):
        counters = json.loads(read.metadata["counters"])
        counters[name][1] += 1
        changed = dict(read.metadata) | {"counters": json.dumps(counters)}
        write_trace(record.file.with_name("other"), Trace(read.positions, read.seq_lens, changed))
        code, text, report = trace("replay", record.file.with_name("other"))
        assert code == 1 and report["exact"] is False
        assert text.splitlines()[-1] == (
            f"NOT exact: at B = {B}, layer 1, the engine counted {counters[name][1]} {name}, "
            f"the replay {counters[name][1] - 1}"
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"counters": "many"},
        {"counters": "[1, 2]"},
        {"counters": '{"hits": [1], "misses": [2]}'},
        {"device_buffer_size": "large"},
        {"device_buffer_size": "[16, 16]"},
        {"device_buffer_size": "7"},
    ],
    ids=str,
)
def test_counters_that_are_none(trace, tmp_path, wrong):
    counters = {"device_buffer_size": "16", "counters": '{"hits": [1, 1, 1], "misses": [0, 0, 0]}'}
    made = made_up()
    write_trace(tmp_path / "trace", Trace(made.positions, made.seq_lens, counters | wrong))
    code, _, report = trace("replay", tmp_path / "trace", "--policies", "lru")
    (key,) = wrong
    assert code == 1 and f"the metadata '{key}' " in report["error"] and "rows" not in report


# ---- figures ----


def test_figures(trace, tmp_path):
    """Figure 6, and how far back each layer reaches; each has its data beside it."""
    pytest.importorskip("matplotlib")
    made = made_up()
    write_trace(tmp_path / "trace", made)
    _, text, report = trace("replay", tmp_path / "trace", "--plot", tmp_path / "figures")
    files = sorted(path.name for path in (tmp_path / "figures").iterdir())
    names = ["miss_rate", "reuse_distance"]
    assert files == [f"{name}.{kind}" for name in names for kind in ("json", "png")]
    for name in names:
        assert f"figure: {tmp_path / 'figures' / name}.png" in text.splitlines()
    miss_rate, reuse = (
        json.loads((tmp_path / "figures" / f"{name}.json").read_text()) for name in names
    )
    labels = ["B = K, last step only", "B = 2K, random", "B = 2K, FIFO", "B = 2K, engine's LRU"]
    labels += ["B = 2K, Belady", "B = 4K, engine's LRU", "B = 2K, plain LRU", "B = 2K, CLOCK"]
    assert list(miss_rate["by_step"]) == [*labels, "B = 2K, LFU"]
    assert list(miss_rate["mean"].values()) == [row["miss_rate"] for row in report["rows"]]
    result = replay(made, "fifo", 2 * K)
    expected = (result.misses.sum(1) / (result.hits + result.misses).sum(1)).tolist()
    assert miss_rate["by_step"]["B = 2K, FIFO"] == [round(rate, 6) for rate in expected]
    assert miss_rate["config"] == "made up, sliding, K = 8, 120 tokens, trace"

    assert reuse["sizes"] == [8, 16, 32, 64] and reuse["top_k"] == K
    distances = stack_distances(made)
    for layer, shares in enumerate(reuse["shares"]):
        own = distances[:, layer]
        edges = zip([-1, 8, 16, 32, 64], [8, 16, 32, 64, 10**6], strict=True)
        expected = [((own > low) & (own <= high)).float().mean().item() for low, high in edges]
        assert shares == pytest.approx(expected, abs=1e-5)


# ---- the goal ----


def test_replay_is_quick(trace, tmp_path):
    """A tenth of 1,000 steps of 30 layers and K = 256, all caches: the goal is 60 s for all."""
    positions = sliding_selections(
        num_steps=100,
        num_layers=30,
        num_requests=1,
        top_k=256,
        context_len=6000,
        num_misses=25,
        seed=0,
    )
    seq_lens = 6001 + torch.arange(100, dtype=torch.int32)[:, None]
    write_trace(tmp_path / "trace", Trace(positions, seq_lens))
    trace("replay", tmp_path / "trace", "--policies", ",".join(POLICIES))  # compiles
    start = time.perf_counter()
    code, _, _ = trace("replay", tmp_path / "trace")
    assert code == 0 and time.perf_counter() - start < 10


def test_size_is_wired(trace, tmp_path):
    """What it prints is test_sizing_command.py's."""
    write_trace(tmp_path / "trace", made_up())
    code, text, report = trace("size", tmp_path / "trace")
    assert code == 0 and "--hisparse-config" in text and report["command"] == "trace"
