"""What lies between the matrix products of a decoder layer: RoPE, residual and norm, SiLU.

Each is one launch instead of torch's two to eight. It calculates in float32 and rounds to the
model's dtype where the torch operations of `minihisparse/model.py` round.

    rope           q and k heads in place: RMS norm over D (Qwen3 only), then rotate-half RoPE
    add_rms_norm   hidden += delta in place; out = RMS norm of hidden, times weight
    silu_mul       out = silu(gate) * up

Shapes: rows are tokens [T], T = 1 or thousands. Every tensor is contiguous and of the model's
dtype; a row (of rope: a head) is a multiple of 16 bytes, which is what a thread takes at a time.
Traffic: rope reads and writes the q and k heads, and reads D numbers of the table per token;
add_rms_norm reads two rows and writes two; silu_mul reads 2 I numbers and writes I. Nothing is
read twice, weights and table aside. Bound by memory for many tokens, by latency for few.
Exactness: the same row gives the same bits, whatever else is in the batch. `hidden`, and 16-bit
rope without a norm, have torch's bits; elsewhere a sum in another order or another exp2 changes
the last bit of a few numbers.
Launchers allocate nothing and do not wait: a CUDA graph can hold them once each was called before.

It deliberately does not know layers, attention, or where q, k and v go.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    Kernel,
    cuda,
    device_function,
    exp2,
    float32,
    int64,
    kernel,
    ld4,
    ld16,
    rsqrt,
    st4,
    st16,
    uint32,
)
from minihisparse.kernels.numbers import NUMBERS_PER_WORD, dtype_name, number_functions

ALL_LANES = 0xFFFFFFFF
LOG2_OF_E = math.log2(math.e)
BLOCK = 128  # threads of rope and silu_mul: small blocks spread a few tokens over the chip
MAX_HIDDEN_SIZE = 16_384  # threads keep rows in registers
MAX_NORM_THREADS = 512  # per row: with more, a thread would have too few registers


class WordFunctions(NamedTuple):
    """Device functions on words: each is two numbers of 16 bits, or one of 32."""

    add: Callable  # (a, b) -> a + b
    squares: Callable  # (a) -> float32, the sum of its numbers' squares
    scale: Callable  # (a, factor, b) -> a * factor * b, rounded once
    scale_twice: Callable  # (a, factor, b) -> a * factor, rounded, * b
    rotate: Callable  # (a, b, cos, sin) -> a * cos - b * sin, b * cos + a * sin
    silu_mul: Callable  # (gate, up) -> silu(gate), rounded, * up


@cache
def word_functions(dtype: str) -> WordFunctions:
    unpack, pack = number_functions(dtype)

    @device_function
    def add(a, b):
        a_low, a_high = unpack(a)
        b_low, b_high = unpack(b)
        return pack(a_low + b_low, a_high + b_high)

    @device_function
    def squares(a):
        low, high = unpack(a)
        return float32(low * low + high * high)

    @device_function
    def scale(a, factor, b):
        a_low, a_high = unpack(a)
        b_low, b_high = unpack(b)
        return pack(a_low * factor * b_low, a_high * factor * b_high)

    @device_function
    def scale_twice(a, factor, b):
        low, high = unpack(a)
        low, high = unpack(pack(low * factor, high * factor))
        b_low, b_high = unpack(b)
        return pack(low * b_low, high * b_high)

    @device_function
    def rotate(a, b, cos, sin):
        a_low, a_high = unpack(a)
        b_low, b_high = unpack(b)
        cos_low, cos_high = unpack(cos)
        sin_low, sin_high = unpack(sin)
        x_low, x_high = unpack(pack(a_low * cos_low, a_high * cos_high))
        y_low, y_high = unpack(pack(b_low * cos_low, b_high * cos_high))
        x = pack(x_low - b_low * sin_low, x_high - b_high * sin_high)
        y = pack(y_low + a_low * sin_low, y_high + a_high * sin_high)
        return x, y

    @device_function
    def silu(x):
        root = rsqrt(float32(float32(1) + exp2(float32(x * float32(-LOG2_OF_E)))))
        return float32(x * root * root)  # a division would be 16 instructions and a branch

    @device_function
    def silu_mul(gate, up):
        low, high = unpack(gate)
        low, high = unpack(pack(silu(low), silu(high)))
        up_low, up_high = unpack(up)
        return pack(low * up_low, high * up_high)

    return WordFunctions(add, squares, scale, scale_twice, rotate, silu_mul)


@cache
def sum_function(num_lanes: int) -> Callable:
    """A device function: the sum over each group of so many lanes, the same bits in all of them."""
    NUM_LANES = num_lanes

    @device_function
    def sum_of_lanes(value):
        step = NUM_LANES // 2
        while step > 0:
            value = float32(value + cuda.shfl_xor_sync(ALL_LANES, value, step))
            step //= 2
        return value

    return sum_of_lanes


@cache
def rope_kernel(
    dtype: str, num_q_heads: int, num_kv_heads: int, head_dim: int, norm: bool, eps: float
) -> tuple[Kernel, int]:
    """The kernel, and how many threads it needs per token.

    A thread has a piece of a head's first half and the same piece of the second half.
    """
    NORM, EPS, ONE_OF_D = norm, eps, 1 / head_dim
    HEADS, ROTATED = num_q_heads + 2 * num_kv_heads, num_q_heads + num_kv_heads
    HEAD_BYTES = head_dim * 4 // NUMBERS_PER_WORD[dtype]
    HALF_BYTES = HEAD_BYTES // 2
    WIDE = HALF_BYTES % 16 == 0
    PIECE_BYTES = 16 if WIDE else 4
    PIECES = HALF_BYTES // PIECE_BYTES
    LANES = 1 << (PIECES - 1).bit_length()  # per head; a power of two, for the sum
    if LANES > 32:
        raise ValueError(f"head_dim={head_dim}: a head of {HEAD_BYTES} bytes is more than 1024")
    words = word_functions(dtype)
    squares, scale_twice, rotate = words.squares, words.scale_twice, words.rotate
    sum_of_lanes = sum_function(LANES)

    @device_function
    def load(address):
        if WIDE:
            return ld16(address)
        return ld4(address), uint32(0), uint32(0), uint32(0)

    @kernel(max_threads=BLOCK)
    def rope(
        qkv: DEVICE_ADDRESS,  # [T, HEADS, D] the first ROTATED heads are read and written
        positions: int64[::1],  # [T] read
        table: DEVICE_ADDRESS,  # [max_len, 2, D] read: (cos, cos), (-sin, sin)
        max_len: int64,
        norm_weight: DEVICE_ADDRESS,  # [ROTATED, D] read, if NORM
    ):
        x = cuda.local.array(4, uint32)
        y = cuda.local.array(4, uint32)
        x_weight = cuda.local.array(4, uint32)
        y_weight = cuda.local.array(4, uint32)
        cos = cuda.local.array(4, uint32)
        sin = cuda.local.array(4, uint32)
        thread = int64(cuda.blockIdx.x) * BLOCK + (cuda.threadIdx.x & (BLOCK - 1))
        head_of_all, lane = int64(uint32(thread) // uint32(LANES)), thread & (LANES - 1)
        token = int64(uint32(head_of_all) // uint32(ROTATED))
        head = head_of_all - token * ROTATED
        offset = lane * PIECE_BYTES
        x_at = qkv + (token * HEADS + head) * HEAD_BYTES + offset
        y_at = x_at + HALF_BYTES

        # ---- all loads; no thread leaves before the sum, which needs whole warps
        position = int64(-1)
        for i in range(4):
            x[i] = y[i] = x_weight[i] = y_weight[i] = uint32(0)
        if token < positions.shape[0] and lane < PIECES:
            position = positions[token]
            x[0], x[1], x[2], x[3] = load(x_at)
            y[0], y[1], y[2], y[3] = load(y_at)
            if NORM:
                at = norm_weight + head * HEAD_BYTES + offset
                x_weight[0], x_weight[1], x_weight[2], x_weight[3] = load(at)
                y_weight[0], y_weight[1], y_weight[2], y_weight[3] = load(at + HALF_BYTES)
        inside = 0 <= position < max_len  # else nothing is written
        if inside:
            at = table + position * (2 * HEAD_BYTES) + offset
            cos[0], cos[1], cos[2], cos[3] = load(at)
            sin[0], sin[1], sin[2], sin[3] = load(at + HEAD_BYTES + HALF_BYTES)

        if NORM:
            total = float32(0)
            for i in range(4):
                total = float32(total + squares(x[i]) + squares(y[i]))
            total = sum_of_lanes(total)
            factor = rsqrt(float32(total * float32(ONE_OF_D) + float32(EPS)))
            for i in range(4):
                x[i] = scale_twice(x[i], factor, x_weight[i])
                y[i] = scale_twice(y[i], factor, y_weight[i])
        if inside:
            for i in range(4):
                x[i], y[i] = rotate(x[i], y[i], cos[i], sin[i])
            if WIDE:
                st16(x_at, x[0], x[1], x[2], x[3])
                st16(y_at, y[0], y[1], y[2], y[3])
            else:
                st4(x_at, x[0])
                st4(y_at, y[0])

    return rope, ROTATED * LANES


@cache
def add_rms_norm_kernel(dtype: str, hidden_size: int, has_delta: bool, eps: float) -> Kernel:
    """One block per row; each thread keeps its pieces of the row from the first pass on."""
    ADD, EPS, ONE_OF_H = has_delta, eps, 1 / hidden_size
    if hidden_size > MAX_HIDDEN_SIZE:
        raise ValueError(f"hidden_size={hidden_size} is more than {MAX_HIDDEN_SIZE}")
    ROW_BYTES = hidden_size * 4 // NUMBERS_PER_WORD[dtype]
    PIECES = ROW_BYTES // 16
    WARPS = min(MAX_NORM_THREADS // 32, -(-PIECES // 32))
    THREADS = 32 * WARPS
    TILES = -(-PIECES // THREADS)
    words = word_functions(dtype)
    add, squares, scale, sum_of_lanes = words.add, words.squares, words.scale, sum_function(32)

    @kernel(max_threads=THREADS)
    def add_rms_norm(
        hidden: DEVICE_ADDRESS,  # [T, H] read; if ADD, written
        delta: DEVICE_ADDRESS,  # [T, H] read, if ADD
        weight: DEVICE_ADDRESS,  # [H] read
        out: DEVICE_ADDRESS,  # [T, H] written
    ):
        x = cuda.local.array((TILES, 4), uint32)
        d = cuda.local.array((TILES, 4), uint32)
        w = cuda.local.array((TILES, 4), uint32)
        sums = cuda.shared.array(WARPS, float32)
        tid = cuda.threadIdx.x & 1023
        lane, warp = tid & 31, tid >> 5
        row = int64(cuda.blockIdx.x) * ROW_BYTES
        for j in range(TILES):
            piece = j * THREADS + tid
            for i in range(4):
                x[j, i] = d[j, i] = w[j, i] = uint32(0)
            if piece < PIECES:
                at = row + 16 * piece
                x[j, 0], x[j, 1], x[j, 2], x[j, 3] = ld16(hidden + at)
                if ADD:
                    d[j, 0], d[j, 1], d[j, 2], d[j, 3] = ld16(delta + at)
                w[j, 0], w[j, 1], w[j, 2], w[j, 3] = ld16(weight + 16 * piece)

        total = float32(0)
        for j in range(TILES):
            for i in range(4):
                if ADD:
                    x[j, i] = add(x[j, i], d[j, i])
                total = float32(total + squares(x[j, i]))
            if ADD:
                piece = j * THREADS + tid
                if piece < PIECES:
                    st16(hidden + row + 16 * piece, x[j, 0], x[j, 1], x[j, 2], x[j, 3])
        total = sum_of_lanes(total)
        if lane == 0:
            sums[warp] = total
        cuda.syncthreads()
        total = float32(0)
        if lane < WARPS:
            total = sums[lane]
        total = sum_of_lanes(total)
        factor = rsqrt(float32(total * float32(ONE_OF_H) + float32(EPS)))

        for j in range(TILES):
            piece = j * THREADS + tid
            for i in range(4):
                x[j, i] = scale(x[j, i], factor, w[j, i])
            if piece < PIECES:
                st16(out + row + 16 * piece, x[j, 0], x[j, 1], x[j, 2], x[j, 3])

    return add_rms_norm


@cache
def silu_mul_kernel(dtype: str, inner_size: int) -> tuple[Kernel, int]:
    """The kernel, and how many threads it needs per row: one for each piece of 16 bytes."""
    ROW_BYTES = inner_size * 4 // NUMBERS_PER_WORD[dtype]
    PIECES = ROW_BYTES // 16
    silu_mul_word = word_functions(dtype).silu_mul

    @kernel(max_threads=BLOCK)
    def silu_mul(
        gate_up: DEVICE_ADDRESS,  # [T, 2 I] read: gate, then up
        out: DEVICE_ADDRESS,  # [T, I] written
        num_pieces: int64,  # of out
    ):
        piece = int64(cuda.blockIdx.x) * BLOCK + (cuda.threadIdx.x & (BLOCK - 1))
        if piece < num_pieces:
            row = int64(uint32(piece) // uint32(PIECES))
            gate_at = gate_up + row * ROW_BYTES + 16 * piece
            a, b, c, d = ld16(gate_at)
            e, f, g, h = ld16(gate_at + ROW_BYTES)
            a, b = silu_mul_word(a, e), silu_mul_word(b, f)
            c, d = silu_mul_word(c, g), silu_mul_word(d, h)
            st16(out + 16 * piece, a, b, c, d)

    return silu_mul, PIECES


def rope(
    qkv: Tensor,
    positions: Tensor,
    table: Tensor,
    num_kv_heads: int,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Rotates the q and k heads in place; with norm_weight, normalises them first.

    qkv [T, Hq + 2 Hkv, D]: q, k, v heads; v is left as it is. positions [T] int64: where one is
    not in 0..max_len-1, the token is left as it is. table [max_len, 2, 1, D]: of `rope_table`.
    norm_weight [Hq + Hkv, D] and eps: of the RMS norm over D.
    Raises TypeError or ValueError before anything is written.
    """
    num_tokens, num_heads, head_dim = _shape_of("qkv", qkv, 3)
    rotated = num_heads - num_kv_heads
    if not 1 <= num_kv_heads < rotated:
        raise ValueError(f"qkv has {num_heads} heads, too few for num_kv_heads={num_kv_heads}")
    tensors = {
        "qkv": (qkv, (num_tokens, num_heads, head_dim)),
        "table": (table, (len(table), 2, 1, head_dim)),
    }
    if norm_weight is not None:
        tensors["norm_weight"] = norm_weight, (rotated, head_dim)
    _check(qkv.dtype, tensors)
    if positions.shape != (num_tokens,):
        raise ValueError(f"positions is {tuple(positions.shape)}, expected {(num_tokens,)}")
    if num_tokens:
        has_norm = norm_weight is not None
        kernel, threads = rope_kernel(
            dtype_name(qkv.dtype),
            rotated - num_kv_heads,
            num_kv_heads,
            head_dim,
            has_norm,
            eps if has_norm else 0.0,
        )
        blocks = -(-num_tokens * threads // BLOCK)
        weight = norm_weight if has_norm else table
        kernel.launch(blocks, BLOCK, qkv, positions, table, len(table), weight)


def add_rms_norm(
    hidden: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> None:
    """hidden [T, H] += delta [T, H], unless that is None; out [T, H] = RMS norm * weight [H].

    Raises TypeError or ValueError before anything is written.
    """
    shape = num_tokens, size = _shape_of("hidden", hidden, 2)
    tensors = {"hidden": (hidden, shape), "weight": (weight, (size,)), "out": (out, shape)}
    if delta is not None:
        tensors["delta"] = delta, shape
    _check(hidden.dtype, tensors)
    kernel = add_rms_norm_kernel(dtype_name(hidden.dtype), size, delta is not None, eps)
    if num_tokens:
        delta = hidden if delta is None else delta
        kernel.launch(num_tokens, kernel.max_threads, hidden, delta, weight, out)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """out [T, I] = silu(gate) * up; gate_up [T, 2 I]: gate, then up.

    Raises TypeError or ValueError before anything is written.
    """
    num_tokens, size = _shape_of("out", out, 2)
    _check(
        out.dtype, {"out": (out, (num_tokens, size)), "gate_up": (gate_up, (num_tokens, 2 * size))}
    )
    if num_tokens:
        kernel, pieces = silu_mul_kernel(dtype_name(out.dtype), size)
        num_pieces = num_tokens * pieces
        kernel.launch(-(-num_pieces // BLOCK), BLOCK, gate_up, out, num_pieces)


def _shape_of(name: str, tensor: Tensor, num_dims: int) -> tuple[int, ...]:
    if tensor.ndim != num_dims:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {num_dims} dimensions")
    return tuple(tensor.shape)


def _check(dtype: torch.dtype, tensors: dict[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Raises ValueError if a tensor has not the dtype or the shape that it must have."""
    dtype_name(dtype)
    for name, (tensor, shape) in tensors.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        row_bytes = shape[-1] * tensor.element_size()
        if row_bytes % 16 or not row_bytes or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name}: rows of {row_bytes} bytes from address {tensor.data_ptr():#x}; rows and "
                "address must be multiples of 16 bytes"
            )
