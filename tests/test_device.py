"""Guards: an access of the wrong width or at the wrong address; a kernel launched with what does
not fit, or on another stream than torch's; machine code from the disk cache that was made from
another source, or for other constants; a cache folder or file that stops a run.

Kernels run compiled where there is a GPU, else simulated. The disk cache is tested without a GPU:
what compiles and what loads is replaced, what decides is not.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minihisparse.kernels import device as device_module
from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    HOST_ADDRESS,
    Compiled,
    Kernel,
    cache_folder,
    cuda,
    device_function,
    fetch_inc_wrap,
    int16,
    int32,
    int64,
    kernel,
    ld4,
    ld4_host,
    ld16,
    ld16_host,
    load_acquire,
    st4,
    st16,
    store_release,
)
from minihisparse.kernels.resolve import resolve_one_thread
from minihisparse.kernels.resolve_fused import fused_kernel
from minihisparse.kernels.resolve_one_block import resolve_one_block

FENCE = 0x5A5A5A5A


@pytest.fixture(scope="module")
def device() -> torch.device:
    """Compiled where there is a GPU, else simulated."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    """Nothing here finds, or leaves, a file in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "minihisparse" / "kernels"


def words(*values: int) -> torch.Tensor:
    """uint32 values as the int32 tensor that has the same bits."""
    return torch.tensor([v - 2**32 if v >= 2**31 else v for v in values], dtype=torch.int32)


# -- kernels, functions, memory accesses ------------------------------------------------------


@device_function
def weighted(value, weight):
    return value * weight


@kernel(max_threads=96)
def scale(values: int32[:, ::1], out: int64[::1], small: int16[::1], weight: int64):
    t = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if t < values.shape[0]:
        out[t] = weighted(int64(values[t, 0]), weight) + values[t, 1]
        small[t] = t


@kernel(max_threads=32)
def move_16(source: DEVICE_ADDRESS, host: HOST_ADDRESS, target: DEVICE_ADDRESS, count: int64):
    t = cuda.threadIdx.x
    if t < count:
        a, b, c, d = ld16(source + 16 * t)
        st16(target + 32 * t, d, c, b, a)
        a, b, c, d = ld16_host(host + 16 * t)
        st16(target + 32 * t + 16, a, b, c, d)


@kernel(max_threads=32)
def move_4(source: DEVICE_ADDRESS, host: HOST_ADDRESS, target: DEVICE_ADDRESS, count: int64):
    t = cuda.threadIdx.x
    if t < count:
        st4(target + 8 * t, ld4(source + 4 * t))
        st4(target + 8 * t + 4, ld4_host(host + 4 * t))


@kernel(max_threads=64)
def take_turns(flags: DEVICE_ADDRESS, out: int32[::1], last: int64):
    """flags: [a counter that wraps, a flag]."""
    t = cuda.threadIdx.x
    out[t] = fetch_inc_wrap(flags, last)
    cuda.syncthreads()
    if t == 32:
        store_release(flags + 4, -7)
    if t == 0:
        flag = load_acquire(flags + 4)
        while flag == 0:
            flag = load_acquire(flags + 4)
        out[0] = flag


@kernel(max_threads=32)
def through_shared(out: int32[::1], size: int64):
    shared = cuda.shared.array(0, int32)
    t = cuda.threadIdx.x
    for i in range(t, size, cuda.blockDim.x):
        shared[i] = i * 3
    cuda.syncthreads()
    for i in range(t, size, cuda.blockDim.x):
        out[i] = shared[size - 1 - i]


def test_a_kernel_reads_and_writes_arrays_of_each_kind(device):
    values = torch.tensor([[5, 7], [-3, 2**31 - 1], [-(2**31), -1]], dtype=torch.int32).to(device)
    out = torch.full((4,), -99, device=device)
    small = torch.full((4,), -99, dtype=torch.int16, device=device)
    scale.launch(2, 2, values, out, small, -(2**31))
    weight = -(2**31)
    assert out.tolist() == [5 * weight + 7, -3 * weight + 2**31 - 1, -(2**31) * weight - 1, -99]
    assert small.tolist() == [0, 1, 2, -99]


