"""Guards: numbers that kernels read or write differ from torch's: rounding, halves swapped, NaN,
infinities, subnormals, negative zero."""

import pytest
import torch

from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    cuda,
    float32,
    int64,
    kernel,
    ld4,
    st4,
)
from minihisparse.kernels.numbers import (
    DTYPE_NAMES,
    NUMBERS_PER_WORD,
    dtype_name,
    number_functions,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
EDGES = [0.0, -0.0, 1.0, 1.0 + 2**-8, 1.0 + 2**-9, 1.0 + 3 * 2**-9]
EDGES += [65504.0, 1e30, -1e30, 6e-8, 1e-40]


def copy_kernel(name):
    """Unpacks each word into floats, and packs floats into words."""
    unpack, pack = number_functions(name)
    PER_WORD = NUMBERS_PER_WORD[name]

    @kernel(max_threads=32)
    def convert(words: DEVICE_ADDRESS, values: float32[::1], packed: DEVICE_ADDRESS, count: int64):
        i = int64(cuda.threadIdx.x)
        while i < count:
            low, high = unpack(ld4(words + 4 * i))
            values[PER_WORD * i] = low
            if PER_WORD == 2:
                values[2 * i + 1] = high
            st4(packed + 4 * i, pack(low, high))
            i += 32

    return convert


def rounding_kernel(name):
    _, pack = number_functions(name)
    PER_WORD = NUMBERS_PER_WORD[name]

    @kernel(max_threads=32)
    def convert(values: float32[::1], packed: DEVICE_ADDRESS, count: int64):
        i = int64(cuda.threadIdx.x)
        while i < count:
            st4(packed + 4 * i, pack(values[PER_WORD * i], values[PER_WORD * i + PER_WORD - 1]))
            i += 32

    return convert


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
def test_words_are_torchs_numbers(dtype, device):
    numbers = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 100
    numbers[: len(EDGES)] = torch.tensor(EDGES)
    numbers[20:23] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    numbers = numbers.to(dtype)
    there = numbers.to(device)
    values = torch.empty(64, device=device)
    packed = torch.empty_like(there)
    count = 64 // NUMBERS_PER_WORD[dtype_name(dtype)]
    copy_kernel(dtype_name(dtype)).launch(1, 32, there, values, packed, count)
    torch.testing.assert_close(values.cpu(), numbers.float(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(packed.cpu(), numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=DTYPE_NAMES.get)
def test_rounding_is_torchs(dtype, device):
    values = torch.randn(256, generator=torch.Generator().manual_seed(1)) * 10
    values[: len(EDGES)] = torch.tensor(EDGES)
    values[100:103] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    values[200:202] = torch.tensor([3.4e38, -3.4e38])  # rounds to infinity in 16 bits
    packed = torch.empty(256, dtype=dtype, device=device)
    count = 256 // NUMBERS_PER_WORD[dtype_name(dtype)]
    rounding_kernel(dtype_name(dtype)).launch(1, 32, values.to(device), packed, count)
    expected = values.to(dtype)
    torch.testing.assert_close(packed.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    zero = expected == 0
    assert torch.equal(packed.cpu()[zero].float().signbit(), expected[zero].float().signbit())


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match="float64 is not one of: bf16, fp16, fp32"):
        dtype_name(torch.float64)
