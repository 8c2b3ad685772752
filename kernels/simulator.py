"""Runs a kernel's plain Python function on CPU tensors: one simulated thread per CUDA thread.

So that kernels are tested, single-stepped and checked on any machine, in any process, from the one
source that also runs on a GPU. Nothing of Numba is replaced: the function is copied, and only the
copy finds simulated things under the names `cuda`, int32, ld16, ...

Simulated: what a kernel finds under the name `cuda`, on top of checked memory
(`simulated_memory.py`) and of threads that take turns (`simulated_threads.py`).
Not simulated: the order in which a GPU's stores become visible (a store is seen at once; threads
take turns at scheduling points only: collectives, atomics, fences, nanosleep, load_acquire,
store_release), integer widths (ints are Python's; what an array cannot hold is an error), time.

Cost, about: 0.2 us per element of a vector, 1.5 of a table, 2 per address, 5 per scheduling point,
for each thread.

It deliberately does not know what a kernel does, whether Numba can compile it, or whose turn it is.
"""

from __future__ import annotations

import ctypes
import math
import operator
import struct
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minihisparse.kernels import device, simulated_memory
from minihisparse.kernels.simulated_memory import GARBAGE, Addressed, Array, atomic, garbage
from minihisparse.kernels.simulated_threads import EVERY_LANE, Scheduler, SimulationError, Thread

__all__ = ["GARBAGE", "TWINS", "SimulatedCuda", "SimulationError", "run"]


def run(
    function: Any,
    grid: int,
    block: int,
    args: Sequence[Tensor | int],
    *,
    memory: Iterable[Tensor] = (),
    shared_bytes: int = 0,
    seed: int | None = None,
    resident_blocks: int | None = None,
) -> None:
    """Runs `grid` blocks of `block` threads to their end.

    function: the kernel's Python function, or an object that has it as `py_func`.
    args: for each parameter a contiguous CPU tensor, changed in place, or an int.
    memory: tensors that may be accessed by address, beside those in args.
    shared_bytes: of dynamic shared memory, per block.
    seed: of the random order in which blocks start and threads take turns; None: ascending.
    resident_blocks: so many at most are under way, the others wait for an end; None: no limit.
    Raises SimulationError for what the simulator finds, and the kernel's own exceptions; both name
    thread, block and kernel. TypeError or ValueError for arguments that do not fit.
    """
    function = getattr(function, "py_func", function)
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    if len(args) != len(names):
        raise TypeError(f"{function.__name__} takes {len(names)} arguments, got {len(args)}")
    if grid < 1 or not 1 <= block <= 1024 or (resident_blocks is not None and resident_blocks < 1):
        raise ValueError(f"got {grid=}, {block=}, {resident_blocks=}; expected 1.., 1..1024, 1..")
    tensors = [(name, arg) for name, arg in zip(names, args, strict=True) if _is_tensor(name, arg)]
    memory = [(f"memory[{i}]", tensor) for i, tensor in enumerate(memory)]
    for name, tensor in tensors + memory:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous and on the CPU, it is on {tensor.device}")
    hidden = __file__, simulated_memory.__file__
    threads = Scheduler(f"kernel {function.__name__}", grid, block, seed, hidden)
    arrays = {name: Array(threads, name, tensor.detach().numpy()) for name, tensor in tensors}
    values = [arrays.get(name, arg) for name, arg in zip(names, args, strict=True)]
    addressed = Addressed(threads, tensors + memory)
    copy = _Copies(SimulatedCuda(threads, shared_bytes), addressed).of(function)
    threads.run(lambda: copy(*values), resident_blocks or grid)


def _is_tensor(name: str, arg: Any) -> bool:
    if isinstance(arg, Tensor) and arg.dtype in (torch.bfloat16, torch.float16):
        raise TypeError(f"{name}: Numba has no arrays of {arg.dtype}; pass its data_ptr()")
    if not isinstance(arg, Tensor | int):
        raise TypeError(f"{name} must be a tensor or an int, got {type(arg).__name__}")
    return isinstance(arg, Tensor)


