"""Scores of DSA's lightning indexer, and the newest key of each request on the way.

    I[s] = sum over heads h of  w[h] * relu(q[h] . k[s])

with q rotated at the newest position and rounded to the model's dtype, w scaled by 1 / sqrt(H * d).
Positions that are always selected get +inf. The newest one is among them, so no block needs the key
that another one writes meanwhile. Requests of up to K positions get no scores: all are selected.

    blocks      requests x some of their tiles. Each makes the queries for itself, which is cheaper
                than a launch before; a request's last block writes the newest key
    a warp      reads KEYS * SIDE keys at once: LANES lanes side by side read a key, 16 bytes each,
                and do so for KEYS keys; the next ones are under way while these are multiplied
    a lane      holds in registers what its 16 bytes are multiplied with, of up to 4 heads

Partial sums of KEYS keys are exchanged so that each lane ends with the sum of one key.

Bound by memory. Reads each key once, 2 d bytes in bf16, d + 4 in e4m3; and per block H * d numbers
of the product. Writes 4 bytes per position. Sums are float32, in an order that depends on nothing
but the sizes.

They deliberately do not know how positions are selected, nor how many blocks share the work.
"""

from __future__ import annotations

from functools import cache

from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    Kernel,
    bits_of_float,
    cuda,
    device_function,
    float32,
    float_of_bits,
    int32,
    int64,
    kernel,
    ld4,
    ld16,
    st4,
    uint32,
)
from minihisparse.kernels.e4m3 import E4M3_UNIT, unpack_e4m3
from minihisparse.kernels.index_keys import (
    ALL_LANES,
    key_function,
    number_at_function,
    rope_functions,
)
from minihisparse.kernels.numbers import NUMBERS_PER_WORD, number_functions

INFINITY = float("inf")
SCORE_THREADS = 128
HEADS_IN_REGISTERS = 4
KEYS_PER_LANE = 4
QUERIES_AT_ONCE = 4  # numbers of queries that a thread loads before it waits


def tile_positions(state: str, head_dim: int) -> int:
    """Positions that a block scores at once."""
    lanes, keys = _lanes_and_keys(state, head_dim)
    return SCORE_THREADS // lanes * keys


def _lanes_and_keys(state: str, head_dim: int) -> tuple[int, int]:
    """Lanes per key, keys per lane."""
    key_bytes = head_dim if state == "e4m3" else head_dim * 4 // NUMBERS_PER_WORD[state]
    lanes = key_bytes // 16
    return lanes, min(KEYS_PER_LANE, lanes)