def test_a_function_is_still_python():
    assert weighted.py_func(6, 7) == 42 and scale.py_func.__name__ == scale.name == "scale"


@pytest.mark.parametrize("width", [4, 16])
def test_loads_and_stores_move_these_bytes_and_no_others(device, width):
    move, per_piece, count = (move_16, 4, 5) if width == 16 else (move_4, 1, 5)
    size = per_piece * count
    host = words(*range(0x90000001, 0x90000001 + size))
    if device.type == "cuda":
        host = host.pin_memory()
    source = words(*range(1, size), 0xFFFFFFFF).to(device)
    target = words(*[FENCE] * (2 * size + 8)).to(device)
    move.launch(1, 32, source, host, target[4:], count)
    expected = []
    for i in range(count):
        piece = slice(i * per_piece, (i + 1) * per_piece)
        expected += reversed(source[piece].tolist())
        expected += host[piece].tolist()
    assert target[4:-4].tolist() == expected
    assert target[:4].tolist() == target[-4:].tolist() == [FENCE] * 4


def test_flags_and_counters_between_threads(device):
    flags, out = torch.zeros(2, dtype=torch.int32, device=device), words(*[0] * 64).to(device)
    take_turns.launch(1, 64, flags, out, 2)
    assert flags.tolist() == [64 % 3, -7]
    # 0, 1, 2, 0, 1, ...: each thread has another one, and the first one's is overwritten.
    counts = torch.bincount(out[1:].cpu(), minlength=3)
    assert out[0] == -7 and sorted((torch.tensor([22, 21, 21]) - counts).tolist()) == [0, 0, 1]


@pytest.mark.parametrize("size", [1, 100, 12_000, 20_000])
def test_dynamic_shared_memory(device, size):
    """A large launch after a smaller one too; the largest needs a chip with 80 kB for a block."""
    if device.type == "cuda":
        limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
        if 4 * size > limit:
            pytest.skip(f"the chip has {limit} bytes of shared memory per block")
    for _ in range(2):
        for length in (size, 50):
            out = torch.zeros(length, dtype=torch.int32, device=device)
            through_shared.launch(1, 32, out, length, shared_bytes=4 * length)
            assert out.tolist() == [3 * (length - 1 - i) for i in range(length)]


@pytest.mark.gpu
def test_more_shared_memory_than_the_chip_has():
    out = torch.zeros(100_000, dtype=torch.int32, device="cuda")
    message = (
        r"^through_shared needs 400000 bytes of shared memory per block, .* has \d+ left for it$"
    )
    with pytest.raises(ValueError, match=message):
        through_shared.launch(1, 32, out, 100_000, shared_bytes=400_000)
    through_shared.launch(1, 32, out, 50, shared_bytes=200)
    assert out[:50].tolist() == [147 - 3 * i for i in range(50)]


@pytest.mark.gpu
def test_static_shared_memory_counts_too():
    """What is left for dynamic memory is less than the chip has, and all of it can be had."""

    @kernel(max_threads=32)
    def with_static(out: int32[::1], size: int64):
        dynamic = cuda.shared.array(0, int32)
        static = cuda.shared.array(1000, int32)
        t = cuda.threadIdx.x
        for i in range(t, 1000, 32):
            static[i] = i
        for i in range(t, size, 32):
            dynamic[i] = -i
        cuda.syncthreads()
        out[t] = static[999 - t] + dynamic[size - 1 - t]

    out = torch.zeros(32, dtype=torch.int32, device="cuda")
    with_static.launch(1, 32, out, 40, shared_bytes=160)
    left = with_static._loaded[0].max_shared_bytes
    total = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    assert total - 8000 < left <= total - 4000
    size = left // 4
    with_static.launch(1, 32, out, size, shared_bytes=left)
    assert out.tolist() == [999 - t - (size - 1 - t) for t in range(32)]
    with pytest.raises(ValueError, match=f"needs {total} bytes"):
        with_static.launch(1, 32, out, size, shared_bytes=total)


