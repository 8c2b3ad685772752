"""Guards: attention over the wrong records, heads or numbers; unused memory, padding or neighbours
that reach the output; bits that depend on where records lie, on the batch, on the order of blocks
or threads; scratch that a call leaves dirty; a CUDA graph that keeps old inputs; a kernel that does
not compile, spills registers, uses float64, or reads less than 16 bytes at a time.

The reference is float64, a loop over requests and heads. Everything lies between fences, and what
nobody may use is NaN.
"""

import re

import pytest
import torch
from kernel_rig import GARBAGE, Twin, ints, schedule
from rig import assert_same_bits
from test_kernels_compile import (
    PIP,
    REGISTERS,
    SHARED_BYTES,
    machine_code,
    missing_wheel,
    number,
    spilled_bytes,
)

from minihisparse.kernels import attention
from minihisparse.kernels import attention_kernel as kernel_module
from minihisparse.kernels.attention import DecodeAttention
from minihisparse.kernels.attention_kernel import RESIDENT_THREADS, attention_kernel
from minihisparse.kernels.numbers import dtype_name

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NAN = float("nan")
SMALL = [  # Hq, Hkv, D, K, dtype
    (9, 3, 64, 40, BF16),  # SmolLM2's heads; two warps
    (4, 4, 16, 7, BF16),
    (2, 1, 32, 32, BF16),
    (4, 1, 16, 33, FP32),
    (7, 1, 24, 33, FP16),  # three pieces of 16 bytes for four lanes; a head of padding
    (8, 1, 64, 10, BF16),
    (16, 1, 64, 5, BF16),  # two blocks for a KV head
    (11, 1, 64, 3, FP16),  # two blocks of six heads, one of which does not exist
    (2, 2, 128, 33, FP32),
    (1, 1, 256, 9, FP32),  # two pieces per lane
    (1, 1, 8, 1, BF16),  # one lane reads a record
    (1, 1, 80, 31, FP32),
    (2, 2, 8, 300, FP32),  # two splits, two KV heads
    (2, 1, 16, 520, BF16),  # three
]
LARGE = [
    (9, 3, 64, 256, BF16),
    (32, 8, 128, 2048, BF16),
    (28, 4, 128, 4096, FP16),
    (64, 8, 128, 1024, BF16),
    (8, 8, 128, 2048, FP32),
    (6, 1, 192, 300, BF16),
]


