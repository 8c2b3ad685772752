"""Selects the K largest of a row of scores: functions for kernels, of one block or of several.

The rule: the min(K, length) largest, as indices in ascending order; ties go to the lowest index.
-inf is an ordinary lowest score, NaN counts as -inf, -0.0 equals 0.0. The same row always gives the
same list.

How one block does it, with all its threads and few barriers:

    keys       a score becomes a uint32 whose ascending order is the scores' descending order
    threshold  the key of the K-th score, found digit by digit from the top: count the keys of each
               digit, find the digit where the count reaches K, and go on with the keys that have
               it. Ends early where they are all selected. With 11 bits there are three digits, and
               the first is the exponent and two bits more: scores of like size differ in it
    places     a warp owns one stretch of the row, and counts its keys below the threshold and those
               equal to it; a scan over the warps says how many come before
    list       each warp goes through its stretch again, and writes the indices to their places

Keys stay in registers if the row is short (512 threads: 8,192 scores); else each pass reads them.

Several blocks have a tile of the row each, and select from it. The last one to finish selects from
what all have selected, which lies in memory in the order of the row: the same function does it.
Nobody waits, and which block is the last one makes no difference.

Reads 4 bytes per score, up to five times (from L1 or L2 after the first). With tiles, writes and
reads 8 bytes more per tile and index. Shared memory: 8.5 KiB, and the list.

It deliberately does not know where scores come from, nor what becomes of the list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from minihisparse.kernels.device import (
    cuda,
    device_function,
    fetch_inc_wrap,
    int32,
    int64,
    ld4,
    ld16,
    st4,
    uint32,
)

ALL_LANES = 0xFFFFFFFF
MAX_TOP_K = 8192  # so that the list fits into the 48 KiB of shared memory that need no asking
DIGIT_BITS = 11  # three digits make a key, the last one has 10
DIGITS = 1 << DIGIT_BITS
STRIPE = 128  # scores that a warp reads at once, four per lane
NUM_THREADS, STRIPES = 512, 4  # per warp, held in registers
SHORTEST_TILE = 4 * STRIPES * NUM_THREADS  # what a block holds

INFINITY_BITS = 0x7F800000
LAST_KEY = 0xFF000000  # of -inf
OUTSIDE = 0xFFFFFFFF  # the key of what lies outside of a row


@device_function
def key_of(word):
    """Ascends as the scores descend, from 0 for +inf to LAST_KEY for -inf and NaN."""
    magnitude = word & 0x7FFFFFFF
    signed = -magnitude if word & 0x80000000 else magnitude
    # A NaN is beyond -inf or, as a uint32 that wraps, beyond +inf.
    return min(uint32(INFINITY_BITS - signed), uint32(LAST_KEY))


@device_function
def scan_of_warp(value, lane):
    """The sum of an int32 over this lane and all lanes below it."""
    step = 1
    while step < 32:
        below = cuda.shfl_up_sync(ALL_LANES, value, step)
        if lane >= step:
            value = int32(value + below)
        step *= 2
    return value


@device_function
def sum_of_warps_below(values, warp, lane):
    """values int32 [warps], one of each warp."""
    value = int32(0)
    if lane < warp:
        value = values[lane]
    return cuda.shfl_sync(ALL_LANES, scan_of_warp(value, lane), 31)


@cache
def top_k_function(
    *, num_threads: int, top_k: int, stripes: int = STRIPES, wide: bool = True
) -> Callable:
    """A function for kernels with `num_threads` threads per block, a power of two from 32 on.

    stripes: so many are held in registers by each warp; fewer make a smaller kernel.
    wide: rows start at multiples of 16 bytes, and the memory up to the next one behind their ends
    may be read. If not, loads are of 4 bytes, and slower.
    """
    THREADS, WARPS, K, WIDE = num_threads, num_threads // 32, top_k, wide
    UNROLL, KEYS, DIGITS_PER_THREAD = stripes, 4 * stripes, DIGITS // num_threads
    BINS = DIGITS + 1  # the last is for keys that are not counted: cheaper than a branch for each

    @device_function
    def read_keys(scores, i, end, keys):
        """The keys of scores i..i+3, i+STRIPE..i+STRIPE+3, ...; from `end` on OUTSIDE."""
        left = int32(end - i)
        for u in range(UNROLL):  # all loads are under way before the first is used
            at, last = scores + 4 * (i + u * STRIPE), int32(left - u * STRIPE - 1)
            if WIDE:
                a, b, c, d = ld16(at + 4 * min(int32(0), int32(last & ~3)))
                keys[4 * u] = a
                keys[4 * u + 1] = b
                keys[4 * u + 2] = c
                keys[4 * u + 3] = d
            else:
                for j in range(4):
                    keys[4 * u + j] = ld4(at + 4 * min(int32(j), last))
        for u in range(UNROLL):
            for j in range(4):
                key = key_of(keys[4 * u + j])
                keys[4 * u + j] = key if u * STRIPE + j < left else uint32(OUTSIDE)

    @device_function
    def top_k_of_row(
        scores,  # address of float32 [length]
        length,
        selected,  # int32 [> K], shared memory: written, K indices in ascending order
    ):
        """How many it has selected. All threads call it.

        A barrier is before the first read of a score, which the block may have written, and at the
        end.
        """
        table = cuda.shared.array(BINS, int32)  # how many keys have each digit
        found = cuda.shared.array(3, int32)  # what one thread tells the others
        keys_of_warp = cuda.shared.array(32, int32)
        below_of_warp = cuda.shared.array(32, int32)
        equal_of_warp = cuda.shared.array(32, int32)
        keys = cuda.local.array(KEYS, uint32)
        tid = cuda.threadIdx.x & 1023  # the mask tells the compiler that it is not negative
        lane, warp = tid & 31, tid >> 5
        if length <= K:
            i = tid
            while i < length:
                selected[uint32(i)] = i
                i += THREADS
            cuda.syncthreads()
            return length

        i = tid
        while i < DIGITS:
            table[uint32(i)] = 0
            i += THREADS
        stretch = (length + WARPS * STRIPE - 1) // (WARPS * STRIPE) * STRIPE
        first = warp * stretch  # of the scores of this warp
        end = min(first + stretch, length)
        held = int64(-1)  # the start of what is in `keys`
        cuda.syncthreads()

        # ---- threshold: what is below it is selected, and `need` of what is equal to it
        threshold, need = uint32(0), int32(K)
        shift = 32
        while shift > 0:
            shift = max(shift - DIGIT_BITS, 0)
            start = first
            while start < end:
                if start != held:
                    read_keys(scores, start + 4 * lane, end, keys)
                    held = start
                for n in range(KEYS):
                    # Of a key without the threshold's digits, this is no digit.
                    digit = uint32(uint32(keys[n] - threshold) >> uint32(shift))
                    cuda.atomic.add(table, min(digit, uint32(DIGITS)), 1)
                start += UNROLL * STRIPE
            cuda.syncthreads()
            own = int32(0)
            for j in range(DIGITS_PER_THREAD):
                own = int32(own + table[uint32(tid * DIGITS_PER_THREAD + j)])
            scan = scan_of_warp(own, lane)
            if lane == 31:
                keys_of_warp[warp] = scan
            cuda.syncthreads()
            before = int32(sum_of_warps_below(keys_of_warp, warp, lane) + scan - own)
            if before < need <= before + own:  # true in one thread
                for j in range(DIGITS_PER_THREAD):
                    digit = tid * DIGITS_PER_THREAD + j
                    count = table[uint32(digit)]
                    if before < need <= before + count:  # true once
                        found[0] = digit
                        found[1] = before
                        found[2] = count
                    before = int32(before + count)
            for j in range(DIGITS_PER_THREAD):
                table[uint32(tid * DIGITS_PER_THREAD + j)] = 0
            cuda.syncthreads()
            threshold = uint32(threshold + (found[0] << shift))
            need = int32(need - found[1])
            if found[2] == need:  # all of them: the threshold goes behind their last key
                threshold = uint32(threshold + (1 << shift))
                need = int32(0)
                break

        # ---- places
        below, equal = int32(0), int32(0)
        start = first
        while start < end:
            if start != held:
                read_keys(scores, start + 4 * lane, end, keys)
                held = start
            for n in range(KEYS):
                below = int32(below + (keys[n] < threshold))
                equal = int32(equal + (keys[n] == threshold))
            start += UNROLL * STRIPE
        below, equal = scan_of_warp(below, lane), scan_of_warp(equal, lane)
        if lane == 31:
            below_of_warp[warp] = below
            equal_of_warp[warp] = equal
        cuda.syncthreads()
        num_below = sum_of_warps_below(below_of_warp, warp, lane)  # that come before
        num_equal = sum_of_warps_below(equal_of_warp, warp, lane)

        # ---- list
        start = first
        while start < end:
            if start != held:
                read_keys(scores, start + 4 * lane, end, keys)
                held = start
            below, equal = int32(0), int32(0)  # a byte per stripe: a warp has 128 keys of it
            for n in range(KEYS):
                below = int32(below + (int32(keys[n] < threshold) << (n // 4 * 8)))
                equal = int32(equal + (int32(keys[n] == threshold) << (n // 4 * 8)))
            if cuda.any_sync(ALL_LANES, (below | equal) != 0):
                scan_below, scan_equal = scan_of_warp(below, lane), scan_of_warp(equal, lane)
                below, equal = int32(scan_below - below), int32(scan_equal - equal)
                scan_below = cuda.shfl_sync(ALL_LANES, scan_below, 31)
                scan_equal = cuda.shfl_sync(ALL_LANES, scan_equal, 31)
                for u in range(UNROLL):
                    b = int32(num_below + ((below >> (8 * u)) & 0xFF))
                    e = int32(num_equal + ((equal >> (8 * u)) & 0xFF))
                    for j in range(4):
                        is_below = keys[4 * u + j] < threshold
                        is_equal = keys[4 * u + j] == threshold
                        is_selected = is_below or (is_equal and e < need)
                        place = uint32(b + min(e, need)) if is_selected else uint32(K)
                        selected[place] = start + u * STRIPE + 4 * lane + j
                        b = int32(b + is_below)
                        e = int32(e + is_equal)
                    num_below = int32(num_below + ((scan_below >> (8 * u)) & 0xFF))
                    num_equal = int32(num_equal + ((scan_equal >> (8 * u)) & 0xFF))
            start += UNROLL * STRIPE
        cuda.syncthreads()
        return int64(K)

    return top_k_of_row


@cache
def top_k_of_tiles_function(
    *, num_threads: int, top_k: int, stripes: int = STRIPES, wide: bool = True
) -> Callable:
    """A function for kernels that have a block for each tile of a row; the rest as above."""
    THREADS, K = num_threads, top_k
    top_k_of_row = top_k_function(num_threads=num_threads, top_k=top_k, stripes=stripes, wide=wide)

    @device_function
    def top_k_of_tiles(
        scores,  # address of float32 [length]; each block may have written its tile of them
        length,
        tile,  # scores per tile, a multiple of 4
        longest,  # up to this length, the last block selects from the row itself
        part,  # the tile of this block: a block without a tile must not call
        candidates,  # address of float32 [tiles * min(K, tile)] scratch, at a multiple of 16 bytes
        candidate_indices,  # int32, as many: scratch
        ticket_at,  # address of an int32, 0 before and after: how many blocks have finished
        selected,  # int32 [> K], shared memory: written by the last block
    ):
        """How many the last block to finish has selected from the whole row; in the others -1."""
        ticket = cuda.shared.array(1, int32)
        tid = cuda.threadIdx.x & 1023
        num_parts = int64(uint32(length + tile - 1) // uint32(tile))
        by_tile = num_parts > 1 and length > longest
        per_tile = min(int64(K), tile)  # candidates
        first, count = int64(0), length
        if by_tile:
            first = part * tile
            count = min(length - first, tile)
        source = scores + 4 * first
        last_stage = not by_tile
        while True:  # twice if by_tile; a loop, because the code of top_k_of_row is long
            if last_stage and num_parts > 1:
                cuda.syncthreads()  # so that thread 0 releases what the whole block has stored
                if tid == 0:
                    ticket[0] = fetch_inc_wrap(ticket_at, num_parts - 1)
                cuda.syncthreads()
                if ticket[0] != num_parts - 1:
                    return int64(-1)
            count = top_k_of_row(source, count, selected)
            if last_stage:
                break
            i = tid
            while i < count:
                index = first + selected[uint32(i)]
                st4(candidates + 4 * (part * per_tile + i), ld4(scores + 4 * index))
                candidate_indices[uint32(part * per_tile + i)] = index
                i += THREADS
            rest = length - (num_parts - 1) * tile  # the last tile may have fewer
            source, count = candidates, (num_parts - 1) * per_tile + min(per_tile, rest)
            last_stage = True
        if by_tile:
            i = tid
            while i < count:
                selected[uint32(i)] = candidate_indices[uint32(selected[uint32(i)])]
                i += THREADS
            cuda.syncthreads()
        return count

    return top_k_of_tiles
