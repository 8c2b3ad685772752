"""Guards: index keys with a wrong norm, rotation or rounding, of the wrong number, row or position;
keys and scales that land in another slot or beside one; angles that are wrong far out; kernels that
spill or count in float64.

The oracle is the rule in torch, float32 in the kernel's order: simulated keys must have its bits.
On a GPU a product and a sum may be one instruction, so there a few numbers are the next ones.
"""

import math
import re

import pytest
import torch
from rig import assert_same_bits, difference
from test_kernels_compile import REGISTERS, SHARED_BYTES, machine_code, number, spilled_bytes
from test_top_k import compile_or_skip, generator
from torch import Tensor

from minihisparse.kernels.index_keys import KEY_THREADS, prompt_key_kernel
from minihisparse.kernels.lightning_indexer import LightningIndexer
from minihisparse.kernels.numbers import DTYPE_NAMES
from minihisparse.rope import rope_angles

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
STATES = [(BF16, BF16), (FP16, FP16), (FP32, FP32), (BF16, E4M3), (FP32, E4M3)]
STEP = {BF16: 2**-7, FP16: 2**-10, FP32: 2**-19, E4M3: 2**-2}  # of neighbouring numbers, relative


def ordered_sum(x: Tensor) -> Tensor:
    """[..., d] -> [..., 1]: in fours, then halves of the row."""
    a, b, c, d = x.unflatten(-1, (-1, 4)).unbind(-1)
    x = (a + b) + (c + d)
    while x.shape[-1] > 1:
        x = x[..., : x.shape[-1] // 2] + x[..., x.shape[-1] // 2 :]
    return x


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """x [T, ..., d] float32; angles [T, 2, rope_dim / 2]."""
    half = angles.shape[2]
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), 2, half)
    cos, sin = angles.unbind(-2)
    low, high = x[..., :half], x[..., half : 2 * half]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, x[..., 2 * half :]], -1)


