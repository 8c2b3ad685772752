"""Writes a trace (`trace.py`) step by step, so that it may be larger than memory.

    header | room for the seq_lens of max_steps steps | positions of step 0 | step 1 | ...

While the file grows, its header promises max_steps steps and says "recording": "unfinished".
`close` makes it true: what is left of the room becomes a tensor "unused". Without `close` (a kill,
a full disk) `read_trace` reads up to the last whole step: one whose seq_lens and positions are both
there. The header has room for metadata that is known in the end only.

Traffic: 4 * layers * requests * K + 4 * requests bytes per step. It deliberately does not know
engines.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minihisparse.trace import FORMAT, UNFINISHED, check_selections

ROOM_BYTES, ROOM_BYTES_PER_LAYER = 4096, 64  # of the header: for the metadata that `close` adds


class TraceWriter:
    """Writes a trace step by step, each at once; `num_steps` are written.

    A context: leaving it closes the file, which is whole from then on. An existing file is replaced
    by the first step; without a step it stays as it is, and there is no other. Raises OSError: the
    file cannot be written; ValueError: a size below 1.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        num_layers: int,
        num_requests: int,
        top_k: int,
        max_steps: int,
        metadata: Mapping[str, str] | None = None,
        checked: bool = True,
    ) -> None:
        """max_steps: the file has room for so many. metadata: more may be added until `close`.
        checked: whether `append` looks at the values; `read_trace` does so in any case.
        """
        self.checked = checked
        self.step_shape = (num_layers, num_requests, top_k)
        if min(*self.step_shape, max_steps) < 1:
            raise ValueError(
                f"a trace of {max_steps} steps, {num_layers} layers, {num_requests} requests and "
                f"K = {top_k}: all must be at least 1"
            )
        self.max_steps, self.num_steps = max_steps, 0
        self.metadata = dict(metadata or {})
        room = len(self._header(max_steps, UNFINISHED)) + ROOM_BYTES
        self._header_bytes = -(-(room + ROOM_BYTES_PER_LAYER * num_layers) // 8) * 8
        self._first_byte = 8 + self._header_bytes
        self._step_bytes = 4 * prod(self.step_shape)
        self._path = Path(path)
        self._part = self._path.with_name(self._path.name + ".part")  # its name before step 0
        self._file = open(self._part, "wb")
        self._write_header(max_steps, UNFINISHED)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def append(self, positions: Tensor, seq_lens: Tensor) -> None:
        """Adds a step: positions [layers, requests, K] int32, seq_lens [requests] int32.

        Raises ValueError, and writes nothing, for what is no step of this trace.
        """
        step, (_, num_requests, _) = self.num_steps, self.step_shape
        for name, tensor, expected in (
            ("positions", positions, self.step_shape),
            ("seq_lens", seq_lens, (num_requests,)),
        ):
            if tensor.dtype != torch.int32 or tuple(tensor.shape) != expected:
                raise ValueError(
                    f"step {step}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected int32 "
                    f"{expected}: layers, requests and K are the same in all steps"
                )
        if step == self.max_steps:
            raise ValueError(f"the trace has room for {step} steps; pass a larger max_steps")
        if self.checked:
            check_selections(positions[None], seq_lens[None], step)
        self._file.seek(self._first_byte + 4 * num_requests * step)
        self._file.write(_little_endian(seq_lens))
        self._file.seek(self._positions_byte + self._step_bytes * step)
        self._file.write(_little_endian(positions))
        self._file.flush()  # to the operating system: the step survives this process
        if step == 0:
            os.replace(self._part, self._path)  # whoever has mapped the old file keeps it
        self.num_steps += 1

    def close(self) -> None:
        """Makes the file whole. Raises ValueError if the metadata has outgrown its room."""
        if self._file.closed:
            return
        if self.num_steps == 0:
            self._file.close()
            self._part.unlink()
            return
        with self._file:
            self._file.truncate(self._positions_byte + self._step_bytes * self.num_steps)
            self._write_header(self.num_steps, {})

    @property
    def _positions_byte(self) -> int:
        """Where step 0 begins in the file."""
        return self._first_byte + 4 * self.step_shape[1] * self.max_steps

    def _header(self, num_steps: int, more: Mapping[str, str]) -> bytes:
        num_layers, num_requests, top_k = self.step_shape
        shapes = {"seq_lens": [num_steps, num_requests]}
        if num_steps < self.max_steps:
            shapes["unused"] = [self.max_steps - num_steps, num_requests]
        shapes["positions"] = [num_steps, num_layers, num_requests, top_k]
        header: dict[str, dict] = {"__metadata__": {**self.metadata, **more, "format": FORMAT}}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + 4 * prod(shape)
            header[name] = {"dtype": "I32", "shape": shape, "data_offsets": [begin, end]}
        return json.dumps(header).encode()

    def _write_header(self, num_steps: int, more: Mapping[str, str]) -> None:
        header = self._header(num_steps, more)
        if len(header) > self._header_bytes:
            raise ValueError(
                f"the header has room for {self._header_bytes} bytes, and {len(header)} are "
                "needed: the metadata has grown too much"
            )
        self._file.seek(0)
        self._file.write(self._header_bytes.to_bytes(8, "little"))
        self._file.write(header.ljust(self._header_bytes))  # the format allows spaces at the end


def write_steps(
    path: str | Path,
    steps: Iterable[tuple[Tensor, Tensor]],
    *,
    max_steps: int = 1 << 16,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes steps as they come: positions [layers, requests, K], seq_lens [requests], both int32.

    All are checked; the first one says what the shape is. max_steps: see `TraceWriter`. If anything
    is wrong, no file is left, or the one that was there. Raises ValueError that names the step, or
    if there is none.
    """
    new, writer = Path(path).with_name(Path(path).name + ".new"), None
    try:
        for positions, seq_lens in steps:
            if writer is None:
                if positions.ndim != 3:
                    raise ValueError(
                        f"step 0: positions is {tuple(positions.shape)}, expected [layers, "
                        "requests, K]"
                    )
                shape = dict(zip(("num_layers", "num_requests", "top_k"), positions.shape))  # noqa: B905
                writer = TraceWriter(new, **shape, max_steps=max_steps, metadata=metadata)
            writer.append(positions, seq_lens)
        if writer is None:
            raise ValueError(f"{path}: there is no step to write")
        writer.close()
        os.replace(new, path)
    except BaseException:
        if writer is not None:
            writer.close()
            new.unlink(missing_ok=True)
        raise


def _little_endian(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.numpy(), "<i4")
