"""The memory of simulated threads: arrays whose every index is checked, and words at addresses.

So that a kernel that reads beyond an end, or what nobody wrote, fails here as it may not on a GPU.

Simulated: arrays, atomics on their elements, aligned accesses by address to the tensors given.
Not simulated: the memory model (a store is seen at once), and integer widths (ints are Python's;
what an array cannot hold is an error).
Stricter than CUDA: an index must not count from the end.

Cost, about: 0.2 us per element of a vector, 1.5 of a table, 2 per address.

It deliberately does not know Numba's names, nor how threads take turns: it tells them of a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minihisparse.kernels.simulated_threads import Scheduler, SimulationError

GARBAGE = 0x7F7F7F7F  # memory nobody wrote, and what a shuffle reads from a lane that gave nothing


class Array:
    """A checked view of memory. Elements are Python numbers; a row or a slice is a view again."""

    def __init__(self, threads: Scheduler, name: str, data: np.ndarray) -> None:
        self._threads, self._name, self._data = threads, name, data
        self.shape, self.ndim, self.size = data.shape, data.ndim, data.size

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        if type(index) is int and self.ndim == 1 and 0 <= index < self.size:
            return self._data.item(index)  # the usual case, fast
        self._check(index)
        found = self._data[index]
        if isinstance(found, np.ndarray):
            return Array(self._threads, f"{self._name}[{index}]", found)
        return found.item()

    def __setitem__(self, index: Any, value: Any) -> None:
        if not (type(index) is int and self.ndim == 1 and 0 <= index < self.size):
            self._check(index)
        # NumPy refuses Python's ints if they do not fit, but wraps its own.
        self._data[index] = value.item() if isinstance(value, np.generic) else value
        self._threads.changed = True

    def _check(self, index: Any) -> None:
        """Numba checks nothing: an index below 0 counts from the end, or runs off like above."""
        for i, extent in zip(index if type(index) is tuple else (index,), self.shape, strict=False):
            if type(i) is slice:
                inside = all(0 <= end <= extent for end in (i.start or 0, i.stop or 0))
            else:
                inside = 0 <= i < extent
            if not inside:
                raise IndexError(f"{self._name}[{index}] is out of range, shape {self.shape}")


def garbage(shape: Any, dtype: Any) -> np.ndarray:
    data = np.empty(shape, dtype)
    data.view(np.uint8)[...] = GARBAGE & 0xFF
    return data


def atomic(change: Callable) -> Callable:
    def change_it(array: Array, index: Any, *values: Any) -> Any:
        array._threads.pause()
        old = array[index]
        new = change(old, *values)
        if new != old:  # else it may be a poll
            array[index] = new
        array._threads.pause()
        return old

    return change_it


class Addressed:
    """The memory that has addresses, in words of 4 bytes."""

    def __init__(self, threads: Scheduler, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.threads, self.spans = threads, []
        for name, tensor in tensors:
            data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
            self.spans.append((tensor.data_ptr(), tensor.data_ptr() + len(data), data, name))

    def words(self, address: int, count: int, dtype: str = "uint32") -> np.ndarray:
        size = 4 * count
        for start, end, data, _ in self.spans:
            if start <= address and address + size <= end and address % size == 0:
                return data[address - start : address - start + size].view(dtype)
        problem = f"not a multiple of {size}" if address % size else "outside of the memory given"
        near = min(self.spans, key=lambda s: max(s[0] - address, address - s[1]), default=None)
        nearest = f"; the nearest is {near[3]}, {near[0]:#x} to {near[1]:#x}" if near else ""
        raise SimulationError(f"{size} bytes at address {address:#x}: {problem}{nearest}")

    def load(self, address: int) -> int:
        return self.words(address, 1).item()

    def load4(self, address: int) -> tuple[int, ...]:
        return tuple(self.words(address, 4).tolist())

    def store(self, address: int, *values: int) -> None:
        words = self.words(address, len(values))
        for i, value in enumerate(values):
            words[i] = int(value)
        self.threads.changed = True

    def load_acquire(self, address: int) -> int:
        self.threads.pause()
        return self.words(address, 1, "int32").item()

    def store_release(self, address: int, value: int) -> None:
        self.words(address, 1, "int32")[0] = int(value)
        self.threads.changed = True
        self.threads.pause()  # what was to be written before it, and is not, is then found missing

    def fetch_inc_wrap(self, address: int, last: int) -> int:
        step = atomic(lambda old, last: old + 1 if 0 <= old < last else 0)
        return step(Array(self.threads, "", self.words(address, 1, "int32")), 0, last)