@pytest.mark.gpu
def test_a_launch_is_on_torchs_current_stream():
    """Behind what was queued there: a slow copy first, and the kernel sees its result."""
    source = words(*range(1, 33)).cuda()
    host, target = words(*range(32)).pin_memory(), words(*[0] * 64).cuda()
    move_4.launch(1, 32, source, host, target, 1)
    later = source + 100
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        source.copy_(later)
        move_4.launch(1, 32, source, host, target, 32)
        assert not stream.query(), "the launch waited"
        found = target.clone()
    stream.synchronize()
    assert found[::2].tolist() == [*range(101, 133)] and found[1::2].tolist() == [*range(32)]


@pytest.mark.gpu
def test_a_capture_of_a_kernel_that_was_never_loaded():
    """The error comes before anything breaks: the graph can be captured after a load."""
    fresh, out = made_with(123), torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match="made is not loaded yet, and a CUDA graph is being"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            out.add_(0)
            fresh.launch(1, 1, out)
    fresh.load(out.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fresh.launch(1, 1, out)
    assert out.item() == 0
    graph.replay()
    assert out.item() == 124


@pytest.mark.gpu
def test_tensors_of_another_gpu_than_the_current_one():
    """In a process of its own: were it launched on the wrong GPU, no kernel would run after it."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    program = (
        "import sys, torch; sys.path.insert(0, 'tests')\n"
        "from test_device import scale\n"
        "values = torch.tensor([[5, 7]], dtype=torch.int32)\n"
        "for index in (1, 0, 1):\n"
        "    at = f'cuda:{index}'\n"
        "    out = torch.zeros(1, dtype=torch.int64, device=at)\n"
        "    scale.launch(1, 1, values.to(at), out, out.short(), 10)\n"
        "    assert out.tolist() == [57], (index, out)\n"
        "    assert torch.cuda.current_device() == 0\n"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# -- what is refused before a launch ----------------------------------------------------------


def scale_arguments(device: torch.device) -> list:
    return [
        torch.zeros(4, 2, dtype=torch.int32, device=device),
        torch.zeros(4, dtype=torch.int64, device=device),
        torch.zeros(4, dtype=torch.int16, device=device),
        3,
    ]


@pytest.mark.parametrize(
    "place, value, error, message",
    [
        (0, lambda t: t.long(), TypeError, r"scale: values must be torch.int32 with 2 dim.*int64"),
        (0, lambda t: t[0], TypeError, r"values must be torch.int32 with 2 dimensions, .*\(2,\)"),
        (0, lambda t: t[None], TypeError, r"values must be .* got torch.int32 \(1, 4, 2\)"),
        (0, lambda t: t.T, ValueError, r"values must be contiguous, got strides \(1, 2\)"),
        (0, lambda t: t[:, :1], ValueError, r"values must be contiguous, got strides \(2, 1\)"),
        (0, lambda t: t.float(), TypeError, "values must be torch.int32 .* got torch.float32"),
        (1, lambda t: t.int(), TypeError, "out must be torch.int64"),
        (2, lambda t: t.int(), TypeError, "small must be torch.int16"),
        (1, lambda t: t.to("meta"), ValueError, "out is on meta, the other arguments are on"),
        (1, lambda t: t.tolist(), TypeError, "out must be a tensor, got list"),
        (1, lambda t: t.data_ptr(), TypeError, "out must be a tensor, got int"),
        (1, lambda t: None, TypeError, "out must be a tensor, got NoneType"),
        (3, lambda n: 3.0, TypeError, "weight must be an int, got float"),
        (3, lambda n: torch.tensor(3), TypeError, "weight must be an int, got Tensor"),
    ],
)
def test_arguments_that_do_not_fit(device, place, value, error, message):
    args = scale_arguments(device)
    args[place] = value(args[place])
    with pytest.raises(error, match=message):
        scale.launch(1, 32, *args)


def test_wrong_numbers_of_arguments_and_threads(device):
    args = scale_arguments(device)
    with pytest.raises(TypeError, match="^scale takes 4 arguments, got 3$"):
        scale.launch(1, 32, *args[:3])
    with pytest.raises(TypeError, match="^scale takes 4 arguments, got 5$"):
        scale.launch(1, 32, *args, 1)
    with pytest.raises(TypeError, match="no argument is a tensor"):
        scale.launch(1, 32)
    with pytest.raises(TypeError, match="no argument is a tensor"):
        scale.launch(1, 32, 1, 2, 3, 4)
    for threads in (0, 97, 1024, -1):
        message = rf"^scale: {threads} threads per block, allowed 1\.\.96$"
        with pytest.raises(ValueError, match=message):
            scale.launch(1, threads, *args)


def test_an_address_may_be_of_any_dtype_but_must_be_contiguous(device):
    host = torch.arange(8.0).half()
    host = host.pin_memory() if device.type == "cuda" else host
    source, target = host.to(device), torch.zeros(64, dtype=torch.uint8, device=device)
    move_4.launch(1, 32, source, host, target, 4)
    assert torch.equal(target[:32].view(torch.int32)[::2], source.view(torch.int32))
    with pytest.raises(ValueError, match="move_4: target must be contiguous"):
        move_4.launch(1, 32, source, host, target[::2], 4)


def test_the_rows_of_an_address_may_lie_apart(device):
    wide = torch.arange(24, dtype=torch.int32, device=device).view(4, 6)
    host = torch.zeros(8, dtype=torch.int32)
    host = host.pin_memory() if device.type == "cuda" else host
    target = torch.zeros(16, dtype=torch.int32, device=device)
    move_4.launch(1, 32, wide[:, 2:5], host, target, 4)  # from the middle of the first row
    assert target[0] == 2
    with pytest.raises(ValueError, match="move_4: source must be contiguous"):
        move_4.launch(1, 32, wide[:, ::2], host, target, 4)


def test_a_kernel_runs_where_its_tensors_are_but_for_those_of_the_host():
    """Even if the host's come first. No device is needed to see which one is meant."""

    @kernel(max_threads=32)
    def host_first(host: HOST_ADDRESS, out: DEVICE_ADDRESS, values: int32[::1]):
        st4(out, ld4_host(host))

    host, values = words(7, 8), words(0)
    message = "host_first: values is on cpu, the other arguments are on meta"
    with pytest.raises(ValueError, match=message):
        host_first.launch(1, 1, host, values.to("meta"), values)
    host_first.launch(1, 1, host, values, values)
    assert values.tolist() == [7]


@pytest.mark.gpu
def test_memory_that_a_gpu_cannot_reach():
    """Pageable host memory, device memory in place of the host's, and the other way round."""
    host, source = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32).cuda()
    with pytest.raises(ValueError, match=r"^move_4: host is in pageable host memory.*HostPool"):
        move_4.launch(1, 32, source, host, source, 1)
    with pytest.raises(ValueError, match=r"host must be in host memory, got device cuda:0"):
        move_4.launch(1, 32, source, source, source, 1)
    with pytest.raises(ValueError, match=r"target is on cpu, the other arguments are on cuda:0"):
        move_4.launch(1, 32, source, host.pin_memory(), host.pin_memory(), 1)
    with pytest.raises(ValueError, match=r"target is on cuda:0, the other arguments are on cpu"):
        move_4.launch(1, 32, host, host, source, 1)


