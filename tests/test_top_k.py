"""Guards: a top-k that misses a score or takes one too many, breaks ties by chance or by the order
of threads and blocks, is not ascending, depends on scores behind a row's length, or leaves its
tickets or its neighbours' memory changed; and a kernel that spills, reads 4 bytes at a time, or
keeps the lengths that it was captured with.

The oracle is a stable sort of each row.
"""

import re

import pytest
import torch
from rig import difference
from test_kernels_compile import (
    PIP,
    REGISTERS,
    SHARED_BYTES,
    machine_code,
    missing_wheel,
    number,
    spilled_bytes,
)
from torch import Tensor

from minihisparse.kernels import simulator
from minihisparse.kernels.device import Compiled, Kernel
from minihisparse.kernels.top_k import TopK, top_k_kernel
from minihisparse.kernels.top_k_of_row import MAX_TOP_K, NUM_THREADS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GARBAGE = 123456
FENCE = 64  # elements on both sides


def expected_indices(scores: Tensor, lens: Tensor, top_k: int) -> Tensor:
    """The rule, row by row."""
    expected = torch.full((len(scores), top_k), -1, dtype=torch.int32)
    for row, length in enumerate(lens.tolist()):
        some = scores[row, : max(length, 0)]
        some = torch.where(some.isnan(), -torch.inf, some) + 0.0  # -0.0 becomes 0.0
        best = some.sort(descending=True, stable=True).indices[:top_k]
        expected[row, : len(best)] = best.sort().values.int()
    return expected


