"""Guards: numbers that torch's operations would not give: a half or a sign swapped, a rounding left
out, a norm over the wrong numbers, silu at its ends. Rows, heads or v that a launch should leave
alone; results that depend on the order of threads or on the rest of the batch; odd sizes; float64
or spills in the machine code.

Tolerances: `hidden` of add_rms_norm and 16-bit rope without a norm have torch's bits. Elsewhere a
few numbers are one ulp off where they are rounded; the next product can turn that into two. fp32:
1e-5 of a number, for sums in another order, and for exp2, which is least exact at its ends.
"""

import pytest
import torch
import torch.nn.functional as F
from kernel_rig import Twin, schedule
from rig import assert_same_bits, difference
from test_kernels_compile import PIP, SHARED_BYTES, missing_wheel, number, spilled_bytes

from minihisparse.kernels.numbers import DTYPE_NAMES
from minihisparse.kernels.pointwise import (
    add_rms_norm,
    add_rms_norm_kernel,
    rope,
    rope_kernel,
    silu_mul,
    silu_mul_kernel,
)
from minihisparse.rope import RopeConfig, apply_rope, rope_table

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
GPU_ONLY = pytest.mark.gpu
EPS, MAX_LEN = 1e-5, 50
every_device = pytest.mark.parametrize("device", DEVICES)
every_dtype = pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)


def on_gpu(*sizes):
    """Sizes that a simulation would take too long for."""
    return pytest.param("cuda", *sizes, marks=GPU_ONLY)


def random(*shape, dtype=FP32, seed=0, scale=1.0):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def ordered(tensor):
    """Integers that count a tensor's numbers in their order: neighbours are one ulp apart."""
    kind, sign = (torch.int32, 1 << 31) if tensor.dtype == FP32 else (torch.int16, 1 << 15)
    bits = tensor.contiguous().view(kind).long()
    return torch.where(bits < 0, -(bits + sign), bits)


def assert_near(actual, expected, ulps=1, rarely=0.03):
    """At most `ulps` off in 16 bits, and at most that share of the numbers; 1e-5 in fp32."""
    actual, nan = actual.cpu(), expected.isnan()
    assert torch.equal(actual.isnan(), nan), difference(actual, expected)
    actual, expected = actual[~nan], expected[~nan]
    if expected.dtype == FP32:
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-37)
        return
    off = (ordered(actual) - ordered(expected)).abs()
    assert off.max() <= ulps, f"{off.max()} ulp; {difference(actual, expected)}"
    assert (off > 0).sum() <= max(1, rarely * off.numel()), difference(actual, expected)


# ---- rope -----------------------------------------------------------------------------------


def table_of(head_dim, dtype):
    return rope_table(RopeConfig(), head_dim, MAX_LEN).to(dtype)


