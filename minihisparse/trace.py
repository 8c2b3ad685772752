"""Selection traces: which positions were selected, step by step and layer by layer, in a file.

A trace is one safetensors file, so that any program can write one:

    positions   [steps, layers, requests, K] int32   ascending, unique, -1 at the end
    seq_lens    [steps, requests] int32              tokens so far, the newest included; 0: none
    metadata    "format": "minihisparse-trace-1"; "model", "selector", "settings": free text

A step's newest token is at position seq_len - 1; selected positions are below seq_len.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "minihisparse-trace-1"


@dataclass(frozen=True)
class Trace:
    """positions [steps, layers, requests, K] int32; seq_lens [steps, requests] int32, on the CPU.

    Raises ValueError for shapes, dtypes or values that are none of a trace's.
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
        outside = (positions < -1) | (positions >= seq_lens[:, None, :, None])
        self._refuse(outside, "is not in -1..seq_len - 1")
        before, after = positions[..., :-1], positions[..., 1:]
        unordered = (after >= 0) & ((before < 0) | (after <= before))
        unordered = torch.nn.functional.pad(unordered, (1, 0))
        self._refuse(unordered, "is not above the one before; -1 only stands at the end")

    def _refuse(self, wrong: Tensor, why: str) -> None:
        """Raises ValueError that names the first of some wrong positions, if there is one."""
        if wrong.any():
            step, layer, request, index = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"step {step}, layer {layer}, request {request}: position "
                f"{int(self.positions[step, layer, request, index])} (number {index}) {why}; "
                f"seq_len is {int(self.seq_lens[step, request])}"
            )

    @property
    def context_len(self) -> int:
        """Tokens that a request needs before step 0 to have every position of every step."""
        steps = torch.arange(len(self.seq_lens))[:, None]
        return int((self.seq_lens - steps).max()) - 1


def write_trace(path: str | Path, trace: Trace) -> None:
    """Writes a trace's file; an existing one is replaced."""
    tensors = {"positions": trace.positions.cpu(), "seq_lens": trace.seq_lens.cpu()}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, {**trace.metadata, "format": FORMAT})


def read_trace(path: str | Path) -> Trace:
    """Reads a trace. Raises FileNotFoundError, or ValueError that names the file: it is none."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            if metadata.pop("format", None) != FORMAT:
                raise ValueError(f"its metadata lacks 'format': '{FORMAT}'")
            return Trace(file.get_tensor("positions"), file.get_tensor("seq_lens"), metadata)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is no selection trace: {error}") from None
