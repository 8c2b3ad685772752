"""Selection traces: which positions were selected, step by step and layer by layer, in a file.

A trace is one safetensors file, so that any program can write one:

    positions   [steps, layers, requests, K] int32   ascending, unique, -1 at the end
    seq_lens    [steps, requests] int32              tokens so far, the newest included
    metadata    text by key; only "format" must be there, and other keys may be

        "format"                "minihisparse-trace-1"
        "model", "selector"     names, for people
        "settings"              JSON object of the run, for people; but where layers share
                                selections, its "anchor_of" says so: per layer the layer whose
                                selection it uses (`anchors.py`); null: each layer selects
        "device_buffer_size"    JSON: B of the cache that ran, or a list, one for each layer
        "counters"              JSON: {"hits": [per layer], "misses": [per layer]}, that cache's own
        "recording"             "unfinished": cut off, the file ends in any step

A step's newest token is at position seq_len - 1; selected positions are below seq_len. A row that
takes no part in a step has seq_len 0 and no positions there. Other tensors may be in the file.

`read_trace` maps a file into memory and looks at it in chunks, so it may be larger than memory.
Errors say where: the byte (`trace_file.py`), the tensor, or the step, layer and request.
`trace_writer.py` writes a trace as the steps come. It deliberately does not know engines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from minihisparse.anchors import check_anchors
from minihisparse.trace_file import are_counts, find_tensor, map_tensor, read_header

FORMAT = "minihisparse-trace-1"
CHUNK = 1 << 22  # positions that are checked at once
UNFINISHED = {"recording": "unfinished"}  # metadata of what `TraceWriter` has not closed


@dataclass(frozen=True)
class Trace:
    """positions [steps, layers, requests, K] int32; seq_lens [steps, requests] int32, on the CPU.

    metadata: without "format". Raises ValueError for shapes, dtypes or values that are none of a
    trace's; for metadata when it is asked for.
    """

    positions: Tensor
    seq_lens: Tensor
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        positions, seq_lens = self.positions, self.seq_lens
        shape = tuple(positions.shape)
        if positions.dtype != torch.int32 or positions.ndim != 4 or 0 in shape:
            raise ValueError(
                f"positions is {positions.dtype} {shape}, expected int32 "
                "[steps, layers, requests, K], none of them 0"
            )
        expected = (shape[0], shape[2])
        if seq_lens.dtype != torch.int32 or tuple(seq_lens.shape) != expected:
            raise ValueError(
                f"seq_lens is {seq_lens.dtype} {tuple(seq_lens.shape)}, expected int32 {expected}"
            )
        chunk = max(1, CHUNK // prod(shape[1:]))  # the file may be larger than memory
        for step in range(0, shape[0], chunk):
            steps = slice(step, step + chunk)
            check_selections(positions[steps], seq_lens[steps], step)

    @property
    def context_len(self) -> int:
        """Tokens that a request needs before step 0 to have every position of every step."""
        steps = torch.arange(len(self.seq_lens))[:, None]
        return int((self.seq_lens - steps).max()) - 1

    @property
    def is_unfinished(self) -> bool:
        """Whether its recording was cut off: the steps are the whole ones before that."""
        return UNFINISHED.items() <= self.metadata.items()

    @property
    def anchor_of(self) -> tuple[int, ...] | None:
        """Per layer the layer whose selection it uses; None: the trace does not say.

        Raises ValueError if what it says is impossible, or not what was selected.
        """
        settings = self._json("settings")
        if not isinstance(settings, dict) or "anchor_of" not in settings:
            return None
        num_layers = self.positions.shape[1]
        try:
            anchor_of = check_anchors(settings["anchor_of"], num_layers)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the metadata 'settings', 'anchor_of', cannot be: {error}") from None
        for layer, anchor in enumerate(anchor_of):
            if not torch.equal(self.positions[:, layer], self.positions[:, anchor]):
                raise ValueError(
                    f"the metadata 'settings', 'anchor_of', says that layer {layer} uses the "
                    f"selection of layer {anchor}, but their positions differ"
                )
        return anchor_of

    @property
    def recorded_cache(self) -> tuple[int | list[int], dict[str, list[int]]] | None:
        """device_buffer_size and counters of the cache that ran; None if one is missing.

        Raises ValueError if they are none of this trace's.
        """
        if not {"device_buffer_size", "counters"} <= self.metadata.keys():
            return None
        _, num_layers, _, top_k = self.positions.shape
        size, counters = self._json("device_buffer_size"), self._json("counters")
        sizes = size if isinstance(size, list) else [size] * num_layers
        if not are_counts(sizes) or len(sizes) != num_layers or min(sizes) < top_k:
            raise ValueError(
                f"the metadata 'device_buffer_size' is {self.metadata['device_buffer_size']!r}, "
                f"expected a number from K = {top_k} on, or {num_layers} of them, one for each "
                "layer"
            )
        for name in ("hits", "misses"):
            counts = counters.get(name) if isinstance(counters, dict) else None
            if not are_counts(counts) or len(counts) != num_layers:
                raise ValueError(
                    f"the metadata 'counters' has {name} {counts}, expected {num_layers} numbers, "
                    "one for each layer"
                )
        return size, {name: counters[name] for name in ("hits", "misses")}

    def _json(self, key: str) -> object:
        """The metadata's value; None if it is missing or no JSON."""
        try:
            return json.loads(self.metadata[key])
        except (KeyError, TypeError, ValueError):
            return None


