"""What the kernels need from CUDA: compile, launch, and the memory accesses Python has no word for.

The only file that imports numba.cuda. A kernel is a Python function whose parameters are annotated
with Numba types; it runs compiled on tensors of a GPU, and simulated on tensors of a CPU
(`simulator.py`), from the same source.

    @kernel(max_threads=256)
    def double(values: int32[::1], ...): ...
    double.launch(grid, block, values, ...)      # on torch's current stream

Compiling needs no GPU: Numba makes PTX, NVIDIA's linker makes machine code (a cubin). Cubins are
kept on disk, under a hash of everything they are made from, so a second process compiles nothing.
A launch is safe to capture in a CUDA graph once the kernel has been launched before: it allocates
nothing and waits for nothing. Cost of a launch: some 10 us of Python, 0 in a replayed graph.

It deliberately does not know what any kernel does.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import _numba_cuda_redirector  # noqa: F401  numba.cuda is numba-cuda's, also where no .pth is read
import torch
from cuda.pathfinder import DynamicLibNotFoundError
from llvmlite import ir
from numba import cuda
from numba.cuda import dispatcher, types
from numba.cuda.extending import intrinsic
from numba.cuda.types import float32, int16, int32, int64, uint32
from torch import Tensor

if cuda.implementation != "NVIDIA":
    raise ImportError("numba.cuda is Numba's own, not numba-cuda's; pip install numba-cuda==0.30.4")

__all__ = [
    "Address",
    "cuda",
    "device_function",
    "float32",
    "int16",
    "int32",
    "int64",
    "kernel",
    "uint32",
]

MIN_COMPUTE_CAPABILITY = (7, 5)  # the oldest that CUDA 13 compiles for
COMPILERS = ("numba", "numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink")
LOCK = threading.RLock()  # Numba compiles for one chip at a time
DTYPES = {int16: torch.int16, int32: torch.int32, int64: torch.int64, float32: torch.float32}


class Address(NamedTuple):
    """Annotates a parameter that is the address of a tensor of any dtype: an int64 in the kernel.

    The tensor's rows (along its first dimension) must be contiguous, but may lie apart.
    host: the tensor lies in pinned host memory, which kernels reach over the bus, not on the GPU.
    """

    host: bool


DEVICE_ADDRESS, HOST_ADDRESS = Address(host=False), Address(host=True)


class Compiled(NamedTuple):
    name: str  # of the entry point
    cubin: bytes
    ptx: str
    log: str  # what ptxas says of registers, spills and shared memory


class Loaded(NamedTuple):
    kernel: Any  # of cuda.core
    max_shared_bytes: int  # dynamic shared memory that a block may ask for


def kernel(*, max_threads: int) -> Callable[[Callable], Kernel]:
    """Makes a Kernel of a function; max_threads: per block, an upper limit of what is launched."""
    return lambda function: Kernel(function, max_threads)


def device_function(python_function: Callable) -> Any:
    """Makes a function that kernels can call."""
    return cuda.jit(device=True)(python_function)


class Kernel:
    """A Python function as a CUDA kernel."""

    def __init__(self, py_func: Callable, max_threads: int) -> None:
        self.py_func = py_func
        self.max_threads = max_threads
        self.name = py_func.__name__
        self.parameters: dict[str, Any] = inspect.get_annotations(py_func, eval_str=True)
        self.signature = tuple(
            int64 if isinstance(kind, Address) else kind for kind in self.parameters.values()
        )
        self._kinds = [(name, kind, kind is int64) for name, kind in self.parameters.items()]
        self._loaded: dict[int, Loaded] = {}  # by device index

    def launch(self, grid: int, block: int, *args: Any, shared_bytes: int = 0) -> None:
        """Runs `grid` blocks of `block` threads, with `shared_bytes` of dynamic shared memory.

        args: a contiguous tensor for each array, a tensor for each Address, an int for each int64.
        Raises TypeError or ValueError, before anything runs, for an argument that does not fit.
        """
        device = self._device_of(args)
        values = self._checked(args, device)
        if not 1 <= block <= self.max_threads:
            raise ValueError(
                f"{self.name}: {block} threads per block, allowed 1..{self.max_threads}"
            )
        if device.type == "cpu":
            from minihisparse.kernels import simulator

            memory = [_whole(arg) for arg in args if isinstance(arg, Tensor)]
            simulator.run(
                self.py_func, grid, block, values, memory=memory, shared_bytes=shared_bytes
            )
            return
        flat: list[int] = []
        for value in values:
            if isinstance(value, Tensor):  # Numba's array: no owner, no parent, then what it is
                size = value.element_size()
                flat += (0, 0, value.numel(), size, value.data_ptr(), *value.shape)
                flat += (stride * size for stride in value.stride())
            else:
                flat.append(value)
        index = device.index
        ready = self.load(device, shared_bytes)
        config = _launch_config(grid, block, shared_bytes)
        stream = _core_stream(index, torch._C._cuda_getCurrentRawStream(index))
        if index == torch._C._cuda_getDevice():
            _cuda_core().launch(stream, config, ready, *flat)
        else:
            with torch.cuda.device(device):  # the default stream is that of the current device
                _cuda_core().launch(stream, config, ready, *flat)

    def load(self, device: torch.device, shared_bytes: int = 0) -> Any:
        """Makes the kernel ready for launches on a GPU, with so much dynamic shared memory.

        Compiles it unless the disk cache has it. `launch` calls this too; before a CUDA graph is
        captured it must have been called once. Raises RuntimeError if the GPU or the driver is too
        old or the compiler is missing, ValueError if the GPU has less shared memory.
        """
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        loaded = self._loaded.get(device.index)
        if loaded is None:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{self.name} is not loaded yet, and a CUDA graph is being captured; launch or "
                    "load it once before"
                )
            with LOCK:
                loaded = self._loaded.get(device.index) or self._load(device)
        if shared_bytes > loaded.max_shared_bytes:
            raise ValueError(
                f"{self.name} needs {shared_bytes} bytes of shared memory per block, "
                f"{torch.cuda.get_device_name(device)} has {loaded.max_shared_bytes} left for it"
            )
        return loaded.kernel

    def _device_of(self, args: tuple) -> torch.device:
        """Where the kernel runs: the device of the first tensor that is not in host memory."""
        for kind, arg in zip(self.parameters.values(), args, strict=False):
            if isinstance(arg, Tensor) and kind != HOST_ADDRESS:
                return arg.device
        raise TypeError(f"{self.name}: no argument is a tensor, so there is no device to run on")

    def _checked(self, args: tuple, device: torch.device) -> list:
        """The arguments with addresses resolved. Raises TypeError or ValueError if one is wrong."""
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, got {len(args)}")
        return [
            arg if is_int and type(arg) is int else self._value(name, kind, arg, device)
            for (name, kind, is_int), arg in zip(self._kinds, args, strict=True)
        ]

    def _value(self, name: str, kind: Any, arg: Any, device: torch.device) -> Any:
        """One argument: a tensor for an array, an int for anything else. Raises as `_checked`."""
        if kind is int64:
            raise TypeError(f"{self.name}: {name} must be an int, got {type(arg).__name__}")
        if not isinstance(arg, Tensor):
            raise TypeError(f"{self.name}: {name} must be a tensor, got {type(arg).__name__}")
        is_address = isinstance(kind, Address)
        if not arg.is_contiguous():
            by_rows = is_address and arg.ndim > 1 and len(arg) > 0
            if not (by_rows and arg[0].is_contiguous()):
                raise ValueError(
                    f"{self.name}: {name} must be contiguous, got strides {arg.stride()}"
                )
        if is_address and kind.host:
            if arg.device.type != "cpu":
                raise ValueError(
                    f"{self.name}: {name} must be in host memory, got device {arg.device}"
                )
            if device.type == "cuda" and not arg.is_pinned():
                raise ValueError(
                    f"{self.name}: {name} is in pageable host memory, which a GPU cannot read; pin "
                    "it (HostPool does, if its device is the GPU)"
                )
        elif arg.device != device:
            raise ValueError(
                f"{self.name}: {name} is on {arg.device}, the other arguments are on {device}"
            )
        if is_address:
            return arg.data_ptr()
        if arg.dtype != DTYPES[kind.dtype] or arg.ndim != kind.ndim:
            raise TypeError(
                f"{self.name}: {name} must be {DTYPES[kind.dtype]} with {kind.ndim} dimensions, "
                f"got {arg.dtype} {tuple(arg.shape)}"
            )
        return arg

    def compile(self, cc: tuple[int, int]) -> Compiled:
        """Machine code for compute capability `cc`. Needs no GPU, but NVIDIA's compiler.

        Raises RuntimeError if that is missing.
        """
        core = _cuda_core()
        options = core.LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}", ptxas_options=["-v"])
        try:
            with LOCK, _pretend_device(cc):
                ptx, _ = cuda.compile_ptx(
                    self.py_func, types.void(*self.signature), cc=cc, launch_bounds=self.max_threads
                )
            linker = core.Linker(core.ObjectCode.from_ptx(ptx.encode()), options=options)
            cubin = linker.link("cubin").code
        except (DynamicLibNotFoundError, ValueError) as error:  # ValueError: no nvJitLink
            raise RuntimeError(
                "compiling kernels needs NVIDIA's compiler; pip install 'minihisparse[cuda]' "
                f"({error})"
            ) from error
        name = re.search(r"\.entry\s+([\w$]+)", ptx)[1]
        return Compiled(name, bytes(cubin), ptx, linker.get_info_log())

    def _load(self, device: torch.device) -> Loaded:
        """From the disk cache, or compiled now."""
        cc = torch.cuda.get_device_capability(device)
        if cc < MIN_COMPUTE_CAPABILITY:
            needed, found = (".".join(map(str, pair)) for pair in (MIN_COMPUTE_CAPABILITY, cc))
            raise RuntimeError(
                f"the kernels need compute capability {needed}, "
                f"{torch.cuda.get_device_name(device)} has {found}; use --device cpu"
            )
        chip = f"sm_{cc[0]}{cc[1]}"
        path = cache_folder() / f"{self.name}-{chip}-{self._digest}.cubin"
        ready = _read_cubin(path)
        if ready is None:
            print(f"compiling {self.name} for {chip} ...", file=sys.stderr, flush=True)
            start = time.perf_counter()
            compiled = self.compile(cc)
            where = _write_cubin(path, compiled)
            ready = _get_kernel(compiled.cubin, compiled.name)
            seconds = time.perf_counter() - start
            print(f"compiled in {seconds:.1f} s, {where}", file=sys.stderr, flush=True)
        self._loaded[device.index] = Loaded(ready, _allow_all_shared_memory(ready, device))
        return self._loaded[device.index]

    @cached_property
    def _digest(self) -> str:
        """A hash of all that the machine code depends on, the chip aside."""
        parts = [str(self.signature), self.name, *map(_version, COMPILERS)]
        parts += [str(self.max_threads), repr(_made_from(self.py_func))]
        parts += [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _whole(tensor: Tensor) -> Tensor:
    """All memory from a tensor's first number to its last, also what lies between its rows."""
    if tensor.is_contiguous():
        return tensor
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    size = 1 + sum((count - 1) * stride for count, stride in extents)
    return tensor.as_strided((size,), (1,))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # a compiler of the system's own
        return ""


