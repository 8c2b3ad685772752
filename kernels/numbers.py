"""The model's dtype as kernels see it: words of 4 bytes in memory, float32 in registers.

Numba has no bfloat16 array, and 16-byte loads give words anyway. So kernels that calculate take
tensors of floats by address, load words, and unpack them here; they calculate in float32.

    unpack, pack = number_functions("bf16")
    low, high = unpack(word)          two numbers per word: low is the one at the lower address
    word = pack(low, high)            rounded to nearest even

For fp32 a word is one number: `high` is 0, and is not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from minihisparse.kernels.device import (
    bits_of_float,
    device_function,
    float32,
    float_of_bits,
    float_of_half,
    half_of_float,
    uint32,
)

DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
NUMBERS_PER_WORD = {"bf16": 2, "fp16": 2, "fp32": 1}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype that kernels calculate with. Raises ValueError for another one."""
    if dtype not in DTYPE_NAMES:
        raise ValueError(f"dtype {dtype} is not one of: {', '.join(DTYPE_NAMES.values())}")
    return DTYPE_NAMES[dtype]


@device_function
def bf16_of_float(x):
    """The bits of the nearest bfloat16, ties to even, in the lower half of a word."""
    bits = bits_of_float(x)
    if x != x:
        return uint32(0x7FC0)
    return uint32(uint32(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@device_function
def unpack_bf16(word):
    return float_of_bits(uint32(word << 16)), float_of_bits(uint32(word & 0xFFFF0000))


@device_function
def pack_bf16(low, high):
    return uint32(bf16_of_float(low) | (bf16_of_float(high) << 16))


@device_function
def unpack_fp16(word):
    return float_of_half(word), float_of_half(uint32(word >> 16))


@device_function
def pack_fp16(low, high):
    return uint32(half_of_float(low) | (half_of_float(high) << 16))


@device_function
def unpack_fp32(word):
    return float_of_bits(word), float32(0)


@device_function
def pack_fp32(low, high):
    return bits_of_float(low)


@cache
def number_functions(dtype: str) -> tuple[Callable, Callable]:
    """`unpack` and `pack` of "bf16", "fp16" or "fp32"."""
    return {
        "bf16": (unpack_bf16, pack_bf16),
        "fp16": (unpack_fp16, pack_fp16),
        "fp32": (unpack_fp32, pack_fp32),
    }[dtype]