class Problem:
    """A batch of queries, the records they attend to, and the reference."""

    def __init__(
        self, device, num_q_heads, num_kv_heads, head_dim, top_k, dtype, num_reqs=3, seed=0, loud=1
    ):
        """loud: factor of q; the larger, the more unlike the weights."""
        self.random = torch.Generator().manual_seed(seed)
        self.device, self.dtype, self.top_k = device, dtype, top_k
        self.heads = num_q_heads, num_kv_heads, head_dim
        self.width, self.slots_per_row = 2 * num_kv_heads * head_dim, top_k + 9
        num_rows = num_reqs + 1
        qkv = torch.full((num_reqs, num_q_heads + 2 * num_kv_heads, head_dim), NAN)
        qkv[:, :num_q_heads] = self.normal(num_reqs, num_q_heads, head_dim) * loud
        first_slot = torch.randperm(num_rows, generator=self.random) * self.slots_per_row + 3
        rows = first_slot.argsort(descending=True)[:num_reqs]  # so that the last record is used
        records = torch.full((num_rows * self.slots_per_row + 3, self.width), NAN)
        slots = torch.full((num_reqs, top_k), -1)
        for r in range(num_reqs):  # all slots; some, with padding in between; one; all; ...
            count = (top_k, -(-top_k // 2), 1)[r % 3]
            some = torch.randperm(self.slots_per_row, generator=self.random)[:count]
            some[0] = self.slots_per_row - 1  # what lies behind the last record is not ours
            slots[r, torch.randperm(top_k, generator=self.random)[:count].sort().values] = some
            records[first_slot[rows[r]] + some] = self.normal(count, self.width)
        self.qkv = Twin("q", qkv.to(dtype), device)
        self.records = Twin("records", records.to(dtype), device)
        self.slots = Twin("slots", slots.int(), device)
        self.first_slot = Twin("first_slot", first_slot, device)
        self.rows = Twin("req_pool_indices", rows, device)
        self.inputs = [self.qkv, self.records, self.slots, self.first_slot, self.rows]
        self.made = self.attention(num_reqs)

    def normal(self, *shape):
        return torch.randn(shape, generator=self.random)

    def attention(self, max_requests):
        """A DecodeAttention whose scratch holds NaN, except for what must be zero."""
        num_q_heads, num_kv_heads, head_dim = self.heads
        made = DecodeAttention(
            max_requests=max_requests,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            top_k=self.top_k,
            dtype=self.dtype,
            device=torch.device(self.device),
        )
        made.scratch = []
        for name in ("_partials", "_tickets", "_zeros"):
            values = getattr(made, name).cpu()
            twin = Twin(name, values.fill_(NAN) if name == "_partials" else values, self.device)
            setattr(made, name, twin.actual)
            made.scratch.append(twin)
        return made

    def run(self, made=None, batch=slice(None)):
        """The output of these rows of the batch. Checks that nothing else was written."""
        made = made or self.made
        q = self.qkv.actual[batch, : self.heads[0]]
        nothing = torch.full(q.shape, NAN).to(self.dtype)
        out = Twin("out", nothing, self.device)
        slots, rows = self.slots.actual[batch], self.rows.actual[batch]
        first_slot = self.first_slot.actual
        made.scratch[0].actual.fill_(NAN)  # what an earlier call left would be right again
        returned = made.attend(q, self.records.actual, slots, first_slot, rows, out.actual)
        assert returned is out.actual
        out.forgive()
        made.scratch[0].forgive()
        for twin in [out, *self.inputs, *made.scratch]:
            twin.check("after the call")
        return out.expected.clone()

    def reference(self):
        """[R, Hq, D] float64."""
        num_q_heads, num_kv_heads, head_dim = self.heads
        slots, rows = self.slots.expected.long(), self.rows.expected
        out = torch.zeros(len(rows), num_q_heads, head_dim, dtype=torch.float64)
        for r, row in enumerate(rows):
            used = slots[r][slots[r] >= 0]
            if not len(used):
                continue
            found = self.records.expected[self.first_slot.expected[row] + used].double()
            k, v = found.view(-1, 2, num_kv_heads, head_dim).permute(1, 2, 0, 3)
            for head in range(num_q_heads):
                at = head // (num_q_heads // num_kv_heads)
                scores = k[at] @ self.qkv.expected[r, head].double() * head_dim**-0.5
                out[r, head] = scores.softmax(0) @ v[at]
        return out

    def check(self, out, tolerance=5e-6):
        """Rounded once, from a float32 that is nearly right."""
        right = self.reference()
        allowed = 0.505 * torch.finfo(self.dtype).eps * right.abs() + tolerance
        wrong = ~((out.double() - right).abs() <= allowed)
        worst = (out.double() - right)[wrong][:5].tolist()
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} wrong, by {worst}"


def sizes_id(value):
    return dtype_name(value) if isinstance(value, torch.dtype) else str(value)


CASES = [("cpu", *sizes) for sizes in SMALL]
CASES += [pytest.param("cuda", *sizes, marks=pytest.mark.gpu) for sizes in SMALL + LARGE]
on_each_device = pytest.mark.parametrize("device", DEVICES)


@pytest.mark.parametrize("device, hq, hkv, head_dim, top_k, dtype", CASES, ids=sizes_id)
def test_attention_is_softmax_of_scores_times_v(device, hq, hkv, head_dim, top_k, dtype):
    problem = Problem(device, hq, hkv, head_dim, top_k, dtype)
    problem.check(problem.run())


@pytest.mark.gpu
@pytest.mark.parametrize("num_reqs", [1, 2, 37, 256])
def test_batches_of_all_sizes(num_reqs):
    problem = Problem("cuda", 9, 3, 64, 256, BF16, num_reqs=num_reqs)
    problem.check(problem.run())


@on_each_device
@pytest.mark.parametrize("top_k", [20, 290])
def test_scores_in_the_hundreds_neither_overflow_nor_vanish(device, top_k):
    """One record takes nearly all the weight, and the maxima of splits are far apart."""
    problem = Problem(device, 2, 1, 16, top_k, FP32, loud=300)
    problem.check(problem.run(), tolerance=1e-3)


@on_each_device
def test_a_row_without_slots_gives_zeros_whatever_else_it_says(device):
    problem = Problem(device, 2, 1, 16, 270, BF16, num_reqs=4)
    for r, row in ((1, -GARBAGE), (3, GARBAGE)):
        problem.slots.set(r, torch.full((270,), -1, dtype=torch.int32))
        problem.rows.set(r, row)
        problem.qkv.set(r, torch.full(problem.qkv.expected[r].shape, NAN).to(BF16))
    out = problem.run()
    assert not out[[1, 3]].any()
    problem.check(out)


@on_each_device
def test_nan_in_one_head_of_q_is_that_heads_alone(device):
    problem = Problem(device, 6, 2, 16, 9, BF16)
    clean = problem.run()
    problem.qkv.set((0, 4, 3), torch.tensor(NAN).to(BF16))
    out = problem.run()
    assert out[0, 4].isnan().all()
    out[0, 4] = clean[0, 4]
    assert_same_bits(out, clean)


# -- equal bits -----------------------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("top_k", [40, 270])
def test_it_does_not_matter_where_records_lie(device, top_k):
    """Other slots, other request rows, other rows of records; the same records, the same order."""
    problem = Problem(device, 2, 1, 16, top_k, BF16)
    expected = problem.run()
    moved = Problem(device, 2, 1, 16, top_k, BF16, seed=7)
    moved.qkv.set(slice(None), problem.qkv.expected)
    moved.records.set(slice(None), torch.full_like(moved.records.expected, NAN))
    slots = problem.slots.expected
    for r in range(3):
        used = slots[r] >= 0
        there = torch.randperm(moved.slots_per_row, generator=moved.random)[: int(used.sum())]
        old = problem.first_slot.expected[problem.rows.expected[r]] + slots[r][used]
        new = moved.first_slot.expected[moved.rows.expected[r]] + there
        moved.records.set(new, problem.records.expected[old])
        moved.slots.set(r, torch.full((top_k,), -1, dtype=torch.int32))
        moved.slots.set((r, used), there.int())
    assert not torch.equal(moved.slots.expected, slots)
    assert_same_bits(moved.run(), expected)


@on_each_device
@pytest.mark.parametrize("top_k", [40, 270])
def test_it_does_not_matter_who_else_is_in_the_batch(device, top_k):
    problem = Problem(device, 2, 1, 16, top_k, BF16)
    together = problem.run()
    larger = problem.attention(max_requests=5)
    for r in range(3):
        alone = problem.run(larger, slice(r, r + 1))
        assert_same_bits(alone, together[r : r + 1], f"request {r}")


@pytest.mark.parametrize("resident_blocks", [1, None])
def test_it_does_not_matter_in_which_order_threads_and_blocks_run(resident_blocks, monkeypatch):
    """Three splits of two warps, two KV heads, two requests: any block may be the last."""
    monkeypatch.setattr(kernel_module, "MAX_WARPS", 2)
    monkeypatch.setattr(attention, "attention_kernel", attention_kernel.__wrapped__)
    problem = Problem("cpu", 4, 2, 16, 130, FP32, num_reqs=2)
    assert problem.made._made.num_splits == 3 and problem.made._made.num_threads == 64
    expected = problem.run()
    problem.check(expected)
    for seed in range(5):
        with schedule(seed, resident_blocks):
            assert_same_bits(problem.run(), expected, f"seed {seed}")


@on_each_device
def test_it_does_not_matter_how_the_compiler_is_to_use_registers(device):
    problem = Problem(device, 2, 1, 128, 20, BF16)
    expected = problem.run()
    for loads_ahead, resident_threads in ((4, 768), (2, 256)):
        problem.made._made = attention_kernel(
            num_q_heads=2,
            num_kv_heads=1,
            head_dim=128,
            top_k=20,
            dtype="bf16",
            loads_ahead=loads_ahead,
            resident_threads=resident_threads,
        )
        assert_same_bits(problem.run(), expected, f"{loads_ahead} loads ahead")


@on_each_device
def test_calls_in_a_row_share_the_scratch(device):
    """Layers with other records, batches of other sizes: as if each had a scratch of its own."""
    made = Problem(device, 1, 1, 16, 260, BF16).attention(3)
    for seed, num_reqs in enumerate((3, 1, 2)):
        problem = Problem(device, 1, 1, 16, 260, BF16, num_reqs=num_reqs, seed=seed)
        assert_same_bits(problem.run(made), problem.run(), f"call {seed}")


@pytest.mark.gpu
def test_many_requests_give_the_bits_that_each_gives_alone():
    """More blocks than run at once, launched again and again without a wait in between."""
    problem = Problem("cuda", *LARGE[1], num_reqs=16)
    expected = problem.run()
    problem.check(expected)
    q, slots, rows = problem.qkv.actual[:, :32], problem.slots.actual, problem.rows.actual
    out = torch.empty(20, *q.shape, dtype=BF16, device="cuda")
    for layer in out:
        problem.made.attend(
            q, problem.records.actual, slots, problem.first_slot.actual, rows, layer
        )
    for layer in out:
        assert_same_bits(layer.cpu(), expected)
    for r in (0, 7, 15):
        assert_same_bits(problem.run(batch=slice(r, r + 1)), expected[r : r + 1])


@pytest.mark.gpu
def test_records_beyond_4_gib():
    """Two and more billion numbers: the same record is read at both ends of the memory."""
    num_records, width, top_k = 6_000_000, 2 * 3 * 64, 256
    records = torch.full((num_records, width), NAN, dtype=BF16, device="cuda")
    some = torch.randn(top_k, width, device="cuda").to(BF16)
    records[:top_k], records[-top_k:] = some, some
    made = DecodeAttention(
        max_requests=2,
        num_q_heads=9,
        num_kv_heads=3,
        head_dim=64,
        top_k=top_k,
        dtype=BF16,
        device=torch.device("cuda"),
    )
    q = torch.randn(1, 9, 64, device="cuda").to(BF16).repeat(2, 1, 1)
    slots = torch.arange(top_k, dtype=torch.int32, device="cuda").repeat(2, 1)
    first_slot = torch.tensor([0, num_records - top_k], device="cuda")
    out = made.attend(
        q, records, slots, first_slot, torch.tensor([0, 1], device="cuda"), torch.empty_like(q)
    )
    assert not out.isnan().any()
    assert_same_bits(out[1], out[0])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", LARGE[:2])
def test_a_graph_reads_its_inputs_anew_at_every_replay(sizes):
    """Captured without a launch before; other queries, slots, rows and records each time."""
    problems = [Problem("cuda", *sizes, num_reqs=4, seed=seed) for seed in range(4)]
    num_heads, _, head_dim = sizes[:3]
    static = problems[0]
    made = static.attention(4)
    made.load()
    inputs = [twin.actual.clone() for twin in static.inputs]
    qkv, records, slots, first_slot, rows = inputs
    out = torch.full((3, 4, num_heads, head_dim), NAN, dtype=BF16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in out:
            made.attend(qkv[:, :num_heads], records, slots, first_slot, rows, layer)
    assert out.isnan().all()
    for problem in [*problems, static]:
        for tensor, twin in zip(inputs, problem.inputs, strict=True):
            tensor.copy_(twin.actual)
        out.fill_(NAN)
        graph.replay()
        for layer in out:
            assert_same_bits(layer.cpu(), problem.run())
    made.scratch[1].check("after the replays")


# -- what is refused ------------------------------------------------------------------------------

SIZES = {"max_requests": 2, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "top_k": 5}


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"head_dim": 12}, "head_dim=12 in bf16 is 24 bytes: must be a multiple of 16"),
        ({"head_dim": 520}, "head_dim=520 in bf16 is 1040 bytes: .* at most 1024"),
        ({"num_q_heads": 5}, "num_q_heads=5 is not a multiple of num_kv_heads=2"),
        ({"top_k": 0}, "top_k=0.*; all must be at least 1"),
        ({"max_requests": 0}, "max_requests=0.*; all must be at least 1"),
        ({"dtype": torch.float64}, "float64 is not one of"),
    ],
)
def test_sizes_that_are_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        DecodeAttention(**SIZES | {"dtype": BF16, "device": torch.device("cpu")} | changed)


