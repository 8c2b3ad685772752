"""The bytes of a trace's file: a safetensors header, and tensors mapped into memory.

    bytes 0..7    length n of the header, little-endian
    8..8 + n      the header, JSON: {name: {"dtype", "shape", "data_offsets"}, "__metadata__": {}}
    then          the tensors; data_offsets count from here

Read by hand, since a safetensors library refuses a file whose last tensor is not whole yet, and
says neither at which byte nor what of it could be used. It deliberately does not know what a
trace's tensors mean (`trace.py`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Entry(NamedTuple):
    """A tensor in a file: where it begins and ends, in bytes from the file's start."""

    shape: tuple[int, ...]
    begin: int
    end: int

    def num_whole(self, file_bytes: int) -> int:
        """How many of its steps a file of this length has."""
        return (min(file_bytes, self.end) - self.begin) // max(1, 4 * prod(self.shape[1:]))


def read_header(path: str | Path) -> tuple[int, dict]:
    """The byte at which the tensors begin, and the header.

    Raises ValueError that says at which byte it is none.
    """
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 + length:
            raise ValueError(
                f"it is no safetensors file, or truncated: bytes 0..7 say that a header of {length}"
                f" bytes follows, the file ends at byte {size}"
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"its header is not UTF-8 at byte {8 + error.start}") from None
    except json.JSONDecodeError as error:
        byte = 8 + len(error.doc[: error.pos].encode())
        raise ValueError(f"its header is not JSON at byte {byte}: {error.msg}") from None
    if not isinstance(header, dict) or not all(isinstance(e, dict) for e in header.values()):
        raise ValueError("its header, from byte 8 on, is not a JSON object of objects")
    return 8 + length, header


def find_tensor(header: Mapping[str, dict], name: str, ndim: int, first_byte: int) -> Entry:
    """An int32 tensor of so many dimensions. Raises ValueError that names the tensor or the key."""
    if name not in header:
        raise ValueError(f"there is no tensor '{name}'; its tensors are {sorted(header)}")
    entry = header[name]
    for key in ("dtype", "shape", "data_offsets"):
        if key not in entry:
            raise ValueError(f"tensor '{name}' lacks the key '{key}'; it has {sorted(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype != "I32" or not are_counts(shape) or len(shape) != ndim:
        raise ValueError(f"tensor '{name}' is {dtype} {shape}, expected I32 of {ndim} dimensions")
    if not are_counts(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != 4 * prod(shape):
        raise ValueError(
            f"tensor '{name}' is I32 {shape}, {4 * prod(shape)} bytes, but its data_offsets are "
            f"{offsets}"
        )
    return Entry(tuple(shape), first_byte + offsets[0], first_byte + offsets[1])


def are_counts(values: object) -> bool:
    """Whether they are a list of whole numbers from 0 on, as JSON should have them."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def map_tensor(path: str | Path, entry: Entry, num_steps: int) -> Tensor:
    """The tensor's first steps, mapped: to be read only."""
    shape = (num_steps, *entry.shape[1:])
    if 0 in shape:
        return torch.empty(shape, dtype=torch.int32)
    # Read-only, since a private copy of a file larger than memory would be refused.
    array = np.memmap(path, "<i4", "r", entry.begin, shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(np.require(array, np.int32, "A"))