class _Copies:
    """Functions with simulated things in their globals and their closures."""

    def __init__(self, cuda: SimulatedCuda, addressed: Addressed) -> None:
        self.cuda, self.addressed = cuda, addressed
        self.copies: dict[types.FunctionType, types.FunctionType] = {}

    def of(self, function: types.FunctionType) -> types.FunctionType:
        if function not in self.copies:
            code, names = function.__code__, {"__builtins__": __builtins__}
            cells = [(types.CellType(), cell) for cell in function.__closure__ or ()]
            closure = tuple(new for new, _ in cells)
            copy = types.FunctionType(code, names, None, function.__defaults__, closure)
            self.copies[function] = copy  # before the rest: functions may name each other
            for name in _names(code) & function.__globals__.keys():
                names[name] = self.twin(function.__globals__[name])
            for new, cell in cells:
                new.cell_contents = self.twin(cell.cell_contents)
        return self.copies[function]

    def twin(self, value: Any) -> Any:
        """What a copy finds in place of a value."""
        if isinstance(value, types.ModuleType):
            return self.cuda if value.__name__ == "numba.cuda" else value
        if callable(value) and value in TWINS:
            return types.MethodType(TWINS[value], self.addressed)
        if hasattr(value, "cast_python_value"):  # a type of Numba
            return _Number(value)
        return self.of(value.py_func) if hasattr(value, "py_func") else value