def _made_from(py_func: Callable) -> tuple:
    """A function's code, the constants that it uses, and the same of what it calls."""
    used = inspect.getclosurevars(py_func)
    names = {**used.globals, **used.nonlocals}
    called = {n: _made_from(v.py_func) for n, v in names.items() if hasattr(v, "py_func")}
    constants = {n: v for n, v in names.items() if isinstance(v, int | float | tuple)}
    code = py_func.__code__
    return code.co_code, code.co_consts, code.co_names, constants, called


def cache_folder() -> Path:
    """Where compiled kernels are kept: in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "minihisparse" / "kernels"


def _read_cubin(path: Path) -> Any | None:
    """The kernel in a file of the cache; None if there is none, or if it is not whole.

    The driver trusts what it is given, and crashes on half a file: hence the checksum.
    """
    try:
        name, checksum, cubin = path.read_bytes().split(b"\n", 2)
    except (OSError, ValueError):
        return None
    whole = hashlib.sha256(cubin).hexdigest().encode() == checksum
    return _get_kernel(cubin, name.decode()) if whole else None


def _write_cubin(path: Path, compiled: Compiled) -> str:
    """Writes a file completely or not at all, and says where it is, or why it is not: no error."""
    checksum = hashlib.sha256(compiled.cubin).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(f"{compiled.name}\n{checksum}\n".encode() + compiled.cubin)
        part.replace(path)
    except OSError as error:
        return f"not kept: {error}"
    return f"kept in {path}"


def _get_kernel(cubin: bytes, name: str) -> Any:
    try:
        return _cuda_core().ObjectCode.from_cubin(cubin).get_kernel(name)
    except Exception as error:  # cuda.core has no name for it that all its versions share
        raise RuntimeError(
            f"the driver does not take the kernel ({error}); it must be one for CUDA 13"
        ) from error


@contextmanager
def _pretend_device(cc: tuple[int, int]):
    """Numba asks the current device for its capability when a kernel calls a function of ours."""
    device = type("Device", (), {"compute_capability": cc})()
    saved, dispatcher.get_current_device = dispatcher.get_current_device, lambda: device
    try:
        yield
    finally:
        dispatcher.get_current_device = saved


@cache
def _cuda_core():
    import cuda.core

    return cuda.core


@cache
def _core_stream(device_index: int, handle: int):  # every GPU has a default stream of handle 0
    return _cuda_core().Stream.from_handle(handle)


@cache
def _launch_config(grid: int, block: int, shared_bytes: int):
    return _cuda_core().LaunchConfig(grid=grid, block=block, shmem_size=shared_bytes)


def _allow_all_shared_memory(ready: Any, device: torch.device) -> int:
    """Lets a kernel have more than the 48 KiB that a block gets unasked; returns how much."""
    from cuda.bindings import driver

    total = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    kinds, chip = driver.CUfunction_attribute, driver.CUdevice(device.index)
    kind = kinds.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
    status, static = driver.cuKernelGetAttribute(kind, ready.handle, chip)
    if status == driver.CUresult.CUDA_SUCCESS:
        kind = kinds.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (status,) = driver.cuKernelSetAttribute(kind, total - static, ready.handle, chip)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"asking for {total} bytes of shared memory per block: {status}")
    return total - static


# ---- memory accesses: addresses are int64; what comes and goes are words of 4 bytes, uint32 ----

I32, I64 = ir.IntType(32), ir.IntType(64)
FOUR = types.UniTuple(uint32, 4)


def _load_words(ptx: str, words: int, result: Any, *, constant: bool = False) -> Any:
    """An instruction that loads one or four words; constant: nobody writes them meanwhile."""

    @intrinsic
    def load(typing_context, address):
        def code(context, builder, signature, args):
            outputs = ir.LiteralStructType([I32] * words) if words > 1 else I32
            registers = ", ".join(f"${i}" for i in range(words))
            text = f"{ptx} {{{registers}}}, [${words}];" if words > 1 else f"{ptx} $0, [$1];"
            # Without the clobber, a load may be moved across stores, or out of a loop that polls.
            constraints = ",".join(["=r"] * words) + ",l" + ("" if constant else ",~{memory}")
            assembly = ir.InlineAsm(
                ir.FunctionType(outputs, [I64]), text, constraints, side_effect=not constant
            )
            loaded = builder.call(assembly, args)
            if words == 1:
                return loaded
            parts = [builder.extract_value(loaded, i) for i in range(words)]
            return context.make_tuple(builder, signature.return_type, parts)

        return result(int64), code

    return load


def _store_words(ptx: str, words: int, value: Any = uint32) -> Any:
    """An instruction that stores one or four words."""

    @intrinsic
    def store1(typing_context, address, a):
        return types.void(int64, value), code

    @intrinsic
    def store4(typing_context, address, a, b, c, d):
        return types.void(int64, uint32, uint32, uint32, uint32), code

    def code(context, builder, signature, args):
        registers = ", ".join(f"${i + 1}" for i in range(words))
        text = f"{ptx} [$0], {{{registers}}};" if words > 1 else f"{ptx} [$0], $1;"
        kind = ir.FunctionType(ir.VoidType(), [I64] + [I32] * words)
        constraints = ",".join(["l"] + ["r"] * words) + ",~{memory}"
        builder.call(ir.InlineAsm(kind, text, constraints, side_effect=True), args)
        return context.get_dummy_value()

    return store4 if words > 1 else store1


# Host rows are read once and by nobody else: past the caches, so that nothing useful is evicted.
ld16_host = _load_words("ld.global.nc.L1::no_allocate.v4.u32", 4, FOUR, constant=True)
ld4_host = _load_words("ld.global.nc.L1::no_allocate.u32", 1, uint32, constant=True)
ld16 = _load_words("ld.global.v4.u32", 4, FOUR)
ld4 = _load_words("ld.global.u32", 1, uint32)
st16 = _store_words("st.global.v4.u32", 4)
st4 = _store_words("st.global.u32", 1)
# One block hands data to another: write the data, store_release a flag; load_acquire it, read.
load_acquire = _load_words("ld.acquire.gpu.global.s32", 1, int32)
store_release = _store_words("st.release.gpu.global.s32", 1, int32)


@intrinsic
def fetch_inc_wrap(typing_context, address, last):
    """Atomically steps the int32 at an address through 0..last and round; returns the old value."""

    def code(context, builder, signature, args):
        kind = ir.FunctionType(I32, [I64, I32])
        text = "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;"
        return builder.call(ir.InlineAsm(kind, text, "=r,l,r,~{memory}", side_effect=True), args)

    return int32(int64, int32), code


# ---- floats: in words, as they lie in memory, and what is quicker than the math library ----


def _instruction(ptx: str, result: Any, argument: Any, constraints: str) -> Any:
    """An instruction from one register to another, without effect on memory."""
    kinds = {float32: ir.FloatType(), uint32: I32}

    @intrinsic
    def run(typing_context, value):
        def code(context, builder, signature, args):
            kind = ir.FunctionType(kinds[result], [kinds[argument]])
            return builder.call(ir.InlineAsm(kind, ptx, constraints), args)

        return result(argument), code

    return run


HALF_TO_FLOAT = "{.reg .b16 h, unused; mov.b32 {h, unused}, $1; cvt.f32.f16 $0, h;}"
FLOAT_TO_HALF = "{.reg .b16 h; cvt.rn.f16.f32 h, $1; mov.b32 $0, {h, 0};}"
float_of_bits = _instruction("mov.b32 $0, $1;", float32, uint32, "=f,r")
bits_of_float = _instruction("mov.b32 $0, $1;", uint32, float32, "=r,f")
float_of_half = _instruction(HALF_TO_FLOAT, float32, uint32, "=f,r")  # of the lower 16 bits
half_of_float = _instruction(FLOAT_TO_HALF, uint32, float32, "=r,f")  # to nearest even
exp2 = _instruction("ex2.approx.ftz.f32 $0, $1;", float32, float32, "=f,f")  # 2 ulp; -inf gives 0
rsqrt = _instruction("rsqrt.approx.ftz.f32 $0, $1;", float32, float32, "=f,f")
