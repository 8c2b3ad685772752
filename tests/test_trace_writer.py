"""Traces written step by step, and the example that converts another engine's dump into one.

Guards: a step that is lost when a recording is killed, or a half one that is read; a finished file
that only this project can read; metadata that overwrites the first steps; steps of another shape
that shift all that follow; a dump whose order or K nobody looked at.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from minihisparse.trace import Trace, read_trace
from minihisparse.trace_writer import TraceWriter, write_steps

LAYERS, REQUESTS, K = 3, 2, 4
SHAPE = {"num_layers": LAYERS, "num_requests": REQUESTS, "top_k": K}
CONVERTER = Path(__file__).parents[1] / "examples" / "convert_trace.py"


def make_steps(num_steps: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """positions [steps, LAYERS, REQUESTS, K], seq_lens; request 1 has no step at first."""
    generator = torch.Generator().manual_seed(seed)
    seq_lens = torch.tensor([20, -1]) + torch.arange(num_steps)[:, None]
    seq_lens = seq_lens.clamp(min=0).int()
    positions = torch.full((num_steps, LAYERS, REQUESTS, K), -1, dtype=torch.int32)
    for step, layer, request in torch.cartesian_prod(*map(torch.arange, positions.shape[:3])):
        seq_len = int(seq_lens[step, request])
        chosen = torch.randperm(seq_len, generator=generator)[:K].sort().values
        positions[step, layer, request, : len(chosen)] = chosen.int()
    return positions, seq_lens


def write(path: Path, num_steps: int, max_steps: int, **metadata: str) -> TraceWriter:
    writer = TraceWriter(path, **SHAPE, max_steps=max_steps, metadata=metadata)
    for step in zip(*make_steps(num_steps), strict=True):
        writer.append(*step)
    assert writer.num_steps == num_steps
    return writer


@pytest.mark.parametrize("num_steps", [1, 5, 9])
def test_round_trip(tmp_path, num_steps):
    """Room for nine steps, used or not. Anybody's safetensors reads the same tensors."""
    file = tmp_path / "trace.safetensors"
    with write(file, num_steps, 9, model="tiny") as writer:
        writer.metadata["counters"] = json.dumps(list(range(700)))  # about 3 KB more
    positions, seq_lens = make_steps(num_steps)
    trace = read_trace(file)
    assert torch.equal(trace.positions, positions) and torch.equal(trace.seq_lens, seq_lens)
    assert trace.metadata == {"model": "tiny", "counters": json.dumps(list(range(700)))}
    tensors = load_file(file)
    assert set(tensors) == {"positions", "seq_lens"} | ({"unused"} if num_steps < 9 else set())
    assert torch.equal(tensors["positions"], positions)
    assert torch.equal(tensors["seq_lens"], seq_lens)
    writer.close()  # once more: nothing
    assert torch.equal(read_trace(file).positions, positions)


def test_killed_at_every_byte(tmp_path):
    """Whole steps are read, whatever is missing of the next one; the metadata says so."""
    file, cut = tmp_path / "trace.safetensors", tmp_path / "cut"
    writer = write(file, 4, 6, model="tiny")  # not closed
    content = file.read_bytes()
    step_bytes, room = 4 * LAYERS * REQUESTS * K, 4 * REQUESTS * 6
    first = len(content) - 4 * step_bytes
    positions, seq_lens = make_steps(4)
    for size in range(first - room - 3, len(content) + 1):
        cut.write_bytes(content[:size])
        whole = max(0, size - first) // step_bytes
        if whole == 0:
            with pytest.raises(ValueError, match="it is empty|it is no safetensors file"):
                read_trace(cut)
            continue
        trace = read_trace(cut)
        assert torch.equal(trace.positions, positions[:whole])
        assert torch.equal(trace.seq_lens, seq_lens[:whole])
        assert trace.metadata == {"model": "tiny", "recording": "unfinished"}
    with pytest.raises(SafetensorError):  # others do not mistake it for a whole one
        load_file(file)
    writer.close()
    assert "recording" not in read_trace(file).metadata


