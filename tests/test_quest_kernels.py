"""Guards: page bounds that miss a key or change another page, page scores of the wrong head, page
or request, a list that is not that of the best pages, and padding or unwritten memory that matters;
answers that depend on the rest of the batch, on the order of threads and blocks, or on how the
pages are shared among blocks; kernels that spill, or keep the lengths they were captured with.

The oracle is the rule, request by request, in float64. Scores are compared with a tolerance; the
list must be exactly that of the kernels' own scores.
"""

import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from rig import assert_near, assert_same_bits, difference
from test_kernels_compile import REGISTERS, SHARED_BYTES, machine_code, number, spilled_bytes
from test_top_k import compile_or_skip, generator
from torch import Tensor

from minihisparse.kernels import quest, simulator
from minihisparse.kernels.numbers import DTYPE_NAMES
from minihisparse.kernels.quest import QuestKernels
from minihisparse.kernels.quest_kernels import (
    KEY_THREADS,
    SCORE_THREADS,
    key_kernel,
    score_kernel,
    select_kernel,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GARBAGE = 123456
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Sizes:
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 4
    top_k: int = 16
    dtype: torch.dtype = BF16


SMOLLM2 = Sizes(9, 3, 64, 16, 256)
LARGE = Sizes(32, 8, 128, 16, 2048)


def expected_scores(bounds: Tensor, q: Tensor) -> Tensor:
    """Of one request: bounds [P, Hkv, 2, D], q [Hq, D]; float64 [P]."""
    bounds, q = bounds.double(), q.double()
    group = len(q) // bounds.shape[1]
    scores = torch.zeros(len(bounds), dtype=torch.float64, device=q.device)
    for head, query in enumerate(q):
        largest, smallest = bounds[:, head // group].unbind(1)  # [P, D]
        bound = torch.maximum(query * largest, query * smallest).sum(dim=1)
        scores += (bound * len(query) ** -0.5).softmax(dim=0)
    return scores


def expected_positions(scores: Tensor, seq_len: int, sizes: Sizes) -> Tensor:
    """Of one request: the newest page, the best others, ties to the lowest; int32 [K]."""
    scores = scores.clone()
    scores[-1] = torch.inf
    best = scores.sort(descending=True, stable=True).indices[: sizes.top_k // sizes.page_size]
    pages = best.sort().values
    positions = pages[:, None] * sizes.page_size + torch.arange(sizes.page_size)
    positions = positions[positions < seq_len]
    padding = torch.full((sizes.top_k - len(positions),), -1)
    return torch.cat([positions, padding]).int()


class Rig:
    """Requests with bounds of their own, one layer of two; all that is not theirs is NaN."""

    def __init__(self, sizes: Sizes, lens: list[int], device: str, *, padding=1, seed=0, max_len=0):
        self.sizes, self.lens, self.device = sizes, lens, device
        self.generator = generator(seed)
        self.max_pages = -(-max(*lens, max_len, 1) // sizes.page_size)
        num_rows = len(lens) + 2
        self.rows = torch.randperm(num_rows, generator=self.generator)[: len(lens)]
        order = torch.randperm(num_rows, generator=self.generator)
        longest, last = int(self.rows[lens.index(max(lens))]), int(order.argmax())
        order[[longest, last]] = order[[last, longest]]  # its pages end where the memory does
        self.first_page = 3 + order * self.max_pages
        shape = (3 + num_rows * self.max_pages, sizes.num_kv_heads, 2, sizes.head_dim)
        self.layers = torch.full((2, *shape), torch.nan, dtype=sizes.dtype)
        for request, seq_len in enumerate(lens):
            pages = self.pages_of(request, seq_len)
            keys = self.normal(2, len(self.layers[1, pages]), sizes.num_kv_heads, sizes.head_dim)
            self.layers[1, pages] = torch.stack([keys.amax(0), keys.amin(0)], dim=2)
        self.padding = padding
        self.batch_rows = len(lens) + padding
        # Rows of a projection: what is beside the queries and keys must not matter.
        widths = [sizes.num_q_heads, sizes.num_kv_heads, sizes.num_kv_heads]
        qkv = self.normal(self.batch_rows, sum(widths), sizes.head_dim, scale=2)
        qkv[len(lens) :] = torch.nan
        qkv[:, -widths[2] :] = torch.nan
        self.q, self.k, _ = qkv.to(device).split(widths, dim=1)
        self.layers, self.first_page = self.layers.to(device), self.first_page.to(device)
        self.bounds = self.layers[1]
        self.kernels = QuestKernels(
            max_requests=self.batch_rows + 1,
            max_pages_per_request=self.max_pages,
            num_q_heads=sizes.num_q_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            top_k=sizes.top_k,
            page_size=sizes.page_size,
            dtype=sizes.dtype,
            device=torch.device(device),
        )
        self.kernels.load()
        for name, tensor in vars(self.kernels).items():
            if isinstance(tensor, Tensor) and name != "_tickets":
                tensor.fill_(torch.nan if tensor.is_floating_point() else GARBAGE)

    def normal(self, *shape: int, scale: float = 1) -> Tensor:
        return (torch.randn(shape, generator=self.generator) * scale).to(self.sizes.dtype)

    def pages_of(self, request: int, seq_len: int) -> slice:
        first = int(self.first_page[self.rows[request]])
        return slice(first, first + -(-seq_len // self.sizes.page_size))

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """What padded rows say is not to be trusted."""
        seq_lens = torch.tensor([*self.lens, *[77] * self.padding], dtype=torch.int32)
        rows = torch.cat([self.rows, torch.full((self.padding,), GARBAGE)])
        num_real = torch.tensor([len(self.lens)], dtype=torch.int32)
        return seq_lens.to(self.device), rows.to(self.device), num_real.to(self.device)

    def write(self) -> None:
        """Adds the newest keys with the kernel and by the rule; compares every byte."""
        expected = self.layers.cpu().clone()
        for request, seq_len in enumerate(self.lens):
            if seq_len == 0:
                continue
            page = expected[1, self.pages_of(request, seq_len)][-1]  # [Hkv, 2, D]
            new = self.k[request].cpu()
            if (seq_len - 1) % self.sizes.page_size == 0:
                page[:, 0], page[:, 1] = new, new
            else:
                page[:, 0] = torch.maximum(page[:, 0], new)
                page[:, 1] = torch.minimum(page[:, 1], new)
        self.kernels.write(self.bounds, self.first_page, self.k, *self.batch())
        actual = self.layers.cpu()
        assert torch.equal(actual.isnan(), expected.isnan())
        zero = torch.zeros((), dtype=actual.dtype)
        actual, expected = (torch.where(t.isnan(), zero, t) for t in (actual, expected))
        assert_same_bits(actual, expected)

    def select(self) -> Tensor:
        """Selects and checks everything; page scores [R, pages]."""
        before = self.layers.cpu().clone()
        positions = self.kernels.select(self.bounds, self.first_page, self.q, *self.batch())
        assert positions.shape == (self.batch_rows, self.sizes.top_k)
        scores, positions = self.kernels._page_scores.cpu(), positions.cpu()
        q, tolerance = self.q.cpu(), 1e-4 if self.device == "cuda" else 2e-5
        for request, seq_len in enumerate(self.lens):
            if seq_len == 0:
                assert (positions[request] == -1).all()
                continue
            pages = self.pages_of(request, seq_len)
            ours = scores[request, : pages.stop - pages.start]
            expected = expected_positions(ours, seq_len, self.sizes)
            assert torch.equal(positions[request], expected), (
                f"request {request}: {difference(positions[request], expected)}"
            )
            rule = expected_scores(before[1, pages], q[request])
            assert ours[-1] == torch.inf
            assert_near(ours[:-1] / rule[:-1], torch.ones(len(rule) - 1), tolerance, "scores")
        assert (positions[len(self.lens) :] == -1).all(), "padding"
        assert (self.kernels.positions[self.batch_rows :] == GARBAGE).all(), "unused rows"
        assert not self.kernels._tickets.any()
        assert_same_bits(self.layers.cpu(), before, "bounds")
        return scores[: self.batch_rows]


# -- keys ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
def test_newest_keys(dtype, device):
    """In the first page and later ones, at a page's start, inside, and at its end."""
    rig = Rig(Sizes(dtype=dtype), [1, 2, 4, 5, 8, 0, 30], device, padding=2, max_len=40)
    for _ in range(6):
        rig.write()
        rig.lens = [seq_len + 1 if seq_len else 0 for seq_len in rig.lens]
        rig.k.copy_(rig.normal(*rig.k.shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(9, 3, 64, 16, 32),
        Sizes(32, 8, 128, 16, 32),
        Sizes(2, 1, 80, 3, 3, FP16),
        Sizes(1, 1, 4, 1, 1, FP32),
    ],
)
def test_newest_keys_of_models(sizes, device):
    Rig(sizes, [1, 70, 64, 50], device).write()


@pytest.mark.parametrize("device", DEVICES)
def test_a_nan_stays(device):
    rig = Rig(Sizes(), [6, 7], device)
    rig.k[0, 0, :3] = torch.nan  # new ones
    rig.bounds[rig.pages_of(1, 7).stop - 1, :, :, 5:9] = torch.nan  # old ones
    rig.k[:2, 1] = torch.inf
    rig.write()


# -- selection ----------------------------------------------------------------------------------

SHAPES = [
    Sizes(),
    Sizes(9, 3, 64, 16, 64),
    Sizes(8, 1, 128, 16, 48),
    Sizes(2, 2, 256, 4, 16, FP32),  # 64 pieces of 16 bytes, 2 per lane
    Sizes(1, 1, 640, 4, 16, FP32),  # 160 pieces, 5 per lane
    Sizes(3, 1, 80, 3, 9, FP16),  # 10 pieces, 16 lanes
    Sizes(2, 1, 8, 3, 3),
    Sizes(1, 1, 4, 1, 7, FP32),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", SHAPES)
def test_select(sizes, device):
    """One token, a page less one, a page, one more; less pages than are selected, and more."""
    page, top_k = sizes.page_size, sizes.top_k
    lens = [1, page, page + 1, top_k, top_k + 1, 0, 70 * page - 1]
    if device == "cpu":
        lens = lens[4:] if sizes == SHAPES[0] else lens[4:5]
    rig = Rig(sizes, lens, device, max_len=90 * page)
    rig.select()
    rig.select()


@pytest.mark.parametrize("device", DEVICES)
def test_equal_pages(device):
    """Ties go to the lowest page, and the newest page is there all the same."""
    sizes = Sizes(page_size=4, top_k=16)
    rig = Rig(sizes, [199], device)
    rig.bounds.fill_(0.5)
    rig.select()
    expected = [*range(12), 196, 197, 198, -1]
    assert rig.kernels.positions[0].tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
def test_large_scores_do_not_overflow(device):
    rig = Rig(Sizes(dtype=FP32), [150, 40], device)
    rig.bounds.mul_(10)
    rig.q.mul_(10)
    rig.q[0, 1] = 0
    positions = rig.kernels.select(rig.bounds, rig.first_page, rig.q, *rig.batch()).cpu()
    for request, seq_len in enumerate(rig.lens):
        pages = rig.pages_of(request, seq_len)
        ours = rig.kernels._page_scores[request, : pages.stop - pages.start].cpu()
        rule = expected_scores(rig.bounds[pages].cpu(), rig.q[request].cpu())
        assert_near(ours[:-1], rule[:-1], 1e-3)  # with exponents of some 1000, 4 digits are left
        assert torch.equal(positions[request], expected_positions(ours, seq_len, rig.sizes))


@pytest.mark.parametrize("device", DEVICES)
def test_bits_do_not_depend_on_the_batch(device):
    """Alone, or with others: the same scores, the same list."""
    sizes = Sizes(9, 3, 64, 16, 64)
    rig = Rig(sizes, [900, 33, 1200], device, max_len=1200)
    together = rig.select()
    rig.lens, rig.rows, rig.batch_rows, rig.padding = rig.lens[2:], rig.rows[2:], 1, 0
    rig.q = rig.q[2:3]
    rig.kernels.positions.fill_(GARBAGE)
    assert_same_bits(rig.select()[0, :75], together[2, :75])


SPLITS = {  # threads of select_pages, longest row of one block, blocks of score and select_pages
    "one_tile_per_block": (32, 4096, 1024, 256),
    "tiles_take_turns": (32, 4096, 1, 256),
    "candidates": (32, 64, 6, 256),
    "candidates_of_large_shares": (32, 64, 1024, 15),
    "one_share": (64, 64, 1024, 1),
}


@pytest.mark.parametrize("split", SPLITS)
def test_shares_of_blocks(split, monkeypatch):
    """Many tiles and shares of pages, in an order that differs from seed to seed."""
    names = ("SELECT_THREADS", "LONGEST_IN_ONE_BLOCK", "SCORE_BLOCKS", "SELECT_BLOCKS")
    for name, value in zip(names, SPLITS[split], strict=True):
        monkeypatch.setattr(quest, name, value)
    original = simulator.run
    sizes = Sizes(2, 1, 4, 2, 22, FP32)
    rigs = [Rig(sizes, [411, 131, 128, 15], "cpu", seed=1) for _ in range(2)]
    first = rigs[0].select()
    for seed, resident_blocks in ((0, None), (1, 2)):
        run = partial(original, seed=seed, resident_blocks=resident_blocks)
        monkeypatch.setattr(simulator, "run", run)
        again = rigs[1].select()
        for request, num_pages in enumerate((206, 66, 64, 8)):
            assert_same_bits(again[request, :num_pages], first[request, :num_pages])


# -- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes, lens",
    [
        (SMOLLM2, [8192]),
        (SMOLLM2, [8192 - 61 * i for i in range(128)]),
        (SMOLLM2, [1_000_000]),
        (SMOLLM2, [300_000, 5, 65_536, 65_537]),
        (LARGE, [32_768, 32_000, 100, 20_000]),
        (Sizes(16, 1, 128, 1, 8192, FP16), [100_000, 9000]),
    ],
    ids=["smollm2", "smollm2_batch", "long", "long_batch", "large", "one_token_pages"],
)
def test_models(sizes, lens):
    rig = Rig(sizes, lens, "cuda")
    for _ in range(3):
        rig.select()
    rig.write()


@pytest.mark.gpu
def test_graph_replay():
    """Captured with requests of no length; then they come, grow and go."""
    rig = Rig(SMOLLM2, [5000, 100, 900, 40], "cuda", padding=2, max_len=8192)
    lens, batch = rig.lens, rig.batch()
    held_k, held_q = rig.k.clone(), rig.q.clone()
    static = [torch.zeros_like(tensor) for tensor in batch]
    q, k = torch.zeros_like(held_q), torch.zeros_like(held_k)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.kernels.write(rig.bounds, rig.first_page, k, *static)
        positions = rig.kernels.select(rig.bounds, rig.first_page, q, *static)
    for step in range(20):
        rig.lens = [seq_len + step for seq_len in lens[: 2 + step % 3]]
        rig.padding = rig.batch_rows - len(rig.lens)
        rows, rig.rows = rig.rows, rig.rows[: len(rig.lens)]
        q.copy_(rig.normal(*q.shape))
        k.copy_(rig.normal(*k.shape))
        eager = rig.layers[1].clone()
        rig.kernels.write(eager, rig.first_page, k, *rig.batch())
        expected = rig.kernels.select(eager, rig.first_page, q, *rig.batch()).clone()
        for held, new in zip(static, rig.batch(), strict=True):
            held.copy_(new)
        positions.fill_(GARBAGE)
        graph.replay()
        assert torch.equal(positions, expected)
        assert_same_bits(rig.bounds.cpu(), eager.cpu())
        rig.rows = rows


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 12}, "head_dim=12: a head has 24 bytes, which must be a multiple of 16"),
        ({"num_q_heads": 5}, "num_q_heads=5 is not a multiple of num_kv_heads=2"),
        ({"top_k": 18}, "top_k=18 is not a multiple of page_size=4"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_k": 40_000}, "top_k=40000 is 10000 pages, more than 8192"),
        ({"max_requests": 0}, "max_requests=0"),
        ({"max_pages_per_request": 0}, "max_pages_per_request=0"),
        ({"dtype": torch.float64}, "float64"),
        ({"num_q_heads": 142, "num_kv_heads": 1, "head_dim": 64}, "bytes of shared memory"),
    ],
)
def test_sizes_that_are_refused(changes, message):
    sizes = vars(Sizes()) | {"max_requests": 2, "max_pages_per_request": 9}
    with pytest.raises(ValueError, match=re.escape(message)):
        QuestKernels(**sizes | {"device": torch.device("cpu")} | changes)


def test_tensors_that_are_refused():
    rig = Rig(Sizes(), [5], "cpu")
    bounds, first_page, q, k, batch = rig.bounds, rig.first_page, rig.q, rig.k, rig.batch()
    wide = torch.zeros(2, 4, 24, dtype=BF16)
    shifted = torch.zeros(2 * 4 * 16 + 1, dtype=BF16)[1:].view(2, 4, 16)
    for call, args, message in [
        ("select", (bounds[:, :1], first_page, q, *batch), r"bounds is \(9, 1, 2, 16\)"),
        ("select", (bounds, first_page, k, *batch), r"q is \(2, 2, 16\), expected \(2, 4, 16\)"),
        ("write", (bounds, first_page, q, *batch), r"k is \(2, 4, 16\), expected \(2, 2, 16\)"),
        ("select", (bounds.half(), first_page, q, *batch), "bounds is torch.float16"),
        ("select", (bounds, first_page, q.float(), *batch), "q is torch.float32"),
        ("select", (bounds, first_page, shifted, *batch), "multiples of 16 bytes"),
        ("select", (bounds, first_page, wide[:, :, :16], *batch), "must be contiguous"),
        ("select", (bounds[::2], first_page, q, *batch), "bounds must be contiguous"),
        ("select", (bounds, first_page, q, batch[0][:1], *batch[1:]), r"seq_lens is \(1,\)"),
        ("select", (bounds, first_page, torch.cat([q, q]), *batch), "more than max_requests=3"),
    ]:
        with pytest.raises(ValueError, match=message):
            getattr(rig.kernels, call)(*args)
    with pytest.raises(TypeError, match="first_page must be torch.int64"):
        rig.kernels.select(bounds, first_page.int(), q, *batch)


def test_no_requests():
    rig = Rig(Sizes(), [5], "cpu")
    none = [tensor[:0] for tensor in rig.batch()[:2]]
    num_real = torch.zeros(1, dtype=torch.int32)
    rig.kernels.write(rig.bounds, rig.first_page, rig.k[:0], *none, num_real)
    answer = rig.kernels.select(rig.bounds, rig.first_page, rig.q[:0], *none, num_real)
    assert answer.shape == (0, 16)


def test_device_bytes():
    sizes = vars(SMOLLM2) | {"max_requests": 2, "device": torch.device("cpu")}
    kernels = QuestKernels(**sizes, max_pages_per_request=512)
    per_request = 4 * (10 * 512 + 2 * 9 * 8 + 1 + 256)  # 8 tiles of 64 pages
    assert kernels.device_bytes == 2 * per_request
    kernels = QuestKernels(**sizes, max_pages_per_request=62_500)
    padded = 489 * 128  # tiles of 128 pages
    per_request = 4 * (10 * padded + 2 * 9 * 489 + 1 + 256 + 2 * 16 * 123)  # 123 lists of 16 pages
    assert kernels.device_bytes == 2 * per_request


# -- machine code -------------------------------------------------------------------------------

CASES = [(cc, SMOLLM2) for cc in SHARED_BYTES]
CASES += [((9, 0), LARGE), ((9, 0), Sizes(2, 2, 256, 4, 16, FP32))]


@pytest.mark.parametrize("cc, sizes", CASES)
def test_machine_code(cc, sizes, tmp_path):
    kv = {"num_kv_heads": sizes.num_kv_heads, "head_dim": sizes.head_dim}
    kv |= {"dtype": DTYPE_NAMES[sizes.dtype], "page_size": sizes.page_size}
    heads = {"num_q_heads": sizes.num_q_heads}
    both = {"page_size": sizes.page_size, "top_k": sizes.top_k}
    made = {
        "add_keys": (key_kernel(**kv), KEY_THREADS),
        "score_pages": (score_kernel(**kv, **heads, tile_pages=64), SCORE_THREADS),
        "select_pages": (
            select_kernel(
                **heads,
                **both,
                num_threads=quest.SELECT_THREADS,
                longest=quest.LONGEST_IN_ONE_BLOCK,
            ),
            quest.SELECT_THREADS,
        ),
    }
    for name, (kernel, num_threads) in made.items():
        code = compile_or_skip(kernel, cc)
        registers = number(r"Used (\d+) registers", code.log)
        shared = sum(map(int, re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", code.ptx)))
        print(f"\nsm_{cc[0]}{cc[1]} {name}: {registers} registers, shared {shared}", end="")
        assert spilled_bytes(code) == 0
        assert number(r"(\d+) bytes stack frame", code.log) == 0
        assert registers * num_threads <= REGISTERS
        assert shared <= 48 * 1024
        assert not re.findall(r"\.f64\b", code.ptx), "float64"
        assert not re.findall(r"\.local\b", code.ptx), "local memory"
        if name == "add_keys":
            assert len(re.findall(r"(?:ld|st)\.global\.v4\.u32", code.ptx)) == 5
        if name == "score_pages":
            assert re.findall(r"ld\.shared\.v4\.f32", code.ptx)
            # Eight loads are under way before the first is used, as a float.
            between = code.ptx.split("ld.global.v4.u32")[1:-1]
            assert "." * 7 in "".join("f" if "%f" in some else "." for some in between)
            if cc == (9, 0):
                sass = machine_code(code.cubin, tmp_path)
                assert len(re.findall(r"\bLDG\.E\.128", sass)) >= 9
                assert len(re.findall(r"\bLDS\.128", sass)) >= 4