def rope_reference(qkv, positions, table, num_kv_heads, norm_weight=None):
    """What the decoder does; v as it is. Also how large the two numbers of each result are."""
    qk, v = qkv.split([qkv.shape[1] - num_kv_heads, num_kv_heads], dim=1)
    if norm_weight is not None:
        qk = F.rms_norm(qk, (qkv.shape[-1],), None, EPS) * norm_weight
    cos, sin = table.index_select(0, positions).unbind(1)
    size = qk.abs() + qk.roll(qk.shape[-1] // 2, -1).abs()
    return torch.cat([apply_rope(qk, cos, sin), v], dim=1), size.double()


ROPE_SIZES = [  # T, Hq, Hkv, D
    (1, 9, 3, 64),
    (5, 2, 1, 32),
    (3, 3, 2, 80),  # five pieces in eight lanes
    (7, 6, 2, 8),  # a 16-bit half of 8 bytes
    (2, 2, 1, 24),
    (2, 1, 1, 256),
]
ROPE_CASES = [("cpu", *sizes) for sizes in ROPE_SIZES] + [
    on_gpu(*sizes) for sizes in [*ROPE_SIZES, (300, 9, 3, 64), (77, 32, 8, 128), (2048, 2, 2, 256)]
]


@every_dtype
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
@pytest.mark.parametrize("device, tokens, q_heads, kv_heads, head_dim", ROPE_CASES)
def test_rope(device, tokens, q_heads, kv_heads, head_dim, norm, dtype):
    heads = q_heads + 2 * kv_heads
    qkv = random(tokens, heads, head_dim, dtype=dtype, scale=3)
    positions = torch.randint(MAX_LEN, (tokens,), generator=torch.Generator().manual_seed(1))
    table = table_of(head_dim, dtype)
    weight = 1 + random(heads - kv_heads, head_dim, dtype=dtype, scale=0.2) if norm else None
    expected, size = rope_reference(qkv, positions, table, kv_heads, weight)
    place = torch.device(device)
    twin = Twin("qkv", qkv, place)
    weight = weight.to(device) if norm else None
    rope(twin.actual, positions.to(device), table.to(device), kv_heads, weight, EPS)
    twin.expected.copy_(expected)
    actual = twin.actual.cpu()
    assert_same_bits(actual[:, -kv_heads:], qkv[:, -kv_heads:], "v")
    if not norm and dtype != FP32:
        twin.check()
        return
    # Cancellation: an ulp of the two numbers can be many of their difference.
    off = (actual - expected)[:, :-kv_heads].double().abs()
    ulps = 5 if dtype == FP32 and place.type == "cuda" else 2  # the GPU's own rsqrt has 2 more
    assert bool((off <= ulps * torch.finfo(dtype).eps * size).all()), difference(actual, expected)
    if dtype != FP32:
        assert (off > 0).sum() <= 0.03 * off.numel(), difference(actual, expected)
    twin.forgive()
    twin.check()


@every_device
def test_rope_leaves_tokens_without_a_position(device):
    qkv = random(4, 4, 64, dtype=BF16)
    positions = torch.tensor([-1, 7, MAX_LEN, MAX_LEN - 1])
    table = table_of(64, BF16)
    twin = Twin("qkv", qkv, torch.device(device))
    rope(twin.actual, positions.to(device), table.to(device), 1)
    right, _ = rope_reference(qkv[1::2], positions[1::2], table, 1)
    twin.expected[1::2] = right
    twin.check()


# ---- add_rms_norm ---------------------------------------------------------------------------

NORM_SIZES = [(1, 576), (3, 48), (2, 8), (2, 264), (1, 4104)]  # T, H
NORM_CASES = [("cpu", *sizes) for sizes in NORM_SIZES] + [
    on_gpu(*sizes) for sizes in [*NORM_SIZES, (2048, 576), (300, 4096), (33, 16_384)]
]


@every_dtype
@pytest.mark.parametrize("with_delta", [True, False], ids=["add", "plain"])
@pytest.mark.parametrize("device, tokens, size", NORM_CASES)
def test_add_rms_norm(device, tokens, size, with_delta, dtype):
    check_add_rms_norm(device, tokens, size, with_delta, dtype)


def test_add_rms_norm_of_the_longest_row():
    check_add_rms_norm("cpu", 1, 16_384, True, FP32)


def check_add_rms_norm(device, tokens, size, with_delta, dtype):
    place = torch.device(device)
    hidden = random(tokens, size, dtype=dtype, scale=5)
    delta = Twin("delta", random(tokens, size, dtype=dtype, seed=1), place)
    weight = Twin("weight", 1 + random(size, dtype=dtype, seed=2, scale=0.1), place)
    twin = Twin("hidden", hidden, place)
    out = Twin("out", torch.full((tokens, size), torch.nan, dtype=dtype), place)
    add_rms_norm(twin.actual, delta.actual if with_delta else None, weight.actual, EPS, out.actual)
    if with_delta:
        twin.expected.add_(delta.expected)
    expected = F.rms_norm(twin.expected, (size,), weight.expected, EPS)
    for unchanged_or_equal in (twin, delta, weight):
        unchanged_or_equal.check()
    assert_near(out.actual, expected)
    out.forgive()
    out.check()


@every_device
@every_dtype
def test_add_rms_norm_of_zeros_and_of_nan(device, dtype):
    hidden = torch.zeros(3, 64, dtype=dtype)
    hidden[1, 5], hidden[2, 7] = torch.nan, 1000
    out = torch.full_like(hidden, 9).to(device)
    add_rms_norm(hidden.to(device), None, torch.ones(64, dtype=dtype, device=device), EPS, out)
    assert_near(out, F.rms_norm(hidden, (64,), None, EPS))


# ---- silu_mul -------------------------------------------------------------------------------

SILU_SIZES = [(1, 1536), (3, 64), (5, 8), (2, 1032)]  # T, I
SILU_CASES = [("cpu", *sizes) for sizes in SILU_SIZES] + [
    on_gpu(*sizes) for sizes in [*SILU_SIZES, (2048, 1536), (100, 14_336)]
]


@every_dtype
@pytest.mark.parametrize("device, tokens, size", SILU_CASES)
def test_silu_mul(device, tokens, size, dtype):
    place = torch.device(device)
    gate_up = Twin("gate_up", random(tokens, 2 * size, dtype=dtype, scale=4), place)
    out = Twin("out", torch.full((tokens, size), torch.nan, dtype=dtype), place)
    silu_mul(gate_up.actual, out.actual)
    gate, up = gate_up.expected.chunk(2, dim=-1)
    assert_near(out.actual, F.silu(gate) * up, ulps=2)
    out.forgive()
    for twin in (gate_up, out):
        twin.check()


@every_device
@every_dtype
def test_silu_at_its_ends(device, dtype):
    ends = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-7, -1e-7, -20, -60, -86, -88, -200]
    gate = torch.tensor([*ends, 90.0, 3e4, -3e4, 1e-40]).to(dtype)
    gate_up = torch.stack([torch.cat([gate, torch.full_like(gate, x)]) for x in (1, -3)])
    out = torch.empty(2, 16, dtype=dtype, device=device)
    silu_mul(gate_up.to(device), out)
    expected = F.silu(gate) * gate_up[:, 16:]
    assert_near(out, expected, ulps=2, rarely=0.1)
    zero = expected == 0
    assert torch.equal(out.cpu()[zero].signbit(), expected[zero].signbit())