@pytest.mark.parametrize("old", [None, b"x" * 100_000])
def test_nothing_recorded_changes_nothing(tmp_path, old):
    file = tmp_path / "trace.safetensors"
    if old is not None:
        file.write_bytes(old)
    before = list(tmp_path.iterdir())
    for _ in range(2):
        writer = write(file, 0, 4)
        assert (file.read_bytes() if file.exists() else None) == old
        writer.close()
        assert list(tmp_path.iterdir()) == before
        assert (file.read_bytes() if file.exists() else None) == old


def test_an_existing_file_is_replaced_by_the_first_step(tmp_path):
    """Who has mapped the old one goes on reading it."""
    file = tmp_path / "trace.safetensors"
    write(file, 4, 4).close()
    old = read_trace(file)
    with write(file, 2, 2):
        assert len(read_trace(file).positions) == 2
    assert len(read_trace(file).positions) == 2 and list(tmp_path.iterdir()) == [file]
    assert torch.equal(old.positions, make_steps(4)[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, s: (p[..., :3], s), r"step 2: positions is torch.int32 \(3, 2, 3\), expected"),
        (lambda p, s: (p[:2], s), r"step 2: positions is torch.int32 \(2, 2, 4\)"),
        (lambda p, s: (p.long(), s), "step 2: positions is torch.int64"),
        (lambda p, s: (p, s[:1]), r"step 2: seq_lens is torch.int32 \(1,\), expected int32 \(2,\)"),
        (lambda p, s: (p, s.long()), "step 2: seq_lens is torch.int64"),
        (lambda p, s: (p, s - 18), "step 2, layer 0, request 0: position .* seq_len is 4"),
        (lambda p, s: (p.flip(2), s), "step 2, layer 0, request 0: .* is not above"),
    ],
)
def test_a_wrong_step_is_refused_and_not_written(tmp_path, change, message):
    file = tmp_path / "trace.safetensors"
    positions, seq_lens = make_steps(4)
    with write(file, 2, 4) as writer:
        with pytest.raises(ValueError, match=message):
            writer.append(*change(positions[2], seq_lens[2]))
        writer.append(positions[2], seq_lens[2])
    assert torch.equal(read_trace(file).positions, positions[:3])


def test_unchecked_values_are_the_readers(tmp_path):
    file = tmp_path / "trace.safetensors"
    positions, seq_lens = make_steps(2)
    with TraceWriter(file, **SHAPE, max_steps=2, checked=False) as writer:
        writer.append(positions[0], seq_lens[0])
        writer.append(positions[1] + 50, seq_lens[1])
    with pytest.raises(ValueError, match="step 1, layer 0, request 0: position 5"):
        read_trace(file)


def test_limits(tmp_path):
    file = tmp_path / "trace.safetensors"
    with write(file, 3, 3) as writer:
        with pytest.raises(ValueError, match="room for 3 steps; pass a larger max_steps"):
            writer.append(*(part[2] for part in make_steps(3)))
    assert len(read_trace(file).positions) == 3
    for name in ("num_layers", "num_requests", "top_k"):
        with pytest.raises(ValueError, match="all must be at least 1"):
            TraceWriter(file, **SHAPE | {name: 0}, max_steps=1)
    with pytest.raises(ValueError, match="a trace of 0 steps"):
        TraceWriter(file, **SHAPE, max_steps=0)
    with pytest.raises(OSError):
        TraceWriter(tmp_path / "nowhere" / "trace.safetensors", **SHAPE, max_steps=1)


def test_metadata_beyond_its_room(tmp_path):
    """Refused, and the steps are all there: an unfinished file."""
    file = tmp_path / "trace.safetensors"
    writer = write(file, 3, 3)
    writer.metadata["novel"] = "x" * 10_000
    with pytest.raises(ValueError, match="the metadata has grown too much"):
        writer.close()
    assert torch.equal(read_trace(file).positions, make_steps(3)[0])


# ---- write_steps ----


