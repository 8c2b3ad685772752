"""Guards: a kernel that runs simulated and does not compile, or only for one chip; registers that
spill; local arrays that end up in memory; float64 that crept in; more shared memory than a chip
has; 16-byte accesses that became four of 4 bytes, or loads that wait for each other.

Everything is compiled to machine code without a GPU, by Numba's and NVIDIA's compiler wheels. The
full matrix of switches is compiled for sm_90, a few of them for every chip.
`pytest -s tests/test_kernels_compile.py` prints a line per kernel.
"""

import importlib.util
import re
import subprocess
import threading
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from numba.cuda import dispatcher

from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    Compiled,
    Kernel,
    int32,
    int64,
    kernel,
    ld4,
    st4,
    uint32,
)
from minihisparse.kernels.resolve import resolve_one_thread
from minihisparse.kernels.resolve_fused import fused_kernel
from minihisparse.kernels.resolve_one_block import one_block_shared_bytes, resolve_one_block

PIP = (
    'pip install "numba-cuda==0.30.4" "cuda-toolkit[nvvm,nvrtc]==13.0.*" '
    '"nvidia-nvjitlink==13.0.*" "nvidia-cuda-nvdisasm==13.2.86"'
)
SHARED_BYTES = {  # that a block may have, at most
    (7, 5): 64 * 1024,
    (8, 0): 163 * 1024,
    (9, 0): 227 * 1024,
    (10, 0): 227 * 1024,
    (12, 0): 99 * 1024,
}
REGISTERS = 65_536  # of a multiprocessor, for one block at most
PAPER = {"num_threads": 1024, "top_k": 2048, "num_slots": 4096}


class Case(NamedTuple):
    """A kernel, as it is launched."""

    kernel: Kernel
    num_threads: int
    shared_bytes: int
    wide: bool | None = None  # does it copy pieces of 16 bytes? None: it copies none


def one_thread() -> Case:
    return Case(resolve_one_thread, 32, 0, wide=False)


def one_block(num_threads: int = 1024, top_k: int = 2048, num_slots: int = 4096) -> Case:
    shared_bytes = one_block_shared_bytes(top_k, num_slots, num_threads)
    return Case(resolve_one_block, num_threads, shared_bytes, wide=False)


def fused(switches: str = "", **sizes: int) -> Case:
    """switches: words of "several", "wide", "plan", "checked", "skip_io"."""
    words, sizes = switches.split(), PAPER | sizes
    made = fused_kernel(
        **sizes,
        record_bytes_are_16s="wide" in words,
        several_blocks="several" in words,
        skip_io="skip_io" in words,
        record_plan="plan" in words,
        checked="checked" in words,
    )
    wide = None if "skip_io" in words else "wide" in words
    return Case(made.kernel, sizes["num_threads"], made.shared_bytes, wide)


def switches(*names: str) -> list[str]:
    """All subsets."""
    chosen = product((False, True), repeat=len(names))
    return [" ".join(n for n, on in zip(names, row, strict=True) if on) for row in chosen]


# Without a copy, neither its width nor the blocks that help make another kernel.
ALL_SWITCHES = switches("several", "wide", "plan", "checked")
ALL_SWITCHES += ["skip_io " + some for some in switches("plan", "checked")]
CASES = [((9, 0), "fused", words, ()) for words in ALL_SWITCHES]
CASES += [
    ((9, 0), "fused", "several wide", (32, 8, 16)),
    ((9, 0), "fused", "several wide", (128, 128, 256)),
    ((9, 0), "fused", "wide", (256, 256, 512)),
    ((7, 5), "one_thread", "", ()),
    ((9, 0), "one_thread", "", ()),
    ((7, 5), "one_block", "", (1024, 1024, 2048)),  # at the paper's sizes it does not fit
    *((cc, "one_block", "", ()) for cc in SHARED_BYTES if cc != (7, 5)),
    *((cc, "fused", "several wide", ()) for cc in SHARED_BYTES if cc != (9, 0)),
    ((8, 0), "fused", "plan checked", ()),
    ((12, 0), "fused", "plan checked", ()),
]