# ---- any order of threads, any batch, in a CUDA graph ---------------------------------------


class Step:
    """Tensors of T tokens on a device, and all three operations on them."""

    def __init__(self, tokens, device):
        self.table, self.weight = table_of(64, BF16).to(device), random(800, dtype=BF16).to(device)
        self.norm_weight = random(4, 64, dtype=BF16).to(device)
        self.qkv = torch.zeros(tokens, 5, 64, dtype=BF16, device=device)
        self.hidden = torch.zeros(tokens, 800, dtype=BF16, device=device)
        self.delta, self.out = torch.zeros_like(self.hidden), torch.zeros_like(self.hidden)
        self.product = torch.zeros(tokens, 400, dtype=BF16, device=device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)

    def run(self):
        rope(self.qkv, self.positions, self.table, 1, self.norm_weight, EPS)
        add_rms_norm(self.hidden, self.delta, self.weight, EPS, self.out)
        silu_mul(self.out, self.product)

    def __call__(self, seed, run=None, rows=slice(None)):
        """Those rows of random inputs, `run` on them; the results."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in (self.qkv, self.hidden, self.delta):
            tensor.copy_(torch.randn(5, *tensor.shape[1:], generator=generator)[rows])
        self.positions.copy_(torch.randint(MAX_LEN, (5,), generator=generator)[rows])
        for tensor in (self.out, self.product):
            tensor.fill_(torch.nan)
        (run or self.run)()
        return [x.cpu().clone() for x in (self.qkv, self.hidden, self.out, self.product)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_order_of_threads_does_not_matter(seed):
    step = Step(5, "cpu")
    expected = step(0)
    with schedule(seed):
        shuffled = step(0)
    for some, right in zip(shuffled, expected, strict=True):
        assert_same_bits(some, right)


@every_device
def test_a_token_alone_and_in_a_batch(device):
    alone = Step(1, device)(0, rows=slice(3, 4))
    for one, all_five in zip(alone, Step(5, device)(0), strict=True):
        assert_same_bits(one[0], all_five[3])


@pytest.mark.gpu
def test_graph_replay():
    """Captured once, replayed with other numbers and positions: as when called."""
    step = Step(5, "cuda")
    step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for seed in range(5):
        for replayed, called in zip(step(seed, graph.replay), step(seed), strict=True):
            assert_same_bits(replayed, called, f"seed {seed}")


@every_device
def test_no_tokens(device):
    empty = torch.empty(0, 16, device=device)
    rope(torch.empty(0, 3, 16, device=device), torch.empty(0, device=device), table_of(16, FP32), 1)
    add_rms_norm(empty, None, torch.ones(16, device=device), EPS, empty)
    silu_mul(torch.empty(0, 32, device=device), empty)


# ---- what is refused ------------------------------------------------------------------------


def test_wrong_arguments():
    table, positions = table_of(64, FP32), torch.zeros(2, dtype=torch.int64)
    qkv = random(2, 5, 64)
    with pytest.raises(ValueError, match=r"qkv is \(2, 64\), expected 3 dimensions"):
        rope(qkv[:, 0], positions, table, 1)
    with pytest.raises(ValueError, match="qkv must be contiguous"):
        rope(random(2, 6, 64)[:, :5], positions, table, 1)
    with pytest.raises(ValueError, match="qkv has 5 heads, too few for num_kv_heads=3"):
        rope(qkv, positions, table, 3)
    with pytest.raises(
        ValueError, match=r"table is torch.float32 \(50, 2, 1, 64\), expected torch.b"
    ):
        rope(qkv.bfloat16(), positions, table, 1)
    with pytest.raises(ValueError, match=r"norm_weight .* expected torch.float32 \(4, 64\)"):
        rope(qkv, positions, table, 1, random(5, 64))
    with pytest.raises(ValueError, match=r"positions is \(3,\), expected \(2,\)"):
        rope(qkv, torch.zeros(3, dtype=torch.int64), table, 1)
    with pytest.raises(TypeError, match="positions must be torch.int64"):
        rope(qkv, positions.int(), table, 1)
    with pytest.raises(ValueError, match="multiples of 16 bytes"):
        rope(random(2, 5, 62), positions, table_of(62, FP32), 1)
    with pytest.raises(ValueError, match="a head of 2048 bytes is more than 1024"):
        rope(random(2, 3, 512), positions, table_of(512, FP32), 1)
    with pytest.raises(ValueError, match="hidden: rows of 12 bytes"):
        add_rms_norm(random(2, 3), None, random(3), EPS, random(2, 3))
    with pytest.raises(ValueError, match="must be multiples of 16 bytes"):
        add_rms_norm(random(9)[1:].view(1, 8), None, random(8), EPS, random(1, 8))
    with pytest.raises(ValueError, match="hidden_size=16388 is more than 16384"):
        add_rms_norm(random(1, 16_388), None, random(16_388), EPS, random(1, 16_388))
    with pytest.raises(ValueError, match=r"delta is .* \(2, 8\), expected torch.float32 \(1, 8\)"):
        add_rms_norm(random(1, 8), random(2, 8), random(8), EPS, random(1, 8))
    with pytest.raises(ValueError, match="float64 is not one of: bf16, fp16, fp32"):
        add_rms_norm(*[random(1, 8).double()] * 3, EPS, random(1, 8).double())
    with pytest.raises(
        ValueError, match=r"gate_up is .* \(1, 8\), expected torch.float32 \(1, 16\)"
    ):
        silu_mul(random(1, 8), random(1, 8))


# ---- machine code ---------------------------------------------------------------------------

KERNELS = {  # name -> kernel, 16-byte loads and stores in it
    "rope_8b": (rope_kernel("bf16", 32, 8, 128, False, 0.0)[0], 4, 2),
    "rope_norm": (rope_kernel("fp16", 32, 8, 128, True, EPS)[0], 6, 2),
    "rope_fp32": (rope_kernel("fp32", 4, 2, 256, True, EPS)[0], 6, 2),
    "rope_narrow": (rope_kernel("bf16", 6, 2, 8, True, EPS)[0], 0, 0),
    "norm_576": (add_rms_norm_kernel("bf16", 576, True, EPS), 3, 2),
    "norm_4096": (add_rms_norm_kernel("bf16", 4096, True, EPS), 3, 2),
    "norm_plain": (add_rms_norm_kernel("fp16", 4096, False, EPS), 2, 1),
    "norm_largest": (add_rms_norm_kernel("fp32", 16_384, True, EPS), 24, 16),
    "silu_bf16": (silu_mul_kernel("bf16", 14_336)[0], 2, 1),
    "silu_fp32": (silu_mul_kernel("fp32", 1536)[0], 2, 1),
}


EVERYWHERE = ("rope_norm", "norm_4096", "norm_largest", "silu_bf16")  # the others: for sm_90
CODES = [
    (cc, name) for name in KERNELS for cc in SHARED_BYTES if name in EVERYWHERE or cc == (9, 0)
]


@pytest.mark.parametrize("cc, name", CODES, ids=lambda x: x if x in KERNELS else f"sm_{x[0]}{x[1]}")
def test_machine_code(cc, name):
    kernel, loads, stores = KERNELS[name]
    try:
        code = kernel.compile(cc)
    except Exception as error:
        if missing_wheel(error):
            pytest.skip(f"{type(error).__name__}: {error}; {PIP}")
        raise
    registers = number(r"Used (\d+) registers", code.log)
    print(
        f"\nsm_{cc[0]}{cc[1]} {name}: {registers} registers, {kernel.max_threads} threads", end=""
    )
    assert spilled_bytes(code) == 0
    assert number(r"(\d+) bytes stack frame", code.log) == 0
    assert registers * kernel.max_threads <= 65_536
    assert ".f64" not in code.ptx and ".local" not in code.ptx and "div." not in code.ptx
    assert code.ptx.count("ld.global.v4.u32") == loads
    assert code.ptx.count("st.global.v4.u32") == stores