def test_steps_from_anywhere(tmp_path):
    positions, seq_lens = make_steps(5)
    file = tmp_path / "trace.safetensors"
    write_steps(file, zip(positions, seq_lens, strict=True), metadata={"model": "tiny"})
    trace = read_trace(file)
    assert torch.equal(trace.positions, positions) and torch.equal(trace.seq_lens, seq_lens)
    assert trace.metadata == {"model": "tiny"} and load_file(file)["seq_lens"].shape == (5, 2)


def changed(change) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three steps; the last one is `change`d."""
    steps = list(zip(*make_steps(3), strict=True))
    return [*steps[:2], change(*steps[2])]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([], "trace.safetensors: there is no step to write"),
        (
            [(torch.zeros(2, 4), torch.zeros(2))],
            r"step 0: positions is \(2, 4\), expected \[layers",
        ),
        (changed(lambda p, s: (p[..., :3], s)), "step 2: .* K are the same in all steps"),
        (changed(lambda p, s: (p, s - 18)), "step 2, layer 0, request 0: position .* seq_len is 4"),
        (changed(lambda p, s: (p.flip(-1), s)), "step 2, layer 0, request 0: .* is not above"),
    ],
    ids=["empty", "flat", "other K", "beyond", "backwards"],
)
def test_steps_that_are_none_leave_no_file(tmp_path, steps, message):
    file = tmp_path / "trace.safetensors"
    with pytest.raises(ValueError, match=message):
        write_steps(file, steps)
    assert not list(tmp_path.iterdir())
    file.write_bytes(b"old")
    with pytest.raises(ValueError, match=message):
        write_steps(file, steps)
    assert list(tmp_path.iterdir()) == [file] and file.read_bytes() == b"old"


# ---- examples/convert_trace.py ----


def write_dump(path: Path, positions: torch.Tensor, seq_lens: torch.Tensor) -> None:
    lines = [
        json.dumps({"seq_lens": s.tolist(), "topk_indices": p.tolist()})
        for p, s in zip(positions, seq_lens, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n" * bool(lines), encoding="utf-8")


def convert(dump: Path, trace: Path) -> subprocess.CompletedProcess:
    """Runs the example."""
    argv = [sys.executable, CONVERTER, dump, trace]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120)


def test_convert_a_dump(tmp_path):
    """In any order, as other engines write them, with -1 anywhere."""
    positions, seq_lens = make_steps(6)
    write_dump(tmp_path / "dump.jsonl", positions[..., [2, 0, 3, 1]], seq_lens)
    result = convert(tmp_path / "dump.jsonl", tmp_path / "trace.safetensors")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    trace = read_trace(tmp_path / "trace.safetensors")
    assert torch.equal(trace.positions, positions) and torch.equal(trace.seq_lens, seq_lens)


def test_convert_refuses_what_is_no_selection(tmp_path):
    """K of step 3 differs; the message is the last line, and no half trace is left."""
    dump, trace = tmp_path / "dump.jsonl", tmp_path / "trace.safetensors"
    positions, seq_lens = make_steps(3)
    write_dump(dump, positions, seq_lens)
    line = json.dumps({"seq_lens": [23, 3], "topk_indices": positions[2, ..., :3].tolist()})
    dump.write_text(dump.read_text() + line)
    result = convert(dump, trace)
    assert result.returncode == 1 and not trace.exists()
    assert result.stderr.splitlines()[-1] == (
        "ValueError: step 3: positions is torch.int32 (3, 2, 3), expected int32 (3, 2, 4): layers, "
        "requests and K are the same in all steps"
    )


def test_the_converter_is_short():
    """About ten lines besides its docstring: what the format needs, and no more."""
    code = CONVERTER.read_text().split('"""')[2]
    lines = [line for line in code.splitlines() if line.strip() and "import" not in line]
    assert len(lines) <= 10


def test_a_dump_of_tensors_needs_no_converter(tmp_path):
    """Who has a whole trace in memory writes it with safetensors alone."""
    positions, seq_lens = make_steps(3)
    file = tmp_path / "trace.safetensors"
    tensors = {"positions": positions, "seq_lens": seq_lens}
    save_file(tensors, file, {"format": "minihisparse-trace-1"})
    assert torch.equal(Trace(positions, seq_lens).positions, read_trace(file).positions)