def test_a_chip_that_is_too_old(monkeypatch):
    old = Kernel(scale.py_func, 96)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    message = r"^the kernels need compute capability 7\.5, Tesla V100 has 7\.0; use --device cpu"
    with pytest.raises(RuntimeError, match=message):
        old._load(torch.device("cuda", 0))


# -- the disk cache ---------------------------------------------------------------------------


def made_with(constant: int, name: str = "made", inner: int = 1, max_threads: int = 32) -> Kernel:
    OUTER, INNER = constant, inner

    @device_function
    def helper(value):
        return value + INNER

    def made(out: int32[::1]):
        out[0] = helper(OUTER)

    made.__name__ = name
    return Kernel(made, max_threads)


def made_otherwise(constant: int) -> Kernel:
    """As made_with, but for the body."""
    OUTER, INNER = constant, 1

    @device_function
    def helper(value):
        return value + INNER

    def made(out: int32[::1]):
        out[0] = helper(OUTER) * 2

    return Kernel(made, 32)


def made_of_int64() -> Kernel:
    OUTER, INNER = 5, 1

    @device_function
    def helper(value):
        return value + INNER

    def made(out: int64[::1]):
        out[0] = helper(OUTER)

    return Kernel(made, 32)


def made_with_global(constant: int) -> Kernel:
    """As a kernel of another file, whose constants stand at the top of that file."""
    names = {"int32": int32, "CONSTANT": constant}
    exec("def made(out: int32[::1]):\n    out[0] = CONSTANT", names)
    return Kernel(names["made"], 32)


