"""Decode attention in one launch: a query per request over the records at its slots.

On a GPU it replaces `minihisparse/attention.py: decode_attention`, which gathers the records first;
here each number of a record is read once, where it lies (flash-decoding):

    split    of a request's K slots, at most 256: one block's work, for one KV head and the query
             heads that share it (at most 8, else several blocks)
    warp     32 slots of the split, one per lane; a reader (up to 32 lanes) reads one record at a
             time, 16 bytes per lane, while the next ones are on their way
    scores   q times K, summed over the lanes of a reader; through shared memory to the lanes that
             make weights of them: exp2(score - maximum of the split)
    sums     weights times V, in registers; then over the warp's readers, then over the warps
    combine  with several splits, the block that ends last weighs the sums of all by their maxima

The bits of the output depend on q, and on the slots' records in their order; not on where they lie,
nor on the rest of the batch, nor on which block ends last.

Traffic: 2 * D numbers per used slot and KV head; with several splits, Hq * (D + 2) float32 of each
are written and read. Shared memory: at most 43 KB per block.
`attention.py` has the buffers, the checks and the launch. The kernel deliberately does not know
positions, nor which cache the records belong to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    Kernel,
    cuda,
    device_function,
    exp2,
    fetch_inc_wrap,
    float32,
    int32,
    int64,
    kernel,
    ld16,
    st4,
    uint32,
)
from minihisparse.kernels.numbers import NUMBERS_PER_WORD, number_functions

ALL_LANES = 0xFFFFFFFF
MAX_HEAD_BYTES = 1024
MAX_WARPS = 8  # of a block
MAX_HEADS = 8  # query heads of a block, and
MAX_SUMS = 1024  # numbers of all of them
# So many threads per multiprocessor leave each one 128 registers. Half are for q and for loads.
RESIDENT_THREADS, REGISTERS_FOR_INPUTS = 512, 64
NOTHING = -math.inf  # the score of a slot that is not used


class AttentionKernel(NamedTuple):
    kernel: Kernel
    num_threads: int
    num_splits: int
    num_groups: int  # blocks per split: KV heads, or more if a block cannot have all query heads
    num_partials: int  # float32 numbers that each block hands over, if there are several splits


def unrolled(step: Callable, first: int, last: int) -> Callable:
    """A device function that does step(first, ...) to step(last - 1, ...), one after the other.

    No loop: of a large one compilers make a real one, and then local arrays cannot be registers.
    """
    if last - first == 1:

        @device_function
        def one_step(*args):
            step(first, *args)

        return one_step
    middle = (first + last) // 2
    before, after = unrolled(step, first, middle), unrolled(step, middle, last)

    @device_function
    def steps(*args):
        before(*args)
        after(*args)

    return steps


@cache
def attention_kernel(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    top_k: int,
    dtype: str,
    loads_ahead: int | None = None,
    resident_threads: int = RESIDENT_THREADS,
) -> AttentionKernel:
    """The kernel, made for these sizes.

    loads_ahead: of 16 bytes, per thread; a power of two. resident_threads: the compiler may use as
    many registers as let so many threads run on a multiprocessor. Neither changes the output.
    """
    unpack, pack = number_functions(dtype)
    PER_WORD = NUMBERS_PER_WORD[dtype]
    HEAD_BYTES = head_dim * 4 // PER_WORD
    HEAD_PIECES = HEAD_BYTES // 16
    RECORD_BYTES, V_OFFSET = 2 * num_kv_heads * HEAD_BYTES, num_kv_heads * HEAD_BYTES
    # ---- a reader: its lanes, and what each has of a head of D numbers
    LANE_BITS = min((HEAD_PIECES - 1).bit_length(), 5)
    LANES, READERS = 1 << LANE_BITS, 32 >> LANE_BITS
    STEPS = 32 // READERS  # slots of a reader
    PIECES = -(-HEAD_PIECES // LANES)
    WORDS, NUMBERS = 4 * PIECES, 4 * PIECES * PER_WORD
    # ---- a block: its query heads, for sums over lanes padded to a power of two, and its slots
    GROUP = num_q_heads // num_kv_heads
    CHUNKS = -(-GROUP // min(MAX_HEADS, LANES, MAX_SUMS // (LANES * NUMBERS)))
    HEADS = -(-GROUP // CHUNKS)
    HEAD_BITS = (HEADS - 1).bit_length()
    PADDED_HEADS = 1 << HEAD_BITS
    GROUPS = num_kv_heads * CHUNKS
    TOP_K, SPLITS = top_k, -(-top_k // (32 * MAX_WARPS))
    WARPS = -(-top_k // (32 * SPLITS))
    THREADS = 32 * WARPS
    # ---- registers
    if loads_ahead is None:
        room = (REGISTERS_FOR_INPUTS - PADDED_HEADS * NUMBERS) // WORDS
        loads_ahead = 8 if room >= 8 else 4 if room >= 4 else 2
    AHEAD = min(loads_ahead, STEPS)
    # ---- sums leave the registers as words: head, word of a piece, piece; the high numbers last
    ROW = LANES * PIECES
    ITEMS = HEADS * 4 * ROW
    SUMS, TURNS = ITEMS * PER_WORD, -(-ITEMS // THREADS)
    # ---- sizes of arrays must be names
    ALL_SCORES, ALL_SUMS = THREADS * PADDED_HEADS, WARPS * SUMS
    ALL_WORDS, ALL_Q, ALL_ACC = AHEAD * WORDS, PADDED_HEADS * NUMBERS, HEADS * NUMBERS
    SCALE = head_dim**-0.5 / math.log(2)  # the weights are powers of two

    @device_function
    def fetch(t, words, k_source, slot_of_lane, lane, zeros):
        """Asks for a lane's part of the K of its reader's slot t, or, past STEPS, of the V."""
        slot = cuda.shfl_sync(ALL_LANES, slot_of_lane, t % STEPS * READERS + (lane >> LANE_BITS))
        source = k_source + int64(slot) * RECORD_BYTES + t // STEPS * V_OFFSET
        for j in range(PIECES):
            address = source + j * LANES * 16
            if slot < 0 or (lane & (LANES - 1)) + j * LANES >= HEAD_PIECES:
                address = zeros
            w0, w1, w2, w3 = ld16(address)
            at = t % AHEAD * WORDS + 4 * j
            words[at] = w0
            words[at + 1] = w1
            words[at + 2] = w2
            words[at + 3] = w3

    @device_function
    def read_q(q_of, group_q, first_head, lane, zeros):
        """A lane's part of q: its entry h is head h ^ lane, see `score_of`."""
        part = lane & (LANES - 1)
        for h in range(PADDED_HEADS):
            head = h ^ (lane & (PADDED_HEADS - 1))
            for j in range(PIECES):
                address = group_q + (first_head + head) * HEAD_BYTES + (part + j * LANES) * 16
                if head >= HEADS or first_head + head >= GROUP or part + j * LANES >= HEAD_PIECES:
                    address = zeros
                four = ld16(address)
                for w in range(4):
                    low, high = unpack(four[w])
                    n = h * NUMBERS + (4 * j + w) * PER_WORD
                    q_of[n] = low * float32(SCALE)
                    if PER_WORD == 2:
                        q_of[n + 1] = high * float32(SCALE)

    @device_function
    def score_of(dots):
        """The sum over a reader's lanes of one head: in lane p, of head p % PADDED_HEADS.

        In each step two lanes trade halves: each hands over the heads that the other one keeps.
        """
        if PADDED_HEADS == 8:
            for h in range(4):
                dots[h] += cuda.shfl_xor_sync(ALL_LANES, dots[h + 4], 4)
        if PADDED_HEADS >= 4:
            for h in range(2):
                dots[h] += cuda.shfl_xor_sync(ALL_LANES, dots[h + 2], 2)
        if PADDED_HEADS >= 2:
            dots[0] += cuda.shfl_xor_sync(ALL_LANES, dots[1], 1)
        score = dots[0]
        step = PADDED_HEADS
        while step < LANES:
            score += cuda.shfl_xor_sync(ALL_LANES, score, step)
            step *= 2
        return score

    @device_function
    def score_step(t, words, q_of, dots, scores, at, k_source, slot_of_lane, lane, zeros):
        """The scores of a reader's slot t, to scores[at + ...]."""
        for h in range(PADDED_HEADS):
            dots[h] = float32(0)
        for w in range(WORDS):
            low, high = unpack(words[t % AHEAD * WORDS + w])
            for h in range(PADDED_HEADS):
                dots[h] += q_of[h * NUMBERS + w * PER_WORD] * low
                if PER_WORD == 2:
                    dots[h] += q_of[h * NUMBERS + w * PER_WORD + 1] * high
        fetch(t + AHEAD, words, k_source, slot_of_lane, lane, zeros)  # there is room for it now
        score = score_of(dots)
        if lane & (LANES - 1) < PADDED_HEADS:
            scores[at + t * READERS * PADDED_HEADS + (lane & (PADDED_HEADS - 1))] = score

    @device_function
    def sum_step(t, words, acc, weights, at, k_source, slot_of_lane, lane, zeros):
        """Adds the V of a reader's slot t, times its weight for each head."""
        for w in range(WORDS):
            low, high = unpack(words[t % AHEAD * WORDS + w])
            for h in range(HEADS):
                weight = weights[at + t * READERS * PADDED_HEADS + h]
                acc[h * NUMBERS + w * PER_WORD] += weight * low
                if PER_WORD == 2:
                    acc[h * NUMBERS + w * PER_WORD + 1] += weight * high
        if t + AHEAD < STEPS:
            fetch(STEPS + t + AHEAD, words, k_source, slot_of_lane, lane, zeros)

    first_fetches = unrolled(fetch, 0, AHEAD)
    score_steps, sum_steps = unrolled(score_step, 0, STEPS), unrolled(sum_step, 0, STEPS)

    @device_function
    def head_of(item):
        """Compared, not divided: of item // 4 * 4, an address in heads of 16 bytes, the compiler
        (NVVM 13.0) made item.
        """
        head = int64(0)
        for h in range(1, HEADS):
            if item >= h * 4 * ROW:
                head = int64(h)
        return head

    @device_function
    def write(group_out, first_head, item, low, high, total):
        """One word of the output."""
        inverse = float32(0)  # without any slot the sums are 0, and so is the output
        if total != float32(0):
            inverse = float32(1) / total
        line = int64(uint32(item) // uint32(ROW))
        piece, head = item - line * ROW, first_head + (line >> 2)
        if piece < HEAD_PIECES and head < GROUP:
            address = group_out + head * HEAD_BYTES + piece * 16 + (line & 3) * 4
            st4(address, pack(low * inverse, high * inverse))

    # More threads than a block has: this is how the compiler is told how many registers it may use.
    @kernel(max_threads=resident_threads)
    def decode_attention(
        q: DEVICE_ADDRESS,  # [R, Hq, D] read; rows may lie apart
        q_row_bytes: int64,
        records: DEVICE_ADDRESS,  # [N, W] read at the slots
        slots: int32[:, ::1],  # [R, K] read
        first_slot: int64[::1],  # [request rows] read
        req_pool_indices: int64[::1],  # [R] read
        out: DEVICE_ADDRESS,  # [R, Hq, D] written, every number
        zeros: DEVICE_ADDRESS,  # 16 bytes, read in place of what there is not
        partials: float32[:, ::1],  # [blocks, SUMS + 2 * HEADS] each block's sums, maxima, totals
        tickets: DEVICE_ADDRESS,  # [R * GROUPS] int32, 0 before and after
    ):
        scores = cuda.shared.array(ALL_SCORES, float32, alignment=16)  # [WARPS, slot, head]
        maxima = cuda.shared.array(THREADS, float32)  # [WARPS, lane], of a lane's head, lane %
        totals = cuda.shared.array(THREADS, float32)  # PADDED_HEADS, over the warp's slots
        sums = cuda.shared.array(ALL_SUMS, float32)  # [WARPS, SUMS]
        shared_ticket = cuda.shared.array(1, int32)
        words = cuda.local.array(ALL_WORDS, uint32)  # of K and V, asked for ahead
        q_of = cuda.local.array(ALL_Q, float32)
        dots = cuda.local.array(PADDED_HEADS, float32)
        acc = cuda.local.array(ALL_ACC, float32)

        tid = cuda.threadIdx.x & 1023  # the mask tells the compiler that it is not negative
        lane, warp = tid & 31, tid >> 5
        part, reader = lane & (LANES - 1), lane >> LANE_BITS
        block = uint32(cuda.blockIdx.x)
        group = int64(uint32(block % uint32(GROUPS)))
        split = int64(uint32(uint32(block // uint32(GROUPS)) % uint32(SPLITS)))
        request = int64(uint32(block // uint32(GROUPS * SPLITS)))
        kv_head = int64(uint32(uint32(group) // uint32(CHUNKS)))
        first_head = (group - kv_head * CHUNKS) * HEADS  # of those that share the KV head

        # ---- each lane knows one slot
        row = req_pool_indices[request]
        if row < 0 or row >= first_slot.shape[0]:
            row = int64(0)  # what padding says is not to be trusted; it has no slots
        slot_of_lane = int32(-1)
        index = (split * WARPS + warp) * 32 + lane
        if index < TOP_K:
            slot_of_lane = slots[request, index]
        used = cuda.ballot_sync(ALL_LANES, slot_of_lane >= 0)
        k_source = records + first_slot[row] * RECORD_BYTES + kv_head * HEAD_BYTES + part * 16

        # ---- scores, and their maximum: a reader's scores begin at `at`; a lane makes weights of
        # ---- those at `lane_at` and at every 32nd after it, which are all of one head
        at = (warp * 32 + reader) * PADDED_HEADS
        lane_at = warp * 32 * PADDED_HEADS + lane
        best = float32(NOTHING)
        if used != 0:
            first_fetches(words, k_source, slot_of_lane, lane, zeros)
            group_q = q + request * q_row_bytes + kv_head * GROUP * HEAD_BYTES
            read_q(q_of, group_q, first_head, lane, zeros)
            score_steps(words, q_of, dots, scores, at, k_source, slot_of_lane, lane, zeros)
            cuda.syncwarp()
            for j in range(PADDED_HEADS):
                if (used >> ((j * 32 + lane) >> HEAD_BITS)) & 1 == 0:
                    scores[lane_at + j * 32] = float32(NOTHING)
                best = max(best, scores[lane_at + j * 32])
            step = PADDED_HEADS
            while step < 32:
                best = max(best, cuda.shfl_xor_sync(ALL_LANES, best, step))
                step *= 2
        maxima[tid] = best
        cuda.syncthreads()
        for w in range(WARPS):
            best = max(best, maxima[w * 32 + lane])

        # ---- weights, and their sums with V over the warp
        total = float32(0)
        for n in range(HEADS * NUMBERS):
            acc[n] = float32(0)
        if used != 0:
            for j in range(PADDED_HEADS):
                weight = exp2(scores[lane_at + j * 32] - best)
                scores[lane_at + j * 32] = weight
                total += weight
            cuda.syncwarp()
            sum_steps(words, acc, scores, at, k_source, slot_of_lane, lane, zeros)
            step = PADDED_HEADS
            while step < 32:
                total += cuda.shfl_xor_sync(ALL_LANES, total, step)
                step *= 2
            for n in range(HEADS * NUMBERS):
                step = LANES
                while step < 32:
                    acc[n] += cuda.shfl_xor_sync(ALL_LANES, acc[n], step)
                    step *= 2
        totals[tid] = total
        if reader == 0:
            for h in range(HEADS):
                for w in range(WORDS):
                    for n in range(PER_WORD):
                        item = (h * 4 + (w & 3)) * ROW + (w >> 2) * LANES + part
                        value = acc[h * NUMBERS + w * PER_WORD + n]
                        sums[warp * SUMS + n * ITEMS + item] = value
        cuda.syncthreads()

        # ---- over the warps, and out
        group_out = out + (request * num_q_heads + kv_head * GROUP) * HEAD_BYTES
        for turn in range(TURNS):
            item = turn * THREADS + tid
            if item < ITEMS:
                head = head_of(item)
                low, high, total = float32(0), float32(0), float32(0)
                for w in range(WARPS):
                    total += totals[w * 32 + head]
                    low += sums[w * SUMS + item]
                    if PER_WORD == 2:
                        high += sums[w * SUMS + ITEMS + item]
                if SPLITS == 1:
                    write(group_out, first_head, item, low, high, total)
                else:
                    partials[block, item] = low
                    if PER_WORD == 2:
                        partials[block, ITEMS + item] = high
                    if item == head * 4 * ROW:
                        partials[block, SUMS + HEADS + head] = total
        if SPLITS > 1:
            if tid < HEADS:
                partials[block, SUMS + tid] = best  # of head tid
            cuda.syncthreads()
            if tid == 0:
                ticket_at = tickets + 4 * (request * GROUPS + group)
                shared_ticket[0] = fetch_inc_wrap(ticket_at, SPLITS - 1)
            cuda.syncthreads()
            if shared_ticket[0] == SPLITS - 1:
                # ---- all splits have ended: their sums, in the order of the splits
                first = request * SPLITS * GROUPS + group
                for turn in range(TURNS):
                    item = turn * THREADS + tid
                    if item < ITEMS:
                        head = head_of(item)
                        best = float32(NOTHING)
                        for s in range(SPLITS):
                            best = max(best, partials[first + s * GROUPS, SUMS + head])
                        if best == float32(NOTHING):
                            best = float32(0)
                        low, high, total = float32(0), float32(0), float32(0)
                        for s in range(SPLITS):
                            other = first + s * GROUPS
                            factor = exp2(partials[other, SUMS + head] - best)
                            total += factor * partials[other, SUMS + HEADS + head]
                            low += factor * partials[other, item]
                            if PER_WORD == 2:
                                high += factor * partials[other, ITEMS + item]
                        write(group_out, first_head, item, low, high, total)

    return AttentionKernel(decode_attention, THREADS, SPLITS, GROUPS, SUMS + 2 * HEADS)
