"""The keys of DSA's lightning indexer: LayerNorm, RoPE and rounding, one key per position.

    x       [d]  the position's row of the product with wk
    normed  = (x - mean) / sqrt(variance + 1e-6) * gain + bias
    key     = normed, its first `rope_dim` numbers rotated (rotate-half), rounded to the state

The state holds a key in the model's dtype, or in e4m3 with one float32 scale: largest / 448.
`key_function` makes the function that a warp calls; prompts (`prompt_key_kernel`) and decode steps
(`index_scores.py`) share it, so that both round alike.

A key has d / 4 lanes. A lane calculates four numbers, and for RoPE the four that are rotated with
them: so the lanes exchange nothing but sums, and rope_dim need not be a multiple of anything.

Order of the float32 sums: four neighbours as (a + b) + (c + d), then halves of the row, as
`x[: n / 2] + x[n / 2 :]` until one is left. On a GPU a product and a sum may be one instruction,
which rounds once: the last bit of a float32 can differ from the simulator's.

Reads per key: d numbers, rope_dim angles, and gain and bias. Writes: the key, and its scale.

They deliberately do not know what a batch is, nor what the keys are for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    Kernel,
    bits_of_float,
    cuda,
    device_function,
    float32,
    float_of_bits,
    int64,
    kernel,
    ld4,
    st4,
    st16,
)
from minihisparse.kernels.e4m3 import E4M3_MAX, pack_e4m3
from minihisparse.kernels.numbers import NUMBERS_PER_WORD, number_functions

ALL_LANES = 0xFFFFFFFF
EPS = 1e-6
KEY_THREADS = 128


@cache
def number_at_function(dtype: str) -> Callable:
    """A device function: the number at an address; rows begin at multiples of 4 bytes."""
    unpack, _ = number_functions(dtype)

    @device_function
    def number_at(address):
        low, high = unpack(ld4(address & ~3))
        return high if address & 2 else low

    return number_at


@cache
def rope_functions(rope_dim: int) -> tuple[Callable, Callable]:
    """Device functions for number i of a row of any width.

    partner_and_angle(i) -> which number it is rotated with, and by which angle
    rotate(i, x, partner, cos, sin) -> the rotated number; x from rope_dim on
    """
    HALF, ROPE_DIM = rope_dim // 2, rope_dim

    @device_function
    def partner_and_angle(i):
        if i < HALF:
            return i + HALF, i
        if i < ROPE_DIM:
            return i - HALF, i - HALF
        return i, int64(0)

    @device_function
    def rotate(i, x, partner, cos, sin):
        straight, across = float32(x * cos), float32(partner * sin)
        if i < HALF:
            return float32(straight - across)
        return float32(straight + across) if i < ROPE_DIM else x

    return partner_and_angle, rotate


@cache
def key_function(*, dtype: str, state: str, head_dim: int, rope_dim: int) -> Callable:
    """A function for kernels: whole warps call it, LANES = d / 4 lanes for each key.

    dtype: of x, gain and bias. state: "bf16", "fp16", "fp32" or "e4m3".
    """
    LANES, SIZE = head_dim // 4, 4 // NUMBERS_PER_WORD[dtype]
    ONE_OF_D, HALF = 1 / head_dim, rope_dim // 2
    E4M3, FP32 = state == "e4m3", state == "fp32"
    _, pack = number_functions(dtype if E4M3 else state)
    number_at = number_at_function(dtype)
    partner_and_angle, rotate = rope_functions(rope_dim)

    @device_function
    def sum_of_key(a, b, c, d):
        total = float32(float32(a + b) + float32(c + d))
        step = LANES // 2
        while step > 0:
            total = float32(total + cuda.shfl_xor_sync(ALL_LANES, total, step))
            step //= 2
        return total

    @device_function
    def write_key(
        x_at,  # address of x [d]
        gain,  # address [d]
        bias,  # address [d]
        angles_at,  # address of float32 [2, rope_dim / 2]: cos, sin of the position
        key_at,  # address of [d] in the state: written
        scale_at,  # address of a float32: written, if e4m3
        lane,  # this thread's number in its warp
        writes,  # does this thread write? It calculates in any case
    ):
        x = cuda.local.array(8, float32)  # 4 own numbers, then the 4 they are rotated with
        gains = cuda.local.array(8, float32)
        biases = cuda.local.array(8, float32)
        cos = cuda.local.array(4, float32)
        sin = cuda.local.array(4, float32)
        key = cuda.local.array(4, float32)
        sub = lane & (LANES - 1)
        for n in range(4):  # loads only, so that all are under way at once
            own = 4 * sub + n
            partner, angle = partner_and_angle(own)
            x[n] = number_at(x_at + own * SIZE)
            x[4 + n] = number_at(x_at + partner * SIZE)
            gains[n] = number_at(gain + own * SIZE)
            gains[4 + n] = number_at(gain + partner * SIZE)
            biases[n] = number_at(bias + own * SIZE)
            biases[4 + n] = number_at(bias + partner * SIZE)
            cos[n] = float_of_bits(ld4(angles_at + 4 * angle))
            sin[n] = float_of_bits(ld4(angles_at + 4 * (HALF + angle)))

        mean = float32(sum_of_key(x[0], x[1], x[2], x[3]) * float32(ONE_OF_D))
        for n in range(8):
            x[n] = float32(x[n] - mean)
        for n in range(4):
            key[n] = float32(x[n] * x[n])
        variance = float32(sum_of_key(key[0], key[1], key[2], key[3]) * float32(ONE_OF_D))
        inverse = float32(float32(1) / float32(math.sqrt(float32(variance + float32(EPS)))))
        for n in range(8):
            scaled = float32(float32(x[n] * inverse) * gains[n])
            x[n] = float32(scaled + biases[n])
        for n in range(4):
            key[n] = rotate(4 * sub + n, x[n], x[4 + n], cos[n], sin[n])

        if E4M3:
            largest = float32(0)
            for n in range(4):
                largest = max(largest, abs(key[n]))
            step = LANES // 2
            while step > 0:
                largest = max(largest, cuda.shfl_xor_sync(ALL_LANES, largest, step))
                step //= 2
            if x[0] != x[0]:  # a NaN is in all of a key, and must be in what is read
                largest = x[0]
            scale = float32(largest / float32(E4M3_MAX))
            for n in range(4):
                key[n] = float32(key[n] / scale) if scale > float32(0) else float32(0)
            if writes:
                st4(key_at + 4 * sub, pack_e4m3(key[0], key[1], key[2], key[3]))
                if sub == 0:
                    st4(scale_at, bits_of_float(scale))
        elif writes and FP32:
            a, b = bits_of_float(key[0]), bits_of_float(key[1])
            c, d = bits_of_float(key[2]), bits_of_float(key[3])
            st16(key_at + 16 * sub, a, b, c, d)
        elif writes:
            st4(key_at + 8 * sub, pack(key[0], key[1]))
            st4(key_at + 8 * sub + 4, pack(key[2], key[3]))

    return write_key


@cache
def prompt_key_kernel(*, dtype: str, state: str, head_dim: int, rope_dim: int) -> Kernel:
    """T rows of one request, whose positions follow each other."""
    LANES = head_dim // 4
    KEYS = KEY_THREADS // LANES  # per block
    KEY_BYTES = head_dim if state == "e4m3" else head_dim * 4 // NUMBERS_PER_WORD[state]
    ANGLE_BYTES = 4 * rope_dim
    write_key = key_function(dtype=dtype, state=state, head_dim=head_dim, rope_dim=rope_dim)

    @kernel(max_threads=KEY_THREADS)
    def index_keys(
        x: DEVICE_ADDRESS,  # [T, d] read
        x_row_bytes: int64,  # from row to row
        num_rows: int64,  # T
        first_position: int64,
        first_slot: int64,  # of the first position
        gain: DEVICE_ADDRESS,  # [d] read
        bias: DEVICE_ADDRESS,  # [d] read
        angles: DEVICE_ADDRESS,  # [max_model_len, 2, rope_dim / 2] float32 read
        keys: DEVICE_ADDRESS,  # [slots, d] T of them are written
        scales: DEVICE_ADDRESS,  # [slots] float32 likewise, if the state is e4m3
    ):
        tid = cuda.threadIdx.x & 1023
        row = int64(cuda.blockIdx.x) * KEYS + tid // LANES
        read = min(row, num_rows - 1)  # every lane takes part in the sums
        write_key(
            x + read * x_row_bytes,
            gain,
            bias,
            angles + (first_position + read) * ANGLE_BYTES,
            keys + (first_slot + read) * KEY_BYTES,
            scales + (first_slot + read) * 4,
            tid & 31,
            row < num_rows,
        )

    return index_keys