def test_arguments_that_are_refused():
    made = DecodeAttention(**SIZES, dtype=BF16, device=torch.device("cpu"))
    good = {
        "q": torch.zeros(2, 4, 16, dtype=BF16),
        "records": torch.zeros(9, 64, dtype=BF16),
        "slots": ints([[0, 1, 2, 3, -1]] * 2),
        "first_slot": ints([0, 4], torch.int64),
        "req_pool_indices": ints([1, 0], torch.int64),
        "out": torch.full((2, 4, 16), NAN, dtype=BF16),
    }
    for name, tensor, message in (
        ("q", torch.zeros(2, 4, 8, dtype=BF16), r"q is torch.bfloat16 \(2, 4, 8\), expected"),
        ("q", torch.zeros(3, 4, 16, dtype=BF16), "q has 3 rows, more than self.max_requests=2"),
        ("q", torch.zeros(2, 4, 16), "q is torch.float32 .*, expected torch.bfloat16"),
        ("q", torch.zeros(2, 16, 4, dtype=BF16).mT, "q must be contiguous"),
        (
            "q",
            torch.zeros(129, dtype=BF16)[1:].view(2, 4, 16),
            "q: rows do not start at multiples of 16",
        ),
        ("records", torch.zeros(9, 32, dtype=BF16), r"records is .*\(9, 32\), expected .*, 64\)"),
        ("records", torch.zeros(64, 9, dtype=BF16).T, "records must be contiguous"),
        ("slots", good["slots"].long(), "slots is torch.int64 .*, expected torch.int32"),
        ("slots", good["slots"][:1], r"slots is torch.int32 \(1, 5\), expected .*\(2, 5\)"),
        ("first_slot", good["first_slot"].int(), "first_slot is torch.int32"),
        ("first_slot", good["first_slot"][:0], r"first_slot is torch.int64 \(0,\), expected"),
        ("req_pool_indices", good["req_pool_indices"][:1], r"req_pool_indices is .*\(1,\)"),
        ("out", torch.zeros(2, 4, 32, dtype=BF16)[..., :16], "out must be contiguous"),
        ("out", torch.zeros(129, dtype=BF16)[1:].view(2, 4, 16), "out: rows do not start at mult"),
    ):
        with pytest.raises(ValueError, match=message):
            made.attend(**good | {name: tensor})
    assert good["out"].isnan().all()
    made.attend(**good)
    assert not good["out"].any()
    none = {name: good[name][:0] for name in ("q", "slots", "req_pool_indices", "out")}
    assert made.attend(**good | none).shape == (0, 4, 16)