@cache
def compiled(cc: tuple[int, int], rung: str, words: str, sizes: tuple) -> tuple[Case, Compiled]:
    """Compiled once for all tests; without the wheels, skips and says which ones."""
    try:
        if importlib.util.find_spec("cuda.core") is None:
            raise ImportError("cuda.core is not installed")
        named_sizes = dict(zip(PAPER, sizes, strict=False))
        if rung == "fused":
            case = fused(words, **named_sizes)
        else:
            case = one_block(**named_sizes) if rung == "one_block" else one_thread()
        return case, case.kernel.compile(cc)
    except Exception as error:
        if missing_wheel(error):
            pytest.skip(f"{type(error).__name__}: {error}; {PIP}")
        raise


def missing_wheel(error: Exception) -> bool:
    """libNVVM, NVRTC or nvJitLink could not be loaded: no fault of the kernel."""
    # Without nvJitLink, cuda.core turns to the driver, which has no options for ptxas.
    wanted = "needs NVIDIA's compiler|cuda.core is not installed|not supported by the driver API"
    return re.search(wanted, str(error)) is not None


def machine_code(cubin: bytes, folder: Path) -> str:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility

        nvdisasm = find_nvidia_binary_utility("nvdisasm")
    except ImportError:
        nvdisasm = None
    if nvdisasm is None:
        pytest.skip(f"there is no nvdisasm; {PIP}")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    done = subprocess.run([nvdisasm, "-c", path], capture_output=True, text=True, check=True)
    return done.stdout


def number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    assert len(found) == 1, f"{pattern!r} is {len(found)} times in:\n{text}"
    return int(found[0])


def spilled_bytes(code: Compiled) -> int:
    """Stored to memory because registers ran out, and loaded again, per thread."""
    return max(number(rf"(\d+) bytes spill {way}", code.log) for way in ("stores", "loads"))