def _names(code: types.CodeType) -> set[str]:
    """The globals that code may use, functions inside of it included."""
    inner = [_names(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*inner)


class _Number(str):
    """The name of a number type: a dtype, and a cast, which wraps as on the device."""

    def __init__(self, name: Any) -> None:
        self.is_float = self.startswith("float")
        kind = {"float32": "float", "float64": "double"}.get(self, self)
        self.kind = getattr(ctypes, f"c_{kind}", None)

    def __call__(self, value: Any) -> Any:
        return self.kind(value if self.is_float else int(value)).value


# ---- what kernels find under the name `cuda` ----


def _barrier(answer: Callable) -> Callable:
    return lambda cuda, predicate=0: cuda._threads.meet(None, predicate, answer)


def _vote(answer: Callable) -> Callable:
    return lambda cuda, mask=EVERY_LANE, value=0: cuda._threads.meet(mask, value, answer)


def _by_lane(threads: list[Thread]) -> dict[int, Any]:
    return {thread.lane: thread.value for thread in threads}


def _shuffle(source: Callable) -> Callable:
    def shuffle(cuda: SimulatedCuda, mask: int, value: Any, by: int) -> Any:
        values = cuda._threads.meet(mask, value, _by_lane)
        lane = source(cuda.laneid, by & 31)
        return values.get(lane, GARBAGE) if 0 <= lane < 32 else value

    return shuffle


def _lanes(lanes: Iterable[int]) -> int:
    return ctypes.c_int32(sum(1 << lane for lane in lanes)).value  # an int32, as Numba has it


class SimulatedCuda:
    warpsize = 32
    syncthreads = _barrier(lambda threads: None)
    syncthreads_count = _barrier(lambda threads: sum(1 for t in threads if t.value))
    syncthreads_and = _barrier(lambda threads: int(all(t.value for t in threads)))
    syncthreads_or = _barrier(lambda threads: int(any(t.value for t in threads)))
    syncwarp = _vote(lambda threads: None)
    ballot_sync = _vote(lambda threads: _lanes(t.lane for t in threads if t.value))
    all_sync = _vote(lambda threads: all(t.value for t in threads))
    any_sync = _vote(lambda threads: any(t.value for t in threads))
    shfl_sync = _shuffle(lambda lane, source: source)
    shfl_up_sync = _shuffle(lambda lane, delta: lane - delta)
    shfl_down_sync = _shuffle(lambda lane, delta: lane + delta)
    shfl_xor_sync = _shuffle(lambda lane, mask: lane ^ mask)
    popc = staticmethod(lambda value: (value & EVERY_LANE).bit_count())
    ffs = staticmethod(lambda value: (value & -value & EVERY_LANE).bit_length())
    clz = staticmethod(lambda value: 32 - (value & EVERY_LANE).bit_length())
    atomic = types.SimpleNamespace(
        add=atomic(operator.add),
        sub=atomic(operator.sub),
        min=atomic(min),
        max=atomic(max),
        or_=atomic(operator.or_),
        and_=atomic(operator.and_),
        exch=atomic(lambda old, new: new),
        cas=atomic(lambda old, expected, new: new if old == expected else old),
    )

    def __init__(self, threads: Scheduler, shared_bytes: int) -> None:
        self._threads, self._dynamic = threads, garbage(shared_bytes, "uint8")
        self.gridDim = types.SimpleNamespace(x=threads.num_blocks, y=1, z=1)
        self.blockDim = types.SimpleNamespace(x=threads.num_threads, y=1, z=1)
        most = max(threads.num_blocks, threads.num_threads)
        self._indices = [types.SimpleNamespace(x=i, y=0, z=0) for i in range(most)]
        self.shared = types.SimpleNamespace(array=self._shared_array)
        self.local = types.SimpleNamespace(array=self._local_array)

    threadIdx = property(lambda self: self._indices[self._threads.current.number])
    blockIdx = property(lambda self: self._indices[self._threads.current.block.number])
    laneid = property(lambda self: self._threads.current.lane)

    def nanosleep(self, *_: Any) -> None:
        self._threads.pause()

    threadfence = threadfence_block = threadfence_system = nanosleep

    def lanemask_lt(self) -> int:
        return (1 << self.laneid) - 1

    def match_any_sync(self, mask: int, value: Any) -> int:
        values = self._threads.meet(mask, value, _by_lane)
        return _lanes(lane for lane, other in values.items() if other == value)

    def _local_array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Array:
        dtype = getattr(dtype, "__name__", str(dtype))  # a type of NumPy, or of Numba
        return Array(self._threads, "local memory", garbage(shape, dtype))

    def _shared_array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Array:
        """One per block and place in the source; shape 0: the dynamic shared memory."""
        shared, frame = self._threads.current.block.shared, self._threads.caller()
        place = frame.f_code, frame.f_lasti
        if place not in shared:
            data = self._local_array(shape, dtype)._data
            if shape == 0:
                whole = shared.setdefault("dynamic", self._dynamic.copy())
                data = whole[: whole.size // data.itemsize * data.itemsize].view(data.dtype)
            shared[place] = Array(self._threads, "shared memory", data)
        return shared[place]


# ---- what kernels find in place of device.py's instructions ----


def _convert(old: str, new: str, value: Any) -> Any:
    """The same four bytes as another type."""
    if old == "f":  # struct refuses what float32 cannot hold
        value = float(np.float32(value))
    return struct.unpack(new, struct.pack(old, value))[0]


def _half(value: float) -> np.float16:
    with np.errstate(over="ignore"):
        return np.float16(np.float32(value))


TWINS = {
    device.ld16: Addressed.load4,
    device.ld16_host: Addressed.load4,
    device.ld4: Addressed.load,
    device.ld4_host: Addressed.load,
    device.st16: Addressed.store,
    device.st4: Addressed.store,
    device.load_acquire: Addressed.load_acquire,
    device.store_release: Addressed.store_release,
    device.fetch_inc_wrap: Addressed.fetch_inc_wrap,
    device.float_of_bits: lambda _, bits: _convert("I", "f", bits),
    device.bits_of_float: lambda _, value: _convert("f", "I", value),
    device.float_of_half: lambda _, bits: float(np.uint16(bits & 0xFFFF).view(np.float16)),
    device.half_of_float: lambda _, value: int(_half(value).view(np.uint16)),
    device.exp2: lambda _, value: math.inf if value >= 128 else 2.0**value,
    device.rsqrt: lambda _, value: value**-0.5 if value else math.inf,
}