def test_the_digest_changes_with_all_that_machine_code_is_made_from():
    digest = made_with(5)._digest
    assert digest == made_with(5)._digest and re.fullmatch("[0-9a-f]{16}", digest)
    others = {
        "a closure constant": made_with(6),
        "a constant of a function that is called": made_with(5, inner=2),
        "the name": made_with(5, name="other"),
        "the number of threads": made_with(5, max_threads=64),
        "the signature": made_of_int64(),
        "the source": made_otherwise(5),
        "a global": made_with_global(5),
        "a global constant": made_with_global(6),
    }
    digests = {what: other._digest for what, other in others.items()}
    for what, other in digests.items():
        assert other != digest, what
    assert len(set(digests.values())) == len(others)


def test_each_switch_of_the_fused_kernel_has_a_digest_of_its_own():
    sizes = {"num_threads": 64, "top_k": 3, "num_slots": 4}
    sizes |= {"record_bytes_are_16s": True, "several_blocks": False}
    others = {"num_threads": 128, "top_k": 5, "num_slots": 65}
    others |= {"record_bytes_are_16s": False, "several_blocks": True}
    kernels = [fused_kernel(**sizes)]
    kernels += [fused_kernel(**sizes | {name: value}) for name, value in others.items()]
    for switch in ("skip_io", "record_plan", "checked"):
        kernels.append(fused_kernel(**sizes, **{switch: True}))
    digests = [fused.kernel._digest for fused in kernels]
    digests += [resolve_one_block._digest, resolve_one_thread._digest]
    assert len(set(digests)) == len(digests) == 11


