"""Selection traces: what is written is what is read, and what is none is refused by name.

Guards: a trace of another program that is taken at its word; an error that does not say where in
the trace, at which byte, or in which file; metadata that is lost, or that is believed where it does
not fit the selections; a file larger than memory that is read into memory.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from minihisparse import trace as module
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
        (
            "no_lengths",
            {"positions": positions},
            format,
            r"there is no tensor 'seq_lens'; its tensors are \['positions'\]",
        ),
        (
            "no_positions",
            {"topk_indices": positions, "seq_lens": seq_lens},
            format,
            r"there is no tensor 'positions'; its tensors are \['seq_lens', 'topk_indices'\]",
        ),
        (
            "dtype",
            tensors | {"positions": positions.long()},
            format,
            r"tensor 'positions' is I64 \[3, 2, 2, 4\], expected I32 of 4 dimensions",
        ),
        (
            "flat",
            tensors | {"positions": positions.flatten(1)},
            format,
            r"tensor 'positions' is I32 \[3, 16\], expected I32 of 4 dimensions",
        ),
        (
            "fewer_lengths",
            tensors | {"seq_lens": seq_lens[:2]},
            format,
            r"'seq_lens' is \[2, 2\], but 'positions' is \[3, 2, 2, 4\]: expected \[3, 2\]",
        ),
        (
            "empty",
            {"positions": positions[:0], "seq_lens": seq_lens[:0]},
            format,
            "it is empty: it has no step",
        ),
        ("no_layer", tensors | {"positions": positions[:, :0]}, format, "none of them 0"),
        ("range", tensors | {"positions": wrong}, format, "step 2, layer 1, request 0: position 7"),
    ):
        file = tmp_path / f"{name}.safetensors"
        save_file(content, file, metadata)
        with pytest.raises(
            ValueError, match=f"{name}.safetensors is no selection trace: .*{message}"
        ):
            read_trace(file)


# ---- what it says of the run ----


def saying(**metadata: object) -> Trace:
    """Its two layers select differently; metadata becomes JSON."""
    return Trace(*make_tensors(), {key: json.dumps(value) for key, value in metadata.items()})


@pytest.mark.parametrize(
    ("metadata", "anchor_of"),
    [
        ({}, None),
        ({"settings": {"top_k": 4}}, None),
        ({"settings": [1, 2]}, None),
        ({"settings": {"anchor_of": None}}, (0, 1)),  # each selects
        ({"settings": {"anchor_of": [0, 1], "seed": 3}}, (0, 1)),
    ],
    ids=str,
)
def test_declared_anchors(metadata, anchor_of):
    assert saying(**metadata).anchor_of == anchor_of
    assert Trace(*make_tensors(), {"settings": "free text"}).anchor_of is None


def test_declared_anchors_that_share():
    positions, seq_lens = make_tensors()
    positions = positions[:, [0, 0, 1, 1, 1]]
    trace = Trace(positions, seq_lens, {"settings": '{"anchor_of": [0, 0, 2, 2, 2]}'})
    assert trace.anchor_of == (0, 0, 2, 2, 2)


@pytest.mark.parametrize(
    ("anchor_of", "message"),
    [
        ([0], "anchor_of has 1 entries for 2 layers"),
        ([0, 1, 2], "anchor_of has 3 entries for 2 layers"),
        ([1, 1], "layer 0 cannot share the selection of layer 1"),
        (3, "cannot be: "),
        (["a", "b"], "cannot be: "),
        ([0, 0], "says that layer 1 uses the selection of layer 0, but their positions differ"),
    ],
    ids=str,
)
def test_declared_anchors_that_cannot_be(anchor_of, message):
    with pytest.raises(ValueError, match=f"metadata 'settings', 'anchor_of', .*{message}"):
        _ = saying(settings={"anchor_of": anchor_of}).anchor_of


COUNTERS = {"hits": [5, 6], "misses": [1, 0]}


@pytest.mark.parametrize("size", [4, 9, [4, 7]], ids=str)
def test_the_recorded_cache(size):
    trace = saying(device_buffer_size=size, counters=COUNTERS | {"more": 3})
    assert trace.recorded_cache == (size, COUNTERS)


def test_no_recorded_cache():
    assert saying(counters=COUNTERS).recorded_cache is None
    assert saying(device_buffer_size=9).recorded_cache is None


@pytest.mark.parametrize("size", [3, [4], [4, 5, 6], [4, 3], -1, 4.5, True, "4", None], ids=str)
def test_a_recorded_size_that_cannot_be(size):
    """B < K, or not as many as layers, or no number at all."""
    with pytest.raises(ValueError, match="'device_buffer_size' is .* from K = 4 on, or 2 of them"):
        _ = saying(device_buffer_size=size, counters=COUNTERS).recorded_cache


@pytest.mark.parametrize(
    ("counters", "message"),
    [
        ([1, 2], "has hits None"),
        ({"hits": [1, 2]}, "has misses None"),
        ({"hits": [1], "misses": [1, 2]}, r"has hits \[1\], expected 2 numbers"),
        ({"hits": [1, 2], "misses": [1, -2]}, r"has misses \[1, -2\]"),
        ({"hits": [1, 2], "misses": "12"}, "has misses 12"),
    ],
    ids=str,
)
def test_counters_that_are_none(counters, message):
    with pytest.raises(ValueError, match=f"metadata 'counters' {message}"):
        _ = saying(device_buffer_size=9, counters=counters).recorded_cache


# ---- bytes ----


def raw(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def header_of(positions: object, **more: object) -> bytes:
    """A header whose entry for positions is as given."""
    lengths = {"dtype": "I32", "shape": [1, 1], "data_offsets": [0, 4]}
    return json.dumps(
        {"__metadata__": {"format": FORMAT}, "seq_lens": lengths, "positions": positions} | more
    ).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "bytes 0..7 say that a header of 0 bytes follows, the file ends at byte 0"),
        (b"12345", "the file ends at byte 5"),
        (b"positions: 1, 2, 3", r"bytes 0..7 say that .* the file ends at byte 18"),
        (raw(b"{}" + b"\xff"), "not UTF-8 at byte 10"),
        (raw(b'{"a": 1,,}'), "not JSON at byte 16"),
        (raw('{"ä": 1,,}'.encode()), "not JSON at byte 17"),
        (raw(b"[1, 2]"), "not a JSON object of objects"),
        (raw(b'{"positions": 3}'), "not a JSON object of objects"),
        (raw(header_of({})), r"tensor 'positions' lacks the key 'dtype'; it has \[\]"),
        (
            raw(header_of({"dtype": "I32", "shape": [1, 1, 1, 4]})),
            r"tensor 'positions' lacks the key 'data_offsets'; it has \['dtype', 'shape'\]",
        ),
        (
            raw(header_of({"dtype": "I32", "shape": "1111", "data_offsets": [4, 20]})),
            "tensor 'positions' is I32 1111, expected I32 of 4 dimensions",
        ),
        (
            raw(header_of({"dtype": "I32", "shape": [1, 1, 1, 4], "data_offsets": [4, 24]})),
            r"'positions' is I32 \[1, 1, 1, 4\], 16 bytes, but its data_offsets are \[4, 24\]",
        ),
        (
            raw(header_of({"dtype": "I32", "shape": [1, 1, 1, -4], "data_offsets": [4, 20]})),
            "expected I32",
        ),
        (
            raw(header_of({"dtype": "I32", "shape": [1, 1, 1, 4], "data_offsets": "no"})),
            "data_offsets are no",
        ),
    ],
)
def test_foreign_bytes(tmp_path, content, message):
    file = tmp_path / "foreign"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"foreign is no selection trace: .*{message}"):
        read_trace(file)


def test_truncated_at_every_byte(tmp_path):
    """Each says so, and where; no length is read as something else."""
    positions, seq_lens = make_tensors()
    file, cut = tmp_path / "whole", tmp_path / "cut"
    write_trace(file, Trace(positions, seq_lens))
    content = file.read_bytes()
    step_bytes = LAYERS * REQUESTS * K * 4
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        with pytest.raises(ValueError, match=f"truncated.* byte {size}"):
            read_trace(cut)
    cut.write_bytes(content[: -4 * seq_lens.numel() - step_bytes - 1])
    with pytest.raises(ValueError) as error:  # save_file has put positions first
        read_trace(cut)
    assert "0 of 3 steps are whole" in str(error.value)  # their lengths are missing
    assert f"tensor 'seq_lens' ends at byte {len(content)}" in str(error.value)


def test_other_tensors_and_odd_places(tmp_path):
    """Another order, another tensor in between, and a header that leaves numbers unaligned."""
    positions, seq_lens = make_tensors()
    lens, records = seq_lens.numpy().tobytes(), positions.numpy().tobytes()
    entries, data = {"__metadata__": {"format": FORMAT, "x": "y"}}, b""
    for name, dtype, shape, content in (
        ("seq_lens", "I32", [STEPS, REQUESTS], lens),
        ("logits", "U8", [5], b"12345"),
        ("positions", "I32", list(positions.shape), records),
    ):
        offsets = [len(data), len(data) + len(content)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += content
    for spaces in range(4):
        file = tmp_path / f"{spaces}.safetensors"
        file.write_bytes(raw(json.dumps(entries).encode() + b" " * spaces, data))
        trace = read_trace(file)
        assert torch.equal(trace.positions, positions) and torch.equal(trace.seq_lens, seq_lens)
        assert trace.metadata == {"x": "y"}


def test_a_file_is_mapped_not_read(tmp_path):
    """What changes in the file changes in the trace: nobody has copied it."""
    positions, seq_lens = make_tensors()
    file = tmp_path / "trace.safetensors"
    write_trace(file, Trace(positions, seq_lens))
    trace = read_trace(file)
    with open(file, "r+b") as raw_file:  # the first position of the first step
        raw_file.seek(file.stat().st_size - 4 * (positions.numel() + seq_lens.numel()))
        raw_file.write((77).to_bytes(4, "little"))
    assert int(trace.positions[0, 0, 0, 0]) == 77
    write_trace(file, Trace(positions + 0, seq_lens))  # a new file: who has mapped the old keeps it
    assert int(trace.positions[0, 0, 0, 0]) == 77
    assert int(read_trace(file).positions[0, 0, 0, 0]) == 0


def test_values_are_checked_in_chunks(monkeypatch):
    """In each of them; the step is counted from the trace's start."""
    for chunk in (1, 2 * LAYERS * REQUESTS * K, 1 << 20):
        monkeypatch.setattr(module, "CHUNK", chunk)
        for step in range(STEPS):
            with pytest.raises(ValueError, match=f"step {step}, layer 1, request 0: position 9"):
                Trace(at(step, 1, 0, 3, 9), make_tensors()[1])
