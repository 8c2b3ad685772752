"""Guards: codes of 8 bits that differ from torch.float8_e4m3fn's: order in the word, subnormals,
ties, signs, what is too large."""

import pytest
import torch
from rig import assert_same_bits

from minihisparse.kernels.device import DEVICE_ADDRESS, cuda, float32, int64, kernel, ld4, st4
from minihisparse.kernels.e4m3 import E4M3_UNIT, pack_e4m3, unpack_e4m3

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
THREADS = 64


@kernel(max_threads=THREADS)
def unpack_all(words: DEVICE_ADDRESS, values: float32[::1], count: int64):
    i = int64(cuda.threadIdx.x)
    while i < count:
        a, b, c, d = unpack_e4m3(ld4(words + 4 * i))
        values[4 * i] = a * float32(E4M3_UNIT)
        values[4 * i + 1] = b * float32(E4M3_UNIT)
        values[4 * i + 2] = c * float32(E4M3_UNIT)
        values[4 * i + 3] = d * float32(E4M3_UNIT)
        i += THREADS


@kernel(max_threads=THREADS)
def pack_all(values: float32[::1], words: DEVICE_ADDRESS, count: int64):
    i = int64(cuda.threadIdx.x)
    while i < count:
        word = pack_e4m3(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3])
        st4(words + 4 * i, word)
        i += THREADS


def all_codes() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("device", DEVICES)
def test_all_codes(device):
    values = torch.full((256,), torch.nan, device=device)
    unpack_all.launch(1, THREADS, all_codes().to(device), values, 64)
    expected = all_codes().float()
    expected[0x7F], expected[0xFF] = 480, -480  # in place of NaN
    assert_same_bits(values.cpu(), expected)


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_is_torchs(device):
    """Codes, all that is half-way between two of them, their neighbours, and random numbers."""
    codes = all_codes().float()[:0x7F]
    halfway = (codes[1:] + codes[:-1]) / 2
    near = [halfway.nextafter(torch.tensor(limit)) for limit in (0.0, 1e9)]
    some = torch.randn(600, generator=torch.Generator().manual_seed(0)) * 40
    edges = torch.tensor([448.0, 447.9, 464.0, 1e30, torch.inf, 1e-40, 2**-10, 2**-11])
    values = torch.cat([codes, halfway, *near, some, edges])
    values = torch.cat([values, -values])
    values = torch.cat([values, torch.zeros(-len(values) % 4)])
    packed = torch.full((len(values),), 0xFF, dtype=torch.uint8, device=device)
    pack_all.launch(1, THREADS, values.to(device), packed, len(values) // 4)
    expected = values.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert_same_bits(packed.cpu(), expected.view(torch.uint8))


def test_nan_is_no_code():
    values, packed = torch.full((4,), torch.nan), torch.zeros(4, dtype=torch.uint8)
    pack_all.launch(1, THREADS, values, packed, 1)
    assert ((packed & 0x7F) == 0x7E).all()  # who can have NaN keeps it elsewhere
