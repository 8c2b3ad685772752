"""Selection traces: what is written is what is read, and what is none is refused by name.

Guards: a trace of another program that is taken at its word; an error that does not say where in
the trace, or in which file; metadata that is lost.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from minihisparse.trace import FORMAT, Trace, read_trace, write_trace

STEPS, LAYERS, REQUESTS, K = 3, 2, 2, 4


def make_tensors() -> tuple[torch.Tensor, torch.Tensor]:
    """Request 0 grows from 5 tokens; request 1 comes in step 1, with 2."""
    seq_lens = torch.tensor([[5, 0], [6, 2], [7, 3]], dtype=torch.int32)
    positions = torch.full((STEPS, LAYERS, REQUESTS, K), -1, dtype=torch.int32)
    for layer in range(LAYERS):
        positions[:, layer, 0] = torch.tensor([0, 1 + layer, 3, 4])
        positions[1:, layer, 1, :2] = torch.tensor([0, 1])
    positions[2, 1, 0, 3] = 6  # the newest
    return positions, seq_lens


def test_round_trip(tmp_path):
    positions, seq_lens = make_tensors()
    metadata = {"model": "tiny", "selector": "quest", "settings": '{"top_k": 4}'}
    file = tmp_path / "trace.safetensors"
    write_trace(file, Trace(positions, seq_lens, metadata))
    read = read_trace(file)
    assert torch.equal(read.positions, positions) and read.positions.dtype == torch.int32
    assert torch.equal(read.seq_lens, seq_lens) and read.seq_lens.dtype == torch.int32
    assert read.metadata == metadata
    write_trace(file, Trace(positions[:1], seq_lens[:1]))  # replaced; views, not contiguous
    write_trace(file, Trace(positions[..., :2], seq_lens))
    assert torch.equal(read_trace(str(file)).positions, positions[..., :2])
    assert read_trace(file).metadata == {}


def test_the_file_can_be_written_by_others(tmp_path):
    """Two tensors and one key are all: the format is that of the module's docstring."""
    positions, seq_lens = make_tensors()
    file = tmp_path / "by_hand.safetensors"
    save_file({"positions": positions, "seq_lens": seq_lens}, file, {"format": FORMAT, "x": "y"})
    assert FORMAT == "minihisparse-trace-1"
    assert read_trace(file).metadata == {"x": "y"}
    header = json.loads(file.read_bytes()[8:].split(b"}}", 1)[0] + b"}}")
    assert header["__metadata__"]["format"] == FORMAT


def test_context_len():
    """Request 0 has 4 tokens before its first step; request 1 would have had 0 before step 0."""
    positions, seq_lens = make_tensors()
    assert Trace(positions, seq_lens).context_len == 4
    seq_lens[2, 1] = 9  # 8 before the newest, 2 of them by steps 0 and 1
    assert Trace(positions, seq_lens).context_len == 6


def at(step: int, layer: int, request: int, index: int, value: int) -> torch.Tensor:
    positions, _ = make_tensors()
    positions[step, layer, request, index] = value
    return positions


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (make_tensors()[0].long(), r"positions is torch.int64 \(3, 2, 2, 4\), expected int32"),
        (make_tensors()[0][0], r"positions is torch.int32 \(2, 2, 4\), expected int32 \[steps"),
        (make_tensors()[0][..., :0], "none of them 0"),
        (make_tensors()[0][:2], r"seq_lens is torch.int32 \(3, 2\), expected int32 \(2, 2\)"),
        (make_tensors()[0][:, :, :1], r"expected int32 \(3, 1\)"),
        (at(2, 1, 0, 3, 7), "step 2, layer 1, request 0: position 7 .* seq_len is 7"),
        (at(1, 0, 1, 1, 2), "step 1, layer 0, request 1: position 2 .* seq_len is 2"),
        (at(0, 1, 1, 0, 0), "step 0, layer 1, request 1: position 0 .* seq_len is 0"),
        (at(0, 1, 0, 0, -2), "step 0, layer 1, request 0: position -2 .* not in -1..seq_len - 1"),
        (at(1, 1, 0, 2, 2), r"step 1, layer 1, request 0: position 2 \(number 2\) is not above"),
        (at(1, 1, 0, 2, 1), r"step 1, layer 1, request 0: position 1 \(number 2\) is not above"),
        (at(2, 0, 0, 0, -1), r"step 2, layer 0, request 0: position 1 \(number 1\) .* at the end"),
    ],
)
def test_what_is_no_trace(positions, message):
    with pytest.raises(ValueError, match=message):
        Trace(positions, make_tensors()[1])


def test_lengths_of_another_dtype():
    positions, seq_lens = make_tensors()
    with pytest.raises(ValueError, match="seq_lens is torch.int64"):
        Trace(positions, seq_lens.long())


def test_the_first_of_many_is_named():
    positions = torch.full((STEPS, LAYERS, REQUESTS, K), 99, dtype=torch.int32)
    with pytest.raises(ValueError, match="step 0, layer 0, request 0: position 99"):
        Trace(positions, make_tensors()[1])


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.safetensors: there is no such file"):
        read_trace(tmp_path / "nothing.safetensors")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read_trace(tmp_path)  # a folder

    positions, seq_lens = make_tensors()
    tensors, format = {"positions": positions, "seq_lens": seq_lens}, {"format": FORMAT}
    wrong = at(2, 1, 0, 3, 7)
    for name, content, metadata, message in (
        ("no_format", tensors, {"model": "tiny"}, f"its metadata lacks 'format': '{FORMAT}'"),
        ("no_metadata", tensors, None, "lacks 'format'"),
        ("other_format", tensors, {"format": "minihisparse-trace-2"}, "lacks 'format'"),
        ("no_lengths", {"positions": positions}, format, "seq_lens"),
        ("range", tensors | {"positions": wrong}, format, "step 2, layer 1, request 0: position 7"),
    ):
        file = tmp_path / f"{name}.safetensors"
        save_file(content, file, metadata)
        with pytest.raises(
            ValueError, match=f"{name}.safetensors is no selection trace: .*{message}"
        ):
            read_trace(file)
    text = tmp_path / "notes.txt"
    text.write_text("positions: 1, 2, 3")
    with pytest.raises(ValueError, match="notes.txt is no selection trace"):
        read_trace(text)