def test_the_digest_changes_with_the_sources_and_versions(monkeypatch, tmp_path):
    """A copy of the folder, in which one line is added to another file than the kernel's."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for path in Path(device_module.__file__).parent.glob("*.py"):
        (folder / path.name).write_text(path.read_text())
    before = Kernel(scale.py_func, 96)._digest
    monkeypatch.setattr(device_module, "__file__", str(folder / "device.py"))
    assert Kernel(scale.py_func, 96)._digest == before
    with (folder / "copy_records.py").open("a") as file:
        file.write("# changed\n")
    after = Kernel(scale.py_func, 96)._digest
    assert after != before
    monkeypatch.setattr(device_module, "version", lambda package: "0.31.0")
    assert Kernel(scale.py_func, 96)._digest not in (before, after)


def test_the_digest_is_the_same_in_another_process():
    """Whatever the hash seed and the addresses of objects; else every process would compile."""
    program = (
        "from minihisparse.kernels.resolve_fused import fused_kernel\n"
        "from minihisparse.kernels.resolve_one_block import resolve_one_block\n"
        "fused = fused_kernel(num_threads=64, top_k=3, num_slots=4, record_bytes_are_16s=True,\n"
        "                     several_blocks=True, record_plan=True)\n"
        "print(fused.kernel._digest, resolve_one_block._digest)"
    )
    root = Path(__file__).resolve().parents[1]
    found = set()
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    here = fused_kernel(
        num_threads=64,
        top_k=3,
        num_slots=4,
        record_bytes_are_16s=True,
        several_blocks=True,
        record_plan=True,
    )
    assert found == {f"{here.kernel._digest} {resolve_one_block._digest}"}


class FakeChip:
    """In place of a GPU: counts what is compiled, and loads what begins with "cubin"."""

    def __init__(self, monkeypatch, cc: tuple[int, int] = (9, 0)) -> None:
        self.compiled: list[tuple[int, int]] = []
        self.cc, self.capturing = cc, False
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.cc)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a fake")
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(device_module, "_allow_all_shared_memory", lambda ready, device: 900)
        monkeypatch.setattr(Kernel, "compile", lambda kernel, cc: self.compile(kernel, cc))
        monkeypatch.setattr(device_module, "_get_kernel", self.get_kernel)

    def compile(self, kernel: Kernel, cc: tuple[int, int]) -> Compiled:
        self.compiled.append(cc)
        return Compiled(f"entry_{kernel.name}", b"cubin\nof " + kernel.name.encode(), "", "")

    def get_kernel(self, cubin: bytes, name: str) -> tuple:
        if not cubin.startswith(b"cubin\nof ") or not name.startswith("entry_"):
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        return name, cubin

    def load(self, kernel: Kernel, index: int = 0) -> tuple:
        return kernel.load(torch.device("cuda", index))


def test_a_kernel_is_compiled_once_for_all_processes(monkeypatch, capsys, own_cache):
    chip = FakeChip(monkeypatch)
    right = "entry_made", b"cubin\nof made"
    assert chip.load(made_with(5)) == right
    said = capsys.readouterr()
    [path] = own_cache.iterdir()
    assert path.name == f"made-sm_90-{made_with(5)._digest}.cubin"
    assert re.fullmatch(
        rf"compiling made for sm_90 \.\.\.\ncompiled in \d+\.\d s, kept in {path}\n", said.err
    )
    assert not said.out  # stdout is for results
    assert chip.load(made_with(5)) == right and chip.load(made_with(5), index=1) == right
    assert chip.compiled == [(9, 0)] and capsys.readouterr().err == ""
    chip.load(made_with(6))
    chip.cc = (12, 0)
    chip.load(made_with(5))
    assert chip.compiled == [(9, 0), (9, 0), (12, 0)]
    assert len(list(own_cache.iterdir())) == 3 and not list(own_cache.glob("*.part"))


def test_a_loaded_kernel_is_neither_read_nor_compiled_again(monkeypatch, own_cache):
    """Not even in a capture, where only loading is refused: it may compile, and it waits."""
    chip, made = FakeChip(monkeypatch), made_with(5)
    chip.capturing = True
    with pytest.raises(RuntimeError, match="^made is not loaded yet, and a CUDA graph is being"):
        chip.load(made)
    assert chip.compiled == []
    chip.capturing = False
    loaded = chip.load(made)
    next(own_cache.iterdir()).unlink()
    chip.capturing = True
    assert chip.load(made) is loaded and len(chip.compiled) == 1
    with pytest.raises(RuntimeError, match="not loaded yet"):
        chip.load(made, index=1)


def test_shared_memory_is_checked_at_each_load(monkeypatch):
    chip, made, gpu = FakeChip(monkeypatch), made_with(5), torch.device("cuda", 0)
    message = "^made needs 901 bytes of shared memory per block, a fake has 900 left for it$"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            made.load(gpu, 901)
        assert made.load(gpu, 900) == made.load(gpu) == chip.load(made)


def test_a_compiler_that_is_missing(monkeypatch):
    def find(*args, **options):
        raise device_module.DynamicLibNotFoundError("no libnvvm")

    monkeypatch.setattr(device_module.cuda, "compile_ptx", find)
    message = r"needs NVIDIA's compiler; pip install 'minihisparse\[cuda\]' \(no libnvvm\)$"
    with pytest.raises(RuntimeError, match=message):
        made_with(5).compile((9, 0))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n",
        b"no line ends here",
        b"entry_made\n",
        b"entry_made\ncub",
        b"\xff\xfe\ncubin\nof ",
    ],
    ids=["empty", "one line", "no line", "no code", "cut off", "no text"],
)
def test_a_file_that_is_no_cubin_is_made_anew(monkeypatch, own_cache, content):
    chip = FakeChip(monkeypatch)
    chip.load(made_with(5))
    [path] = own_cache.iterdir()
    right = path.read_bytes()
    path.write_bytes(content)
    assert chip.load(made_with(5)) == ("entry_made", b"cubin\nof made")
    assert len(chip.compiled) == 2 and path.read_bytes() == right


@pytest.mark.parametrize("obstacle", ["a file in place of the folder", "no permission", "full"])
def test_a_cache_that_cannot_be_used_is_no_error(monkeypatch, capsys, tmp_path, obstacle):
    chip = FakeChip(monkeypatch)
    if obstacle == "a file in place of the folder":
        (tmp_path / "minihisparse").write_text("")

    def failing(method, error):
        def fail(path, *args, **options):
            if tmp_path in (path, *path.parents):
                raise error
            return method(path, *args, **options)

        return fail

    with monkeypatch.context() as patch:
        if obstacle == "no permission":  # not even to look whether a file is there
            for name in ("stat", "mkdir", "read_bytes", "write_bytes"):
                denied = PermissionError(13, "Permission denied")
                patch.setattr(Path, name, failing(getattr(Path, name), denied))
        elif obstacle == "full":
            full = OSError(28, "No space left on device")
            patch.setattr(Path, "write_bytes", failing(Path.write_bytes, full))
        assert chip.load(made_with(5)) == ("entry_made", b"cubin\nof made")
    said = capsys.readouterr().err
    assert re.search("compiled in .* s, not kept: ", said)
    assert "kept in" not in said


def test_a_file_is_written_whole_or_not_at_all(monkeypatch, own_cache):
    """Another process that looks in the middle of a write finds nothing rather than a part."""
    chip, seen = FakeChip(monkeypatch), []
    write = Path.write_bytes

    def write_and_look(path, data):
        write(path, data[:3])
        seen.extend(own_cache.glob("*.cubin"))
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_and_look)
    chip.load(made_with(5))
    assert seen == [] and len(list(own_cache.glob("*.cubin"))) == 1


def test_where_the_cache_is(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "minihisparse" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_folder() == Path.home() / ".cache" / "minihisparse" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "minihisparse" / "kernels"


@pytest.mark.gpu
def test_a_second_kernel_object_loads_and_does_not_compile(monkeypatch, capsys, own_cache):
    """With a real compiler and loader, and a file that was cut off or overwritten."""
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    made_with(5).launch(1, 1, out)
    assert out.item() == 6 and "compiling made for sm_" in capsys.readouterr().err
    [path] = own_cache.iterdir()
    right = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "compile", lambda kernel, cc: pytest.fail("compiled again"))
        made_with(5).launch(1, 1, out.zero_())
    assert out.item() == 6 and capsys.readouterr().err == ""
    made_with(9).launch(1, 1, out)
    assert out.item() == 10
    for content in (right[:200], b"", right[: len(right) // 2], b"made\n" + bytes(5000)):
        path.write_bytes(content)
        made_with(5).launch(1, 1, out.zero_())
        assert out.item() == 6 and "compiling made" in capsys.readouterr().err
        with monkeypatch.context() as patch:  # it was made anew, and kept
            patch.setattr(Kernel, "compile", lambda kernel, cc: pytest.fail("compiled again"))
            made_with(5).launch(1, 1, out.zero_())
        assert out.item() == 6


@pytest.mark.gpu
def test_processes_that_compile_at_once(own_cache):
    program = (
        "import sys, torch; sys.path.insert(0, 'tests')\n"
        "from test_device import made_with\n"
        "out = torch.zeros(1, dtype=torch.int32, device='cuda')\n"
        "made_with(5).launch(1, 1, out)\n"
        "assert out.item() == 6"
    )
    root = Path(__file__).resolve().parents[1]
    runs = [
        subprocess.Popen([sys.executable, "-c", program], cwd=root, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for run in runs:
        _, errors = run.communicate()
        assert run.returncode == 0, errors.decode()
    assert [path.suffix for path in own_cache.iterdir()] == [".cubin"]


def test_only_one_file_imports_numba():
    """A kernel that bypasses device.py would neither be simulated nor find its twins."""
    for path in Path(device_module.__file__).parent.glob("*.py"):
        imports = re.findall(r"^\s*(?:from|import) (numba\S*)", path.read_text(), re.MULTILINE)
        assert not imports or path.name == "device.py", path


def test_numbas_own_cuda_target_is_refused():
    """It is found in place of numba-cuda's where .pth files are not run, and is an older one."""
    program = (
        "import numba.cuda; numba.cuda.implementation = 'Built-in'\n"
        "import minihisparse.kernels.device"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode != 0 and "pip install numba-cuda" in done.stderr