def check_selections(positions: Tensor, seq_lens: Tensor, first_step: int) -> None:
    """Raises ValueError that names the first wrong position, if there is one, and its step.

    positions [steps, layers, requests, K], seq_lens [steps, requests], both int32.
    """
    outside = (positions < -1) | (positions >= seq_lens[:, None, :, None])
    before, after = positions[..., :-1], positions[..., 1:]
    unordered = (after >= 0) & ((before < 0) | (after <= before))
    unordered = torch.nn.functional.pad(unordered, (1, 0))
    for wrong, why in (
        (outside, "is not in -1..seq_len - 1"),
        (unordered, "is not above the one before; -1 only stands at the end"),
    ):
        if wrong.any():
            step, layer, request, index = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"step {first_step + step}, layer {layer}, request {request}: position "
                f"{int(positions[step, layer, request, index])} (number {index}) {why}; "
                f"seq_len is {int(seq_lens[step, request])}"
            )


# ---- writing ----


def write_trace(path: str | Path, trace: Trace) -> None:
    """Writes a trace's file; an existing one is replaced."""
    tensors = {"positions": trace.positions.cpu(), "seq_lens": trace.seq_lens.cpu()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    Path(path).unlink(missing_ok=True)  # and not overwritten: somebody may have mapped it
    save_file(tensors, path, {**trace.metadata, "format": FORMAT})


# ---- reading ----


def read_trace(path: str | Path) -> Trace:
    """Maps a trace into memory. An unfinished one is read up to its last whole step; its metadata
    then has "recording": "unfinished".

    Raises FileNotFoundError, or ValueError that names the file and what is wrong where: it is none.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        first_byte, header = read_header(path)
        metadata = dict(header.pop("__metadata__", None) or {})
        if metadata.pop("format", None) != FORMAT:
            raise ValueError(f"its metadata lacks 'format': '{FORMAT}'")
        positions = find_tensor(header, "positions", 4, first_byte)
        seq_lens = find_tensor(header, "seq_lens", 2, first_byte)
        num_steps, _, num_requests, _ = positions.shape
        if seq_lens.shape != (num_steps, num_requests):
            raise ValueError(
                f"tensor 'seq_lens' is {list(seq_lens.shape)}, but 'positions' is "
                f"{list(positions.shape)}: expected {[num_steps, num_requests]}"
            )
        size = Path(path).stat().st_size
        if size < max(positions.end, seq_lens.end):
            whole = max(0, min(entry.num_whole(size) for entry in (positions, seq_lens)))
            if not UNFINISHED.items() <= metadata.items():
                last, name = max((positions.end, "positions"), (seq_lens.end, "seq_lens"))
                raise ValueError(
                    f"it is truncated: tensor '{name}' ends at byte {last}, the file at byte "
                    f"{size}; {whole} of {num_steps} steps are whole"
                )
            num_steps = whole
        if num_steps == 0:
            raise ValueError("it is empty: it has no step")
        tensors = (map_tensor(path, entry, num_steps) for entry in (positions, seq_lens))
        return Trace(*tensors, metadata)
    except ValueError as error:
        raise ValueError(f"{path} is no selection trace: {error}") from None
