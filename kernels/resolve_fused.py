"""Resolve, fourth rung: the kernel in use. The rule and the other rungs are in `resolve.py`.

Hit detection, LRU replacement and fetch in one launch. What it does differently, each idea with its
gain, is listed in the header of `resolve.py`; in words, for one request with S > B:

    table    the K selected positions become the keys of a hash table in shared memory; it is so
             sparse that searches end at once, and has no values: a key turns into its answer
    hits     every slot's position is looked up; a hit writes its slot over the key, and a vote of
             32 threads makes one word of `hit_bits`
    counts   slots that are no hit and misses are counted by votes; both counts of a warp share one
             32-bit word, so one scan over the warps ranks both
    places   a slot's rank gives its place in the new LRU order; the first ones go to the misses
    answers  each selected position reads its table entry: a slot, or the rank of its miss
    fetch    all blocks of the request copy, `copy_records.py`

With several blocks per request, whichever starts first plans; the others wait for its plan, which
lies in memory. Nobody waits for a block that has not started, so no order of blocks can deadlock.

Everything of a slot or position stays in registers from stage to stage: element i of a table
belongs to lane i % 32 of warp i // (32 * TILES), so that ranks in a warp follow the table's order.

Reads per block: K positions, B tokens, B LRU entries; per request: a page entry per position.
Writes per request: K slots, B LRU entries, and per miss its token and a record. Over the bus:
record_bytes per miss, no more. Shared memory: 4 * (table + 2 K) bytes, 49,152 at K = 2048.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from minihisparse.kernels.copy_records import copy_function
from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    HOST_ADDRESS,
    Kernel,
    cuda,
    fetch_inc_wrap,
    int16,
    int32,
    int64,
    kernel,
    load_acquire,
    store_release,
    uint32,
)
from minihisparse.kernels.resolve_one_block import EMPTY, hash_of

ALL_LANES = 0xFFFFFFFF
MISS = 0x10000  # in the hash table: a miss, with its rank in the lower bits; below: a slot
READABLE, WERE_EMPTY, TICKET, LENGTH = range(4)  # what the words of `shared_words` are


class FusedKernel(NamedTuple):
    kernel: Kernel
    shared_bytes: int


@cache
def fused_kernel(
    *,
    num_threads: int,
    top_k: int,
    num_slots: int,
    record_bytes_are_16s: bool,
    several_blocks: bool,
    skip_io: bool = False,
    record_plan: bool = False,
    checked: bool = False,
) -> FusedKernel:
    """The kernel, made for these sizes and switches."""
    THREADS, WARPS = num_threads, num_threads // 32
    K_TILES = -(-top_k // num_threads)  # selected positions per thread
    B_TILES = -(-num_slots // num_threads)  # slots per thread
    SEVERAL, CHECKED, RECORD_PLAN, SKIP_IO = several_blocks, checked, record_plan, skip_io
    PLAN = record_plan or not skip_io
    PLAN_IN_MEMORY = record_plan or (several_blocks and not skip_io)
    # Four times the keys: three of four entries stay empty, and a search ends soon.
    TABLE_BITS = (4 * top_k - 1).bit_length()
    TABLE, MASK = 1 << TABLE_BITS, (1 << TABLE_BITS) - 1
    PLAN_SLOTS = TABLE  # after the table, in shared memory: the slot of each miss
    PLAN_ROWS = TABLE + top_k  # and its host row
    HIT_WORDS = B_TILES * WARPS
    copy_records = copy_function(record_bytes_are_16s)

    @kernel(max_threads=num_threads)
    def resolve_fused(
        positions: int32[:, ::1],  # [R, K] read; from the selector
        seq_lens: int32[::1],  # [R] read
        req_pool_indices: int64[::1],  # [R] read
        num_real_reqs: int32[::1],  # [1] read
        device_buffer_tokens: int32[:, ::1],  # [max_requests, >= B] read; misses are entered
        lru_slots: int16[:, ::1],  # [max_requests, >= B] read; rewritten in the new order
        num_slots: int64,  # B of this layer
        req_to_host_pool: int32[:, ::1],  # [max_requests, pages] read
        page_size: int64,
        host_records: HOST_ADDRESS,  # [host_rows, record_bytes] read
        records: DEVICE_ADDRESS,  # [max_requests, B + 1, record_bytes] missed records are written
        record_bytes: int64,
        top_k_device_locs: int32[:, ::1],  # [R, K] every entry is written
        miss_host_rows: int32[:, ::1],  # [R, K] the miss plan: written up to its length
        miss_slots: int32[:, ::1],  # [R, K] likewise
        miss_counts: int32[::1],  # [R] written, the plan's length, if record_plan
        counters: int64[::1],  # [3] hits, misses and evictions are added
        error: int64[::1],  # [1] if checked: lowered to the first bad entry, request * K + index
        handover: DEVICE_ADDRESS,  # [3, R] int32, 0 before and after
        blocks_per_request: int64,
    ):
        shared = cuda.shared.array(0, int32)
        hit_bits = cuda.shared.array(HIT_WORDS, int32)
        warp_totals = cuda.shared.array(WARPS, int32)
        shared_words = cuda.shared.array(4, int32)
        p_of = cuda.local.array(K_TILES, int32)
        page_of = cuda.local.array(K_TILES, int32)
        entry_of = cuda.local.array(K_TILES, int32)
        miss_bits = cuda.local.array(K_TILES, int32)
        token_of = cuda.local.array(B_TILES, int32)
        found_at = cuda.local.array(B_TILES, int32)
        slot_of = cuda.local.array(B_TILES, int32)
        rest_bits = cuda.local.array(B_TILES, int32)
        place_of = cuda.local.array(B_TILES, int32)

        tid = cuda.threadIdx.x & 1023  # the mask tells the compiler that it is not negative
        lane, warp = tid & 31, tid >> 5
        below = cuda.lanemask_lt()
        num_requests, top_k = int64(positions.shape[0]), positions.shape[1]

        # ---- which block is this? The first block of a request that starts plans for all of them
        request = int64(cuda.blockIdx.x)
        if SEVERAL:
            request = int64(uint32(request) // uint32(blocks_per_request))
        ticket_at = handover + 4 * request  # how many of the request's blocks have started
        ready_at = ticket_at + 4 * num_requests  # 0, or the plan's length + 1
        taken_at = ready_at + 4 * num_requests  # how many helpers have seen it
        if SEVERAL:
            if tid == 0:
                shared_words[TICKET] = fetch_inc_wrap(ticket_at, blocks_per_request - 1)

        refused = 0
        if CHECKED:
            # Each block looks at every request: if one is wrong, nobody's state changes.
            bad = False
            for r in range(min(num_requests, num_real_reqs[0])):
                for i in range(tid, top_k, THREADS):
                    if positions[r, i] < -1 or positions[r, i] >= seq_lens[r]:
                        bad = True
                        cuda.atomic.min(error, 0, r * top_k + i)
            refused = cuda.syncthreads_or(int32(bad))

        # ---- loads that depend on nothing else, all under way before the first is used
        row, seq_len = req_pool_indices[request], int64(seq_lens[request])
        if request >= num_real_reqs[0]:
            row, seq_len = int64(0), int64(0)  # what padding says is not to be trusted
        if refused:
            seq_len = int64(0)  # answered like padding
        for j in range(K_TILES):
            i = (warp * K_TILES + j) * 32 + lane
            p_of[j] = positions[request, i] if i < top_k else -1
        for j in range(B_TILES):
            slot = j * THREADS + tid
            token_of[j] = device_buffer_tokens[row, slot] if slot < num_slots else -2
        for j in range(B_TILES):
            i = (warp * B_TILES + j) * 32 + lane
            slot_of[j] = lru_slots[row, i] if i < num_slots else -1
        for e in range(tid, TABLE, THREADS):
            shared[e] = EMPTY
        if tid == 0:
            shared_words[READABLE] = 0
            shared_words[WERE_EMPTY] = 0
        cuda.syncthreads()

        part = int64(0)
        if SEVERAL:
            part = int64(shared_words[TICKET])
        num_misses = int64(0)
        if part == 0:
            newest = seq_len - 1
            num_readable = int64(0)
            for j in range(K_TILES):
                readable = cuda.ballot_sync(ALL_LANES, 0 <= p_of[j] <= newest)
                num_readable += int64(cuda.popc(readable))
            if lane == 0:
                cuda.atomic.add(shared_words, READABLE, num_readable)

            if seq_len <= num_slots:
                # ---- fast path: position p is in slot p
                for j in range(K_TILES):
                    i = (warp * K_TILES + j) * 32 + lane
                    if i < top_k:
                        p = p_of[j]
                        top_k_device_locs[request, i] = p if 0 <= p <= newest else -1
                cuda.syncthreads()  # shared_words[READABLE] is complete
            else:
                # ---- the selection becomes a hash table in shared memory
                firsts = 0  # bit j: this thread's j-th position does not occur before
                repeated = False
                for j in range(K_TILES):
                    p = p_of[j]
                    entry_of[j] = -1
                    if 0 <= p < newest:
                        if PLAN:
                            page_of[j] = req_to_host_pool[row, uint32(p) // uint32(page_size)]
                        e = hash_of(p, TABLE_BITS)
                        key = cuda.atomic.cas(shared, e, EMPTY, p)
                        while key != EMPTY and key != p:
                            e = (e + 1) & MASK
                            key = cuda.atomic.cas(shared, e, EMPTY, p)
                        entry_of[j] = e
                        if key == EMPTY:
                            firsts |= 1 << j
                        else:
                            repeated = True
                if cuda.syncthreads_or(int32(repeated)):
                    # Rare. Whoever came first in time has the entry: give it to the lowest index.
                    # Indices less 2 ** 30 are below every key, so the least one replaces the key.
                    for j in range(K_TILES):
                        i = (warp * K_TILES + j) * 32 + lane
                        if entry_of[j] >= 0:
                            cuda.atomic.min(shared, entry_of[j], i - (1 << 30))
                    cuda.syncthreads()
                    firsts = 0
                    for j in range(K_TILES):
                        i = (warp * K_TILES + j) * 32 + lane
                        if entry_of[j] >= 0:
                            if shared[entry_of[j]] == i - (1 << 30):
                                firsts |= 1 << j
                    cuda.syncthreads()
                    for j in range(K_TILES):
                        if (firsts >> j) & 1:
                            shared[entry_of[j]] = p_of[j]
                    cuda.syncthreads()

                # ---- hits: which slots hold a selected position?
                empty = False
                for j in range(B_TILES):
                    t = token_of[j]
                    hit = False
                    found_at[j] = -1
                    if t >= 0:
                        e = hash_of(t, TABLE_BITS)
                        key = shared[e]
                        while key != t and key != EMPTY:
                            e = (e + 1) & MASK
                            key = shared[e]
                        if key == t:
                            hit = True
                            found_at[j] = e
                    elif t == -1:
                        empty = True
                    bits = cuda.ballot_sync(ALL_LANES, hit)
                    if lane == 0:
                        hit_bits[j * WARPS + warp] = bits
                any_empty = cuda.syncthreads_or(int32(empty))

                # ---- count what is not hit, and the misses, below this warp and in all
                totals = int64(0)
                for j in range(B_TILES):
                    if found_at[j] >= 0:  # all searches have ended: the slot goes over the key
                        shared[found_at[j]] = -2 - (j * THREADS + tid)
                    s = slot_of[j]
                    rest = False
                    if s >= 0:
                        rest = ((hit_bits[s >> 5] >> (s & 31)) & 1) == 0
                    rest_bits[j] = cuda.ballot_sync(ALL_LANES, rest)
                    totals += int64(cuda.popc(rest_bits[j]))
                cuda.syncthreads()  # the keys that are left are those of misses
                for j in range(K_TILES):
                    miss = False
                    if (firsts >> j) & 1:
                        miss = shared[entry_of[j]] >= 0
                    miss_bits[j] = cuda.ballot_sync(ALL_LANES, miss)
                    totals += int64(cuda.popc(miss_bits[j])) << 16
                if lane == 0:
                    warp_totals[warp] = totals
                cuda.syncthreads()
                running = int32(0)  # kept at 32 bits: a shuffle of 64 is two
                if lane < WARPS:
                    running = warp_totals[lane]
                step = 1
                while step < 32:
                    other = cuda.shfl_up_sync(ALL_LANES, running, step)
                    if lane >= step:
                        running = int32(running + other)
                    step *= 2
                block_totals = int64(cuda.shfl_sync(ALL_LANES, running, 31))
                before = int64(cuda.shfl_sync(ALL_LANES, running, warp)) - totals
                num_rest, num_misses = block_totals & 0xFFFF, block_totals >> 16
                rest_before, misses_before = before & 0xFFFF, before >> 16

                # ---- the new LRU order; its least recent slots are given to the misses
                for j in range(B_TILES):
                    i = (warp * B_TILES + j) * 32 + lane
                    s = slot_of[j]
                    bits = rest_bits[j]
                    rank = rest_before + int64(cuda.popc(uint32(bits & below)))
                    if (bits >> lane) & 1:
                        if rank < num_misses:
                            shared[PLAN_SLOTS + rank] = s
                            if PLAN_IN_MEMORY:
                                miss_slots[request, rank] = s
                            place_of[j] = num_rest - num_misses + rank  # filled: in between
                        else:
                            place_of[j] = rank - num_misses  # untouched: least recent
                    else:
                        place_of[j] = num_rest + i - rank  # hit: most recent
                    rest_before += int64(cuda.popc(bits))
                for j in range(K_TILES):
                    bits = miss_bits[j]
                    if (bits >> lane) & 1:
                        rank = misses_before + int64(cuda.popc(uint32(bits & below)))
                        shared[entry_of[j]] = -2 - (MISS + rank)
                        if PLAN:
                            p = p_of[j]
                            offset = int64(uint32(p) % uint32(page_size))
                            host_row = page_of[j] * page_size + offset
                            shared[PLAN_ROWS + rank] = host_row
                            if PLAN_IN_MEMORY:
                                miss_host_rows[request, rank] = host_row
                    misses_before += int64(cuda.popc(bits))
                cuda.syncthreads()

            if SEVERAL and not SKIP_IO:
                if tid == 0:  # after a barrier, so that it releases what the whole block has stored
                    store_release(ready_at, num_misses + 1)

            if seq_len > num_slots:
                # ---- write the answer and the state
                for j in range(B_TILES):
                    if slot_of[j] >= 0:
                        lru_slots[row, place_of[j]] = slot_of[j]
                for j in range(K_TILES):
                    i = (warp * K_TILES + j) * 32 + lane
                    slot = int64(-1)
                    if p_of[j] == newest:
                        slot = num_slots
                    elif entry_of[j] >= 0:
                        slot = -2 - shared[entry_of[j]]
                        if slot >= MISS:
                            slot = int64(shared[PLAN_SLOTS + slot - MISS])
                        if (miss_bits[j] >> lane) & 1:
                            if any_empty:
                                if device_buffer_tokens[row, slot] == -1:
                                    cuda.atomic.add(shared_words, WERE_EMPTY, 1)
                            device_buffer_tokens[row, slot] = p_of[j]
                    if i < top_k:
                        top_k_device_locs[request, i] = slot
                if any_empty:
                    cuda.syncthreads()  # shared_words[WERE_EMPTY] is complete
            if tid == 0:
                if RECORD_PLAN:
                    miss_counts[request] = num_misses
                cuda.atomic.add(counters, 0, int64(shared_words[READABLE]) - num_misses)
                cuda.atomic.add(counters, 1, num_misses)
                cuda.atomic.add(counters, 2, num_misses - shared_words[WERE_EMPTY])
        elif not SKIP_IO:
            # ---- a helper: waits for the plan; the last one to have it clears the flag
            if tid == 0:
                flag = load_acquire(ready_at)
                while flag == 0:
                    flag = load_acquire(ready_at)
                shared_words[LENGTH] = flag - 1
                last = blocks_per_request - 2  # helpers count from 0
                if fetch_inc_wrap(taken_at, last) == last:
                    store_release(ready_at, 0)
            cuda.syncthreads()
            num_misses = int64(shared_words[LENGTH])

        # ---- fetch
        if not SKIP_IO:
            slot_address = records + row * (num_slots + 1) * record_bytes
            thread = part * THREADS + tid
            num_threads = blocks_per_request * THREADS
            if SEVERAL:
                copy_records(
                    num_misses,
                    miss_host_rows[request],
                    miss_slots[request],
                    host_records,
                    slot_address,
                    record_bytes,
                    thread,
                    num_threads,
                )
            else:
                copy_records(
                    num_misses,
                    shared[PLAN_ROWS:],
                    shared[PLAN_SLOTS:PLAN_ROWS],
                    host_records,
                    slot_address,
                    record_bytes,
                    thread,
                    num_threads,
                )

    return FusedKernel(resolve_fused, 4 * (TABLE + 2 * top_k))