def name_of(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "paper"
    return str(value).replace(" ", "_") or "plain"


every_case = pytest.mark.parametrize("cc, rung, words, sizes", CASES, ids=name_of)


@every_case
def test_registers_and_memory(cc, rung, words, sizes):
    """No float64, no register spilled, nothing in local memory, and a block fits on the chip."""
    case, code = compiled(cc, rung, words, sizes)
    registers = number(r"Used (\d+) registers", code.log)
    static = sum(map(int, re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", code.ptx)))
    print(
        f"\nsm_{cc[0]}{cc[1]} {rung} {words or '-'} {name_of(sizes)}: {registers} registers, "
        f"{case.num_threads} threads, shared {static} + {case.shared_bytes} bytes, "
        f"cubin {len(code.cubin)} bytes",
        end="",
    )
    assert spilled_bytes(code) == 0
    assert number(r"(\d+) bytes stack frame", code.log) == 0
    assert registers * case.num_threads <= REGISTERS
    assert static + case.shared_bytes <= SHARED_BYTES[cc]
    assert static <= 48 * 1024
    assert not re.findall(r"\.f64\b", code.ptx), "float64"
    assert not re.findall(r"\.local\b", code.ptx), "local memory"
    assert code.name in code.ptx and code.cubin.startswith(b"\x7fELF")


@every_case
def test_memory_accesses(cc, rung, words, sizes, tmp_path):
    """In the PTX and in the machine code: the widths, and several reads of the host under way."""
    case, code = compiled(cc, rung, words, sizes)
    from_host = re.findall(r"ld\.global\.nc\.L1::no_allocate\.(v4\.u32|u32)", code.ptx)
    wide_stores = re.findall(r"st\.global\.v4\.u32", code.ptx)
    if case.wide is None:
        assert not from_host and not wide_stores
    elif case.wide:
        assert set(from_host) == {"v4.u32"} and len(wide_stores) == len(from_host)
    else:
        assert set(from_host) == {"u32"} and not wide_stores
    flags = re.findall(r"(?:ld\.acquire|st\.release|atom\.acq_rel)\.gpu", code.ptx)
    expected = {"ld.acquire.gpu", "st.release.gpu", "atom.acq_rel.gpu"}
    assert set(flags) == (expected if "several" in words else set())

    sass = machine_code(code.cubin, tmp_path)
    assert spilled_bytes(code) or not re.findall(r"\b(?:LDL|STL)\b", sass), "local memory"
    assert not re.findall(r"\b(?:DADD|DMUL|DFMA|DSETP|F2F\.F64\S*|I2F\.F64\S*)\b", sass)
    accesses = re.findall(r"\b(LDG\.E\.NA\S*|STG\.E\S*\.128\S*|LDG\.E\S*\.128\S*)", sass)
    if case.wide:
        kinds = ["load" if access.startswith("LDG") else "store" for access in accesses]
        assert all(".128" in access for access in accesses), accesses
        assert kinds.count("load") == kinds.count("store") == len(from_host)
        assert kinds.index("store") >= 2, "each read waits for the one before"
    else:
        assert not [access for access in accesses if ".128" in access]
        assert bool(accesses) == (case.wide is not None)


def test_the_largest_sizes_compile_and_spill_a_little():
    """K and B that need nearly all the shared memory of an H200, and 32 slots per thread."""
    case, code = compiled((9, 0), "fused", "several wide", (1024, 8192, 32_767))
    assert 48 * 1024 < case.shared_bytes < SHARED_BYTES[9, 0]
    registers = number(r"Used (\d+) registers", code.log)
    spilled = spilled_bytes(code)
    print(f"\nK = 8192, B = 32767: {registers} registers, {spilled} bytes spilled", end="")
    assert registers * case.num_threads <= REGISTERS and spilled < 2048


def test_a_missing_compiler_is_told_from_a_broken_kernel():
    assert missing_wheel(RuntimeError("compiling kernels needs NVIDIA's compiler; pip install x"))
    assert missing_wheel(ValueError("ptxas_options option is not supported by the driver API"))
    assert not missing_wheel(TypeError("nvvm: invalid operand"))
    assert not missing_wheel(RuntimeError("the driver does not take the kernel"))


@kernel(max_threads=32)
def add_up(address: DEVICE_ADDRESS, out: int32[::1], times: int64):
    total = int64(0)
    for _ in range(times):
        total += ld4(address)
        st4(address, uint32(total))
    out[0] = total


@pytest.mark.parametrize("cc", SHARED_BYTES)
def test_a_load_stays_in_its_loop(cc):
    """ld4 reads what st4 has written before; the compiler must not know better."""
    values, out = torch.tensor([3], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    add_up.launch(1, 1, values, out, 4)
    assert out.item() == 3 * 2**3 and values.item() == out.item()
    try:
        ptx = add_up.compile(cc).ptx
    except Exception as error:
        if missing_wheel(error):
            pytest.skip(f"{type(error).__name__}: {error}; {PIP}")
        raise
    blocks = re.split(r"^\$L__BB\w+:", ptx, flags=re.MULTILINE)  # each is entered at its top only
    looped = [block for block in blocks if re.search(r"bra\s+\$L__BB", block.rsplit(";", 2)[-2])]
    accesses = [re.findall(r"(ld|st)\.global\.u32", block) for block in looped]
    accesses = [some for some in accesses if "st" in some]
    assert accesses and all(some == ["ld", "st"] * (len(some) // 2) for some in accesses), ptx


def test_threads_that_compile_at_once_leave_numba_as_it_was():
    """Numba is told which chip to compile for by a function of its own that is exchanged."""
    before = dispatcher.get_current_device
    outcomes = []

    def compile_for(cc: tuple[int, int]) -> None:
        try:
            outcomes.append(f".target sm_{cc[0]}{cc[1]}" in add_up.compile(cc).ptx)
        except Exception as error:
            outcomes.append(missing_wheel(error))

    threads = [threading.Thread(target=compile_for, args=(cc,)) for cc in SHARED_BYTES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True] * len(SHARED_BYTES)
    assert dispatcher.get_current_device is before