def expected_keys(
    x: Tensor, gain: Tensor, bias: Tensor, angles: Tensor, state_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x [T, d], angles [T, 2, rope_dim / 2]: keys [T, d], and their scales [T]; 1 without any."""
    x = x.float()
    x = x - ordered_sum(x) / x.shape[1]
    variance = ordered_sum(x * x) / x.shape[1]
    root = (variance + 1e-6).double().sqrt().float()  # torch's root of float32 is not the nearest
    x = x * (1 / root) * gain.float() + bias.float()
    x = rotated(x, angles)
    if state_dtype != E4M3:
        return x.to(state_dtype), torch.ones(len(x))
    scales = x.abs().amax(dim=1) / 448
    codes = torch.where(scales[:, None] > 0, x / scales[:, None], 0)
    return codes.to(E4M3), scales


def assert_keys(actual: Tensor, expected: Tensor, what: str, exact: bool) -> None:
    """Keys or scales: the same bits, or hardly any that are a step away."""
    if exact or not len(actual):
        assert_same_bits(actual, expected, what)
        return
    delta = (actual.float() - expected.float()).abs()
    most = expected.float().abs() * STEP[actual.dtype] + expected.float().abs().max() * 1e-6
    if actual.dtype == E4M3:
        most += 2**-9
    few = actual.dtype == FP32 or (delta > 0).sum() <= 2 + delta.numel() / 100
    assert few and (delta <= most).all(), f"{what}: {difference(actual, expected)}"


class Layer:
    """An indexer, weights of one layer, and a state of two layers in which nobody wrote."""

    def __init__(
        self,
        *,
        num_slots: int,
        device: str,
        dtype: torch.dtype = BF16,
        state_dtype: torch.dtype = BF16,
        seed: int = 0,
        **sizes: object,
    ):
        defaults = {"max_requests": 4, "max_model_len": 100, "num_heads": 4, "head_dim": 16}
        defaults |= {"rope_dim": 8, "rope_theta": 1e4, "num_sinks": 2, "num_recent": 3, "top_k": 16}
        self.sizes = defaults | sizes
        self.device, self.exact = device, device == "cpu"
        self.dtype, self.state_dtype = dtype, state_dtype
        self.generator = generator(seed)
        self.indexer = LightningIndexer(
            **self.sizes, dtype=dtype, state_dtype=state_dtype, device=torch.device(device)
        )
        self.indexer.load()
        d = self.sizes["head_dim"]
        shape = (2, num_slots, d)
        whole = torch.full(shape, torch.nan, device=device).to(state_dtype)
        self.layers, self.keys = whole, whole[1]
        self.all_scales, self.scales = torch.full(shape[:2], torch.nan, device=device), None
        if state_dtype == E4M3:
            self.scales = self.all_scales[1]
        self.gain = (1 + self.normal(d) / 4).to(dtype).to(device)
        self.bias = (self.normal(d) / 4).to(dtype).to(device)
        self.angles = self.indexer.angles.cpu()

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def product(self, num_rows: int) -> Tensor:
        """p [T, W], with NaN beside each row."""
        width = self.indexer.product_width
        p = torch.full((num_rows, width + 10 + width % 2), torch.nan, dtype=self.dtype)
        p[:, :width] = (self.normal(num_rows, width) * 2 + 1).to(self.dtype)
        return p.to(self.device)[:, : width + width % 2]

    def x_of(self, p: Tensor) -> Tensor:
        """The columns of wk."""
        first = self.sizes["num_heads"] * self.sizes["head_dim"]
        return p[:, first : first + self.sizes["head_dim"]].cpu()

    def expected(self, p: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        arguments = self.x_of(p), self.gain.cpu(), self.bias.cpu(), self.angles[positions]
        return expected_keys(*arguments, self.state_dtype)

    def snapshot(self) -> tuple[Tensor, Tensor]:
        return self.layers.cpu().clone(), self.all_scales.cpu().clone()

    def check(self, before: tuple[Tensor, Tensor], slots: Tensor, keys: Tensor, scales: Tensor):
        """In layer 1 these slots have these keys, and nothing else has changed."""
        (layers, all_scales), (old_layers, old_scales) = self.snapshot(), before
        assert_keys(layers[1, slots], keys, "keys", self.exact)
        old_layers[1, slots] = layers[1, slots]
        if self.scales is not None:
            assert_keys(all_scales[1, slots], scales, "scales", self.exact)
            old_scales[1, slots] = all_scales[1, slots]
        assert_same_bits(layers, old_layers, "other keys")
        assert_same_bits(all_scales, old_scales, "other scales")

    def write_prompt(self, first_slot: int, first_position: int, p: Tensor) -> None:
        before = self.snapshot()
        self.indexer.write_prompt(
            self.keys, self.scales, first_slot, first_position, p, self.gain, self.bias
        )
        positions = torch.arange(first_position, first_position + len(p))
        self.check(before, first_slot + positions, *self.expected(p, positions))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, state_dtype", STATES)
@pytest.mark.parametrize("head_dim, rope_dim", [(16, 16), (32, 6), (64, 32), (128, 2)])
def test_prompts(head_dim, rope_dim, dtype, state_dtype, device):
    """One key, a block of them less one and more, at a chunk's start, up to the last slot."""
    sizes = {"head_dim": head_dim, "rope_dim": rope_dim, "dtype": dtype}
    layer = Layer(num_slots=103, device=device, state_dtype=state_dtype, **sizes)
    per_block = KEY_THREADS * 4 // head_dim
    layer.write_prompt(3, 0, layer.product(1))
    layer.write_prompt(3, 100 - per_block - 1, layer.product(per_block + 1))
    layer.write_prompt(20, 7, layer.product(per_block - 1))


@pytest.mark.parametrize("device", DEVICES)
def test_the_rule_in_other_words(device):
    """Against torch's layer_norm and complex numbers, so that the oracle is right too."""
    layer = Layer(num_slots=99, device=device, dtype=FP32, state_dtype=FP32)
    p, d, half = layer.product(60), 16, 4
    layer.write_prompt(0, 30, p)
    x = layer.x_of(p).double()
    gain, bias = layer.gain.cpu().double(), layer.bias.cpu().double()
    x = torch.nn.functional.layer_norm(x, (d,), gain, bias, eps=1e-6)
    angle = torch.arange(30.0, 90.0, dtype=torch.float64)[:, None] * 1e4 ** -(
        torch.arange(half) / half
    )
    turned = torch.complex(x[:, :half], x[:, half : 2 * half]) * torch.exp(1j * angle)
    x = torch.cat([turned.real, turned.imag, x[:, 2 * half :]], dim=1)
    torch.testing.assert_close(layer.keys[30:90].cpu().double(), x, rtol=0, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("state_dtype", [BF16, E4M3])
def test_rows_of_one_number_and_nan(state_dtype, device):
    """No variance: the bias alone. With that zero too, the scale is 0. A NaN is in all of a key."""
    layer = Layer(num_slots=8, device=device, state_dtype=state_dtype)
    p = layer.product(3)
    p[0] = 3.0
    p[1, layer.sizes["num_heads"] * 16 + 5] = torch.nan
    layer.indexer.write_prompt(layer.keys, layer.scales, 0, 0, p, layer.gain, layer.bias)
    layer.indexer.write_prompt(layer.keys, layer.scales, 4, 0, p[:1], layer.gain, layer.bias * 0)
    keys = layer.keys.float()
    if layer.scales is not None:
        keys = keys * layer.scales[:, None]
        assert layer.scales[4] == 0
    assert torch.allclose(keys[0], layer.bias.float(), rtol=0.07)
    assert (keys[4] == 0).all()
    assert keys[1].isnan().all() and not keys[2].isnan().any()


@pytest.mark.parametrize("rope_dim, theta", [(2, 1e4), (32, 1e5), (6, 500.0)])
def test_angles(rope_dim, theta):
    table = rope_angles(70_000, rope_dim, theta, torch.device("cpu"))
    assert table.shape == (70_000, 2, rope_dim // 2) and table.dtype == FP32
    for position in (0, 1, 4097, 65_535, 65_536, 69_999):
        for j in range(rope_dim // 2):
            angle = position * theta ** (-2 * j / rope_dim)
            assert table[position, 0, j].item() == pytest.approx(math.cos(angle), abs=1e-7)
            assert table[position, 1, j].item() == pytest.approx(math.sin(angle), abs=1e-7)


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [BF16, E4M3])
def test_long_prompts(state_dtype):
    sizes = {"max_model_len": 200_000, "head_dim": 64, "rope_dim": 32}
    layer = Layer(num_slots=200_003, device="cuda", state_dtype=state_dtype, **sizes)
    layer.write_prompt(3, 0, layer.product(100_000))
    layer.write_prompt(3, 100_000, layer.product(100_000))


def test_prompts_that_are_refused():
    layer = Layer(num_slots=103, device="cpu")
    p = layer.product(5)
    write, rest = layer.indexer.write_prompt, (p, layer.gain, layer.bias)
    for first_slot, first_position, message in [
        (3, 96, r"positions 96..100 are not in 0..99"),
        (3, -1, r"positions -1..3"),
        (50, 49, r"slots 99..103 are not all among the 103"),
        (-1, 3, r"slots 2..6"),
    ]:
        with pytest.raises(ValueError, match=message):
            write(layer.keys, None, first_slot, first_position, *rest)
    before = layer.snapshot()
    write(layer.keys, None, 3, 100, p[:0], layer.gain, layer.bias)
    assert_same_bits(layer.layers, before[0])


CASES = [(cc, "bf16", state, 64, 32) for cc in SHARED_BYTES for state in ("bf16", "e4m3")]
CASES += [((9, 0), "fp16", "fp16", 128, 128), ((9, 0), "fp32", "fp32", 16, 6)]


@pytest.mark.parametrize("cc, dtype, state, head_dim, rope_dim", CASES)
def test_machine_code(cc, dtype, state, head_dim, rope_dim, tmp_path):
    kernel = prompt_key_kernel(dtype=dtype, state=state, head_dim=head_dim, rope_dim=rope_dim)
    code = compile_or_skip(kernel, cc)
    registers = number(r"Used (\d+) registers", code.log)
    print(f"\nsm_{cc[0]}{cc[1]} index_keys {dtype} {state}: {registers} registers", end="")
    assert spilled_bytes(code) == 0
    assert number(r"(\d+) bytes stack frame", code.log) == 0
    assert registers * KEY_THREADS <= REGISTERS // 4
    assert not re.findall(r"\.f64\b", code.ptx), "float64"
    assert not re.findall(r"\.(?:local|shared)\b", code.ptx), "local or shared memory"
    # All loads are under way before the first sum.
    first_sum = code.ptx.index("shfl.sync")
    assert code.ptx.rindex("ld.global.u32") < first_sum
    assert len(re.findall(r"ld\.global\.u32", code.ptx[:first_sum])) >= 32
    if cc == (9, 0):
        sass = machine_code(code.cubin, tmp_path)
        assert not re.findall(r"\b(?:LDL|STL|DADD|DMUL|DFMA|DSETP)\b", sass)


assert set(DTYPE_NAMES) == {BF16, FP16, FP32}  # all are in STATES