def softmax_like(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return (torch.randn(shape, generator=generator) * 3).softmax(dim=1)


KINDS = {
    "normal": lambda shape, g: torch.randn(shape, generator=g),
    "softmax": softmax_like,
    "nearly_equal": lambda shape, g: 1 + torch.rand(shape, generator=g) * 1e-5,
    "few_values": lambda shape, g: torch.randint(-2, 3, shape, generator=g) * 0.5,
    "all_equal": lambda shape, g: torch.full(shape, -3.25),
    "zeros_of_both_signs": lambda shape, g: torch.zeros(shape).copysign(
        torch.randn(shape, generator=g)
    ),
    "ascending": lambda shape, g: torch.arange(shape[1]).float().expand(shape).clone(),
    "descending": lambda shape, g: -torch.arange(shape[1]).float().expand(shape).clone(),
    "little_but_nan_and_inf": lambda shape, g: torch.where(
        torch.rand(shape, generator=g) < 0.1, 1.0, torch.randn(shape, generator=g).log() - torch.inf
    ),
    "one_bit_apart": lambda shape, g: (
        0x3F800000 + torch.randint(0, 40, shape, generator=g).int()
    ).view(torch.float32),
    "any_bits": lambda shape, g: (
        torch.randint(-(2**31), 2**31, shape, generator=g).int().view(torch.float32)
    ),
}


def special_values(scores: Tensor) -> Tensor:
    """Infinities and NaN of both signs, subnormal numbers, the largest ones."""
    values = [torch.inf, -torch.inf, torch.nan, -torch.nan, 1e-40, -1e-40, 3.4e38, -3.4e38, -0.0]
    scores = scores.clone()
    for i, value in enumerate(values):
        scores[:, i::17] = value
    return scores


class Rows:
    """Scores with garbage behind each row's length, and fences around what is written."""

    def __init__(self, scores: Tensor, lens: list[int], top_k: int, device: str, gap: int = 0):
        """gap: elements between the rows of the scores."""
        num_rows, length = scores.shape
        self.lens = torch.tensor(lens, dtype=torch.int32)
        self.expected = expected_indices(scores, self.lens.clamp(max=length), top_k)
        poisoned = scores.clone()
        for row, some in enumerate(lens):
            poisoned[row, max(some, 0) :] = torch.inf if row % 2 else torch.nan
        whole = torch.full((num_rows, length + gap), torch.inf, device=device)
        self.scores = whole[:, :length]
        self.scores.copy_(poisoned)
        self.flat = torch.full((num_rows * top_k + 2 * FENCE,), GARBAGE, dtype=torch.int32)
        self.flat = self.flat.to(device)
        self.indices = self.flat[FENCE:-FENCE].view(num_rows, top_k)
        self.lens = self.lens.to(device)

    def check(self, what: object = "") -> None:
        actual = self.indices.cpu()
        assert torch.equal(actual, self.expected), f"{what}: {difference(actual, self.expected)}"
        flat = self.flat.cpu()
        assert (flat[:FENCE] == GARBAGE).all() and (flat[-FENCE:] == GARBAGE).all(), what

    def select(self, **options) -> TopK:
        """Runs twice: the second call must find the scratch as the first one did."""
        num_rows, length = self.scores.shape
        top_k = TopK(
            max_rows=num_rows + 1,
            max_length=max(length, 1),
            top_k=self.indices.shape[1],
            device=self.scores.device,
            **options,
        )
        for scratch in (top_k._candidates, top_k._candidate_indices):
            scratch.fill_(GARBAGE)
        for call in range(2):
            self.indices.fill_(GARBAGE)
            top_k.select(self.scores, self.lens, self.indices)
            self.check(f"call {call}")
        assert not top_k._tickets.any()
        return top_k


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- one block per row --------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_top_k_is_a_stable_sort(kind, device):
    length, top_k = (300, 40) if device == "cpu" else (30_000, 2048)
    scores = KINDS[kind]((3, length), generator(1)).float()
    lens = [length, length - 5, length // 2]
    Rows(scores, lens, top_k, device).select(num_threads=32 if device == "cpu" else NUM_THREADS)
    Rows(special_values(scores), lens, top_k, device).select(num_threads=64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("top_k", [1, 3, 128])
def test_lengths_around_everything(top_k, device):
    """Around K, around what a warp reads at once, none at all, and more than there are."""
    lens = [0, -1, 1, 2, 3, 4, 5, top_k - 1, top_k, top_k + 1, 127, 128, 129, 260, 10_000]
    scores = KINDS["few_values"]((len(lens), 260), generator(2))
    Rows(scores, lens, top_k, device).select(num_threads=32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_threads", [32, 128, 256])
def test_rows_longer_than_the_registers(num_threads, device):
    length = 20 * num_threads + 3
    lens = [length, length - 4 * num_threads]
    scores = KINDS["one_bit_apart"]((2, length), generator(3))
    Rows(scores, lens, 100, device).select(num_threads=num_threads, tile_scores=1 << 20)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length, gap", [(201, 0), (200, 3), (203, 1), (200, 4)])
def test_rows_that_lie_anywhere(length, gap, device):
    """Only the last one lets the kernel read 16 bytes at a time."""
    scores = KINDS["normal"]((3, length), generator(4))
    Rows(scores, [77, 150, length], 16, device, gap).select(num_threads=32)
    rows = Rows(scores, [77, 150, length], 16, device, gap)
    rows.scores = torch.cat([torch.zeros(1, device=device), rows.scores.flatten()])[1:]
    rows.scores = rows.scores.view(3, length)  # starts at no multiple of 16 bytes
    rows.select(num_threads=32)


# -- several blocks per row ---------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["normal", "few_values", "all_equal", "descending"])
def test_tiles(kind, device):
    scale = 1 if device == "cpu" else 100
    scores = special_values(KINDS[kind]((4, 300 * scale), generator(5)).float())
    for tile, top_k in ((64, 10), (64, 64), (40, 70), (100, 3)):
        lens = [300 * scale, tile * scale, tile * scale + 1, 0]
        rows = Rows(scores, lens, top_k * scale, device)
        rows.select(num_threads=32 if device == "cpu" else 256, tile_scores=tile * scale)


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_read_4_bytes_at_a_time(device):
    scores = KINDS["few_values"]((2, 203), generator(6))
    Rows(scores, [203, 131], 17, device).select(num_threads=32, tile_scores=64)


@pytest.mark.parametrize("resident_blocks", [None, 1, 3])
def test_the_order_of_threads_and_blocks_does_not_matter(resident_blocks):
    scores = KINDS["few_values"]((2, 500), generator(7))
    for seed in range(4):
        rows = Rows(scores, [500, 333], 50, "cpu")
        run_shuffled(rows, 128, seed, resident_blocks)


def run_shuffled(rows: Rows, tile: int, seed: int, resident_blocks: int | None) -> None:
    """With 64 threads per block, in a random order; checks the result."""
    (num_rows, length), top_k = rows.scores.shape, rows.indices.shape[1]
    num_tiles = -(-length // tile)
    candidates = torch.full((num_rows, num_tiles * top_k // 4 * 4 + 4), torch.nan)
    candidate_indices = torch.full(candidates.shape, GARBAGE, dtype=torch.int32)
    tickets = torch.zeros(num_rows, dtype=torch.int32)
    simulator.run(
        top_k_kernel(num_threads=64, top_k=top_k, wide=True),
        num_rows * num_tiles,
        64,
        [
            rows.scores.data_ptr(),
            length,
            rows.scores.stride(0) * 4,
            rows.lens,
            rows.indices,
            candidates.data_ptr(),
            candidate_indices,
            tickets.data_ptr(),
            tile,
            num_tiles,
        ],
        memory=[rows.scores, candidates, tickets],
        seed=seed,
        resident_blocks=resident_blocks,
    )
    rows.check(f"seed {seed}")
    assert not tickets.any()


# -- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 256, 2048, MAX_TOP_K])
@pytest.mark.parametrize("length", [8192, 131_072, 1_000_003])
def test_large_rows(length, top_k):
    scores = softmax_like((3, length), generator(8))
    scores[1] = (scores[1] * 1e6).round()  # dozens of equal scores at the threshold, and zeros
    scores[2] = KINDS["few_values"]((1, length), generator(9))
    rows = Rows(scores, [length, length - 7, length // 3], top_k, "cuda")
    for _ in range(20):
        rows.select()


@pytest.mark.gpu
def test_more_blocks_than_run_at_once():
    scores = KINDS["nearly_equal"]((64, 65_536), generator(10))
    Rows(scores, [65_536 - 17 * row for row in range(64)], 300, "cuda").select(tile_scores=1024)


@pytest.mark.gpu
def test_graph_replay():
    """Captured once; scores and lengths change from replay to replay."""
    top_k = TopK(max_rows=3, max_length=50_000, top_k=500, device=torch.device("cuda"))
    top_k.load()
    scores = torch.zeros(3, 50_000, device="cuda")
    lens = torch.zeros(3, dtype=torch.int32, device="cuda")
    indices = torch.full((3, 500), GARBAGE, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        top_k.select(scores, lens, indices)
    for seed in range(20):
        new = KINDS["softmax" if seed % 2 else "few_values"]((3, 50_000), generator(seed))
        new_lens = torch.randint(0, 50_001, (3,), generator=generator(seed)).int()
        scores.copy_(new)
        lens.copy_(new_lens)
        indices.fill_(GARBAGE)
        graph.replay()
        expected = expected_indices(new.float(), new_lens, 500)
        assert torch.equal(indices.cpu(), expected), difference(indices.cpu(), expected)


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"top_k": 0}, "top_k=0 is not in 1..8192"),
        ({"top_k": 8193}, "top_k=8193 is not in 1..8192"),
        ({"max_length": 2**30}, "max_length=1073741824"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"num_threads": 96}, "num_threads=96"),
        ({"tile_scores": 6}, "tile_scores=6 must be a multiple of 4"),
    ],
)
def test_sizes_that_are_refused(changes, message):
    sizes = {"max_rows": 2, "max_length": 100, "top_k": 4, "device": torch.device("cpu")}
    with pytest.raises(ValueError, match=re.escape(message)):
        TopK(**sizes | changes)


def test_tensors_that_are_refused():
    top_k = TopK(max_rows=2, max_length=100, top_k=4, device=torch.device("cpu"))
    scores, lens = torch.zeros(2, 50), torch.zeros(2, dtype=torch.int32)
    indices = torch.full((2, 4), GARBAGE, dtype=torch.int32)
    for wrong, message in [
        ((scores.double(), lens, indices), "torch.float64"),
        ((scores[0], lens, indices), r"\(50,\), not float32 \[R, N\]"),
        ((torch.zeros(3, 50), lens, indices), r"\(3, 50\), more than max_rows=2"),
        ((torch.zeros(2, 101), lens, indices), r"\(2, 101\), more than .*max_length=100"),
        ((scores, lens[:1], indices), r"lens is \(1,\)"),
        ((scores, lens, indices[:, :3]), r"indices \(2, 3\)"),
        ((scores[:, ::2], lens, indices), "must be contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            top_k.select(*wrong)
    with pytest.raises(TypeError, match="lens must be torch.int32"):
        top_k.select(scores, lens.long(), indices)
    assert (indices == GARBAGE).all()


def test_nothing_to_do():
    top_k = TopK(max_rows=2, max_length=100, top_k=4, device=torch.device("cpu"))
    top_k.load()
    nothing = torch.zeros(0, dtype=torch.int32)
    top_k.select(torch.zeros(0, 50), nothing, nothing.view(0, 4))
    indices = torch.full((2, 4), GARBAGE, dtype=torch.int32)
    top_k.select(torch.zeros(2, 0), torch.ones(2, dtype=torch.int32), indices)
    assert (indices == -1).all()
    assert top_k.device_bytes == 8  # two tickets: no row is long enough for a second block
    assert TopK(
        max_rows=2, max_length=100_000, top_k=4, device=torch.device("cpu")
    ).device_bytes == 2 * (4 + 8 * 4 * 13)


# -- machine code -------------------------------------------------------------------------------

CASES = [(cc, 2048, True) for cc in SHARED_BYTES]
CASES += [((7, 5), 2048, False), ((9, 0), 256, False), ((9, 0), MAX_TOP_K, True)]


def compile_or_skip(kernel: Kernel, cc: tuple[int, int]) -> Compiled:
    try:
        return kernel.compile(cc)
    except Exception as error:
        if missing_wheel(error) or isinstance(error, ImportError):
            pytest.skip(f"{type(error).__name__}: {error}; {PIP}")
        raise


@pytest.mark.parametrize("cc, top_k, wide", CASES)
def test_machine_code(cc, top_k, wide, tmp_path):
    kernel = top_k_kernel(num_threads=NUM_THREADS, top_k=top_k, wide=wide)
    code = compile_or_skip(kernel, cc)
    registers = number(r"Used (\d+) registers", code.log)
    shared = sum(map(int, re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", code.ptx)))
    print(
        f"\nsm_{cc[0]}{cc[1]} top-{top_k} {wide=}: {registers} registers, shared {shared}", end=""
    )
    assert spilled_bytes(code) == 0
    assert number(r"(\d+) bytes stack frame", code.log) == 0
    assert registers * NUM_THREADS <= REGISTERS
    assert shared <= 48 * 1024
    assert not re.findall(r"\.f64\b", code.ptx), "float64"
    assert not re.findall(r"\.local\b", code.ptx), "local memory"
    wide_loads = re.findall(r"ld\.global\.v4\.u32", code.ptx)
    assert len(wide_loads) == (3 * 4 if wide else 0)  # in three passes, four under way at once
    # A block's stores are behind a barrier before its ticket says that they are there.
    before_ticket = code.ptx.partition("atom.acq_rel.gpu")[0]
    assert re.findall(r"\b(bar\.sync|st\.global)\b", before_ticket)[-1] == "bar.sync"
    if cc == (9, 0):
        sass = machine_code(code.cubin, tmp_path)
        assert not re.findall(r"\b(?:LDL|STL|DADD|DMUL|DFMA|DSETP)\b", sass)
        assert len(re.findall(r"\bLDG\.E\.128", sass)) == len(wide_loads)
        # Equal digits of a warp are counted at once, not one after the other.
        assert len(re.findall(r"\bATOMS\.POPC\.INC", sass)) == 16