def test_device_bytes_counts_the_scratch():
    sizes = SIZES | {"dtype": BF16, "device": torch.device("cpu")}
    small = DecodeAttention(**sizes)
    assert small.device_bytes == 2 * 2 * 4 + 16  # a ticket per request and KV head, and zeros
    large = DecodeAttention(**sizes | {"top_k": 257})  # two splits of Hq * (D + 2) float32
    assert large.device_bytes == small.device_bytes + 2 * 2 * 4 * (16 + 2) * 4


# -- machine code ---------------------------------------------------------------------------------

SMOLLM2, EIGHT_B = (9, 3, 64, 256, "bf16"), (32, 8, 128, 2048, "bf16")
EIGHT_HEADS = (64, 8, 128, 512, "bf16")  # per KV head: the most that a block can have
COMPILED = [(cc, EIGHT_B, 16 + 16 + 4) for cc in SHARED_BYTES]
COMPILED += [((9, 0), SMOLLM2, 8 + 8 + 4), ((9, 0), EIGHT_HEADS, 16 + 16 + 8)]


def compile_id(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize("cc, sizes, wide", COMPILED, ids=compile_id)
def test_machine_code(cc, sizes, wide, tmp_path):
    """Registers, memory, and loads of K and V that are under way before the first one is used."""
    names = ("num_q_heads", "num_kv_heads", "head_dim", "top_k", "dtype")
    made = attention_kernel(**dict(zip(names, sizes, strict=True)))
    try:
        code = made.kernel.compile(cc)
    except Exception as error:
        if missing_wheel(error):
            pytest.skip(f"{type(error).__name__}: {error}; {PIP}")
        raise
    registers = number(r"Used (\d+) registers", code.log)
    shared = sum(map(int, re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", code.ptx)))
    print(f"\nsm_{cc[0]}{cc[1]} {sizes}: {registers} registers, {shared} bytes shared", end="")
    # With eight heads q or the sums take half of the registers: an address or two may spill, once.
    most = 16 if sizes == EIGHT_HEADS else 0
    assert spilled_bytes(code) <= most and number(r"(\d+) bytes stack frame", code.log) <= most
    assert not re.findall(r"\.f64\b", code.ptx), "float64"
    assert not re.findall(r"\.local\b", code.ptx), "local memory"
    assert registers * RESIDENT_THREADS <= REGISTERS, "fewer blocks at a time than it says"
    assert shared <= 48 * 1024 and shared < 43_100
    loads = re.findall(r"ld\.global\.(v4\.u32|u32)", code.ptx)
    assert loads.count("u32") == 1  # a slot
    assert loads.count("v4.u32") == wide  # the steps of K and of V, and the heads of q
    order = re.findall(r"\b(st\.global\.f32|bar\.sync|atom\.\S+|ld\.global\.f32)", code.ptx)
    if made.num_splits == 1:
        assert order == ["bar.sync"] * 2
    else:  # all threads have written their block's sums, and none reads another's before
        at = next(i for i, word in enumerate(order) if word.startswith("atom"))
        assert order[at] == "atom.acq_rel.gpu.global.inc.u32"
        assert order[at - 2 : at] + order[at + 1 : at + 3] == [
            "st.global.f32",
            "bar.sync",
            "bar.sync",
            "ld.global.f32",
        ]

    sass = machine_code(code.cubin, tmp_path)
    assert len(re.findall(r"\b(?:LDL|STL)\b", sass)) <= most / 4, "local memory"
    assert not re.findall(r"\b(?:DADD|DMUL|DFMA|DSETP)\b", sass), "float64"
    order = re.findall(r"\b(LDG\.E\.128\S*|FFMA|FMUL)\b", sass)
    assert sum(word.startswith("LDG") for word in order) == wide
    assert order.index("FMUL") >= 8, "each load waits for the one before"