@cache
def score_kernel(
    *,
    dtype: str,
    state: str,
    num_heads: int,
    head_dim: int,
    rope_dim: int,
    num_sinks: int,
    num_recent: int,
    top_k: int,
) -> Kernel:
    """dtype: of the product, gain and bias. state: "bf16", "fp16", "fp32" or "e4m3"."""
    HEADS, D, HALF = num_heads, head_dim, rope_dim // 2
    SINKS, RECENT, TOP_K = num_sinks, num_recent, top_k
    E4M3 = state == "e4m3"
    LANES, KEYS = _lanes_and_keys(state, head_dim)
    KEY_BYTES = 16 * LANES
    NUMBERS = D // LANES  # in 16 bytes of a key
    PER_WORD, QUADS = NUMBERS // 4, NUMBERS // 4
    SIDE = 32 // LANES  # keys side by side in a warp
    WARP_KEYS = KEYS * SIDE
    TILE = tile_positions(state, head_dim)
    GROUP = min(HEADS_IN_REGISTERS, num_heads)
    GROUPS = -(-num_heads // GROUP)
    PADDED = GROUP * GROUPS  # heads: those behind the last one are zero
    QUERIES = PADDED * D
    HELD, WORDS, SUMS = GROUP * NUMBERS, KEYS * 4, KEYS * GROUP  # of a lane, in registers
    UNROLL = min(QUERIES_AT_ONCE, -(-QUERIES // SCORE_THREADS))
    SIZE, ANGLE_BYTES = 4 // NUMBERS_PER_WORD[dtype], 4 * rope_dim
    WEIGHT_SCALE = (num_heads * head_dim) ** -0.5
    unpack, pack = number_functions(dtype)
    unpack_key, _ = number_functions(dtype if E4M3 else state)
    number_at = number_at_function(dtype)
    partner_and_angle, rotate = rope_functions(rope_dim)
    write_key = key_function(dtype=dtype, state=state, head_dim=head_dim, rope_dim=rope_dim)

    @device_function
    def place_of(head, sub, n):
        """In shared memory, of number n of lane `sub`: neighbours read neighbouring quads."""
        return uint32(((head * QUADS + n // 4) * LANES + sub) * 4 + n % 4)

    @device_function
    def make_queries(product_at, angles_at, tid, shared_queries):
        """Rotated and rounded, by all threads; heads that only fill a group are zero."""
        loaded = cuda.local.array((UNROLL, 4), float32)
        start = tid
        while start < QUERIES:
            for u in range(UNROLL):  # loads only, so that all are under way at once
                e = min(start + u * SCORE_THREADS, HEADS * D - 1)
                i = e & (D - 1)
                partner, angle = partner_and_angle(i)
                loaded[u, 0] = number_at(product_at + e * SIZE)
                loaded[u, 1] = number_at(product_at + (e - i + partner) * SIZE)
                loaded[u, 2] = float_of_bits(ld4(angles_at + 4 * angle))
                loaded[u, 3] = float_of_bits(ld4(angles_at + 4 * (HALF + angle)))
            for u in range(UNROLL):
                e = start + u * SCORE_THREADS
                i = e & (D - 1)
                x = rotate(i, loaded[u, 0], loaded[u, 1], loaded[u, 2], loaded[u, 3])
                x, _ = unpack(pack(x, x))
                if e < QUERIES:
                    at = place_of(e // D, i // NUMBERS, i & (NUMBERS - 1))
                    shared_queries[at] = x if e < HEADS * D else float32(0)
            start += UNROLL * SCORE_THREADS

    @device_function
    def take_heads(group, sub, shared_queries, shared_weights, queries, weights):
        """What a lane needs of a group of heads, into registers."""
        for h in range(GROUP):
            head = group * GROUP + h
            weights[h] = shared_weights[uint32(head)]
            for n in range(NUMBERS):
                queries[h * NUMBERS + n] = shared_queries[place_of(head, sub, n)]

    @device_function
    def load_keys(at, first, last, words):
        """Of KEYS keys, beginning with that of position `first`, this lane's 16 bytes."""
        for k in range(KEYS):
            a, b, c, d = ld16(at + min(first + k * SIDE, last) * KEY_BYTES)
            words[4 * k] = a
            words[4 * k + 1] = b
            words[4 * k + 2] = c
            words[4 * k + 3] = d

    @device_function
    def add_key(words, k, queries, numbers, sums):
        """sums of key k = this lane's part of its products with a group of queries."""
        for w in range(4):
            if E4M3:
                a, b, c, d = unpack_e4m3(words[4 * k + w])
                numbers[4 * w] = a
                numbers[4 * w + 1] = b
                numbers[4 * w + 2] = c
                numbers[4 * w + 3] = d
            else:
                low, high = unpack_key(words[4 * k + w])
                numbers[PER_WORD * w] = low
                if PER_WORD == 2:
                    numbers[2 * w + 1] = high
        for h in range(GROUP):
            total = float32(0)
            for n in range(NUMBERS):
                total = float32(total + queries[h * NUMBERS + n] * numbers[n])
            sums[k * GROUP + h] = total

    @device_function
    def sum_one_of(a, b, lane, bit):
        """Of two lanes that differ in a bit, the lower one gets the sum of a, the other of b."""
        is_upper = lane & bit
        mine, other = (b, a) if is_upper else (a, b)
        return float32(mine + cuda.shfl_xor_sync(ALL_LANES, other, bit))

    @kernel(max_threads=SCORE_THREADS)
    def index_scores(
        keys: DEVICE_ADDRESS,  # [slots, d] read; the newest of each request is written
        scales: DEVICE_ADDRESS,  # [slots] float32 likewise, if the state is e4m3
        first_slot: int64[::1],  # [request rows] read
        product: DEVICE_ADDRESS,  # [R, H * d + d + H] read: queries, key, weights
        product_row_bytes: int64,  # from row to row
        gain: DEVICE_ADDRESS,  # [d] read
        bias: DEVICE_ADDRESS,  # [d] read
        angles: DEVICE_ADDRESS,  # [max_model_len, 2, rope_dim / 2] float32 read
        seq_lens: int32[::1],  # [R] read
        req_pool_indices: int64[::1],  # [R] read
        num_real_reqs: int32[::1],  # [1] read
        scores: DEVICE_ADDRESS,  # [>= R, N] float32 written where s < S
        score_row_bytes: int64,  # from row to row
        lens: int32[::1],  # [>= R] written: S, of padding 0
        blocks_per_request: int64,
    ):
        shared_queries = cuda.shared.array(QUERIES, float32, 16)
        shared_weights = cuda.shared.array(PADDED, float32)
        queries = cuda.local.array(HELD, float32)
        weights = cuda.local.array(GROUP, float32)
        next_words = cuda.local.array(WORDS, uint32)
        words = cuda.local.array(WORDS, uint32)
        numbers = cuda.local.array(NUMBERS, float32)
        sums = cuda.local.array(SUMS, float32)
        tid = cuda.threadIdx.x & 1023
        lane, warp = tid & 31, tid >> 5
        sub, side = lane & (LANES - 1), lane // LANES
        block = uint32(cuda.blockIdx.x)
        request = int64(block // uint32(blocks_per_request))
        part = int64(block) - request * blocks_per_request
        is_last = part == blocks_per_request - 1

        row, seq_len = req_pool_indices[request], int64(seq_lens[request])
        if request >= num_real_reqs[0] or seq_len < 1:
            if is_last and tid == 0:
                lens[request] = 0
            return
        newest = seq_len - 1
        product_at = product + request * product_row_bytes
        angles_at = angles + newest * ANGLE_BYTES
        slot = first_slot[row]

        # ---- the newest key, by the block with the fewest tiles
        if is_last and warp == 0:
            if lane == 0:
                lens[request] = seq_len
            write_key(
                product_at + HEADS * D * SIZE,
                gain,
                bias,
                angles_at,
                keys + (slot + newest) * KEY_BYTES,
                scales + (slot + newest) * 4,
                lane,
                lane < D // 4,
            )
        tile = part
        if seq_len <= TOP_K or tile * TILE >= seq_len:
            return

        # ---- the first keys are under way while queries and weights are made
        keys_at = keys + slot * KEY_BYTES + sub * 16
        in_tile = warp * WARP_KEYS + side
        own = (sub & (KEYS - 1)) * SIDE  # this lane ends with the score of key in_tile + own
        load_keys(keys_at, tile * TILE + in_tile, newest, next_words)
        weight = float32(0)
        if tid < HEADS:
            weight = number_at(product_at + (HEADS * D + D + tid) * SIZE)
        make_queries(product_at, angles_at, tid, shared_queries)
        if tid < PADDED:
            shared_weights[tid] = float32(weight * float32(WEIGHT_SCALE))
        cuda.syncthreads()
        if GROUPS == 1:
            take_heads(0, sub, shared_queries, shared_weights, queries, weights)

        scores_at = scores + request * score_row_bytes
        while tile * TILE < seq_len:
            for w in range(WORDS):
                words[w] = next_words[w]
            position = tile * TILE + in_tile + own
            scale = float32(1)
            if E4M3:
                scale_at = scales + (slot + min(position, newest)) * 4
                scale = float32(float_of_bits(ld4(scale_at)) * float32(E4M3_UNIT))
            tile += blocks_per_request
            load_keys(keys_at, tile * TILE + in_tile, newest, next_words)
            score = float32(0)
            for group in range(GROUPS):
                if GROUPS > 1:
                    take_heads(group, sub, shared_queries, shared_weights, queries, weights)
                # No loop: compilers leave one as long as this is, and its arrays in memory.
                add_key(words, 0, queries, numbers, sums)
                if KEYS > 1:
                    add_key(words, 1, queries, numbers, sums)
                if KEYS > 2:
                    add_key(words, 2, queries, numbers, sums)
                    add_key(words, 3, queries, numbers, sums)
                for h in range(GROUP):
                    total = sums[h]
                    if KEYS == 4:
                        low_keys = sum_one_of(sums[h], sums[GROUP + h], lane, 1)
                        high_keys = sum_one_of(sums[2 * GROUP + h], sums[3 * GROUP + h], lane, 1)
                        total = sum_one_of(low_keys, high_keys, lane, 2)
                    elif KEYS == 2:
                        total = sum_one_of(sums[h], sums[GROUP + h], lane, 1)
                    step = KEYS
                    while step < LANES:
                        total = float32(total + cuda.shfl_xor_sync(ALL_LANES, total, step))
                        step *= 2
                    relu = float32(0) if total < float32(0) else total  # of NaN, NaN
                    score = float32(score + weights[h] * relu)
            score = float32(score * scale)
            if position < SINKS or position >= seq_len - RECENT:
                score = float32(INFINITY)
            if sub < KEYS and position < seq_len:
                st4(scores_at + 4 * position, bits_of_float(score))

    return index_scores
