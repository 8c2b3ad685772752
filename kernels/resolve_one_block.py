"""Resolve, third rung: one block per request. The rule and the other rungs are in `resolve.py`.

The idea: many threads search at once. The selection becomes a hash table in shared memory, every
slot looks its position up, and a slot learns its place in the new order by counting: each thread
counts in a share of it, one thread adds up. A warp copies a record, 128 bytes at a time.

Reads per request: K positions, four times; B tokens; B LRU entries, twice. Writes: K slots, B LRU
entries, twice, and per miss its token and a record. Over the bus: record_bytes per miss.
Shared memory: `one_block_shared_bytes`, 86 KiB at K = 2048, B = 4096.
"""

from __future__ import annotations

from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    HOST_ADDRESS,
    cuda,
    device_function,
    int16,
    int32,
    int64,
    kernel,
    ld4_host,
    st4,
)

EMPTY = -1  # in the hash table: no key
NOT_FOUND = -1  # in `found`: no slot


def one_block_table_bits(top_k: int) -> int:
    """The hash table has 2 ** this many entries, at most half of them filled."""
    return (2 * top_k - 1).bit_length()


def one_block_shared_bytes(top_k: int, num_slots: int, num_threads: int) -> int:
    """Dynamic shared memory of resolve_one_block."""
    table = 1 << one_block_table_bits(top_k)
    return 4 * (3 * table + 2 * top_k + num_slots + num_threads + 1)


@kernel(max_threads=1024)
def resolve_one_block(
    positions: int32[:, ::1],
    seq_lens: int32[::1],
    req_pool_indices: int64[::1],
    num_real_reqs: int32[::1],
    device_buffer_tokens: int32[:, ::1],
    lru_slots: int16[:, ::1],
    num_slots: int64,
    req_to_host_pool: int32[:, ::1],
    page_size: int64,
    host_records: HOST_ADDRESS,
    records: DEVICE_ADDRESS,
    record_bytes: int64,
    top_k_device_locs: int32[:, ::1],
    new_order: int32[:, ::1],  # [R, >= B] scratch
    table_bits: int64,  # one_block_table_bits(K)
):
    """The five stages, in the paper's order: fast path, hits, LRU order, misses, copy."""
    request, tid = int64(cuda.blockIdx.x), int64(cuda.threadIdx.x)
    num_threads, top_k = int64(cuda.blockDim.x), positions.shape[1]
    row, seq_len = req_pool_indices[request], int64(seq_lens[request])
    if request >= num_real_reqs[0]:
        seq_len = int64(0)

    # ---- 1. fast path: position p is in slot p
    if seq_len <= num_slots:
        for i in range(tid, top_k, num_threads):
            p = positions[request, i]
            top_k_device_locs[request, i] = p if 0 <= p < seq_len else -1
        return

    # ---- 2. hits: the selection becomes a hash table, and each slot looks its position up
    shared = cuda.shared.array(0, int32)
    table = 1 << table_bits
    # The keys, [table], are at 0. Then:
    first = table  # [table] where in the selection a key occurs first
    found = first + table  # [table] its slot, or NOT_FOUND
    miss_rank = found + table  # [K] of the first occurrence of a miss: which miss is it?
    victims = miss_rank + top_k  # [K] the slot of each miss
    hit = victims + top_k  # [B] is the slot a hit?
    counts = hit + num_slots  # [threads + 1]
    for e in range(tid, table, num_threads):
        shared[e] = EMPTY
        shared[first + e] = top_k  # above every index
        shared[found + e] = NOT_FOUND
    cuda.syncthreads()
    for i in range(tid, top_k, num_threads):
        p = positions[request, i]
        if 0 <= p < seq_len - 1:
            e = hash_of(p, table_bits)
            key = cuda.atomic.cas(shared, e, EMPTY, p)
            while key != EMPTY and key != p:
                e = (e + 1) & (table - 1)
                key = cuda.atomic.cas(shared, e, EMPTY, p)
            cuda.atomic.min(shared, first + e, i)
    cuda.syncthreads()
    for slot in range(tid, num_slots, num_threads):
        e = lookup(shared, table_bits, device_buffer_tokens[row, slot])
        shared[hit + slot] = 0
        if e >= 0:
            shared[hit + slot] = 1
            shared[found + e] = slot
    cuda.syncthreads()

    # ---- 3. LRU order: each thread counts in a share, and so learns where its own part goes.
    # First in the selection: the misses are numbered.
    begin, end = share(top_k, tid, num_threads)
    count = int64(0)
    for i in range(begin, end):
        e = lookup(shared, table_bits, positions[request, i])
        if e >= 0 and shared[found + e] == NOT_FOUND and shared[first + e] == i:
            count += 1
    miss = sum_below(shared, counts, count)
    num_misses = int64(shared[counts + num_threads])
    for i in range(begin, end):
        e = lookup(shared, table_bits, positions[request, i])
        if e >= 0 and shared[found + e] == NOT_FOUND and shared[first + e] == i:
            shared[miss_rank + i] = miss
            miss += 1
    # Then in the order: the rest, which are no hit, move up; the first of them become victims.
    begin, end = share(num_slots, tid, num_threads)
    count = int64(0)
    for i in range(begin, end):
        count += 1 - shared[hit + lru_slots[row, i]]
    rest_rank = sum_below(shared, counts, count)
    num_rest = int64(shared[counts + num_threads])
    for i in range(begin, end):
        slot = lru_slots[row, i]
        if shared[hit + slot] == 1:
            new_order[request, num_rest + i - rest_rank] = slot  # among the most recent
        else:
            if rest_rank < num_misses:
                shared[victims + rest_rank] = slot
                new_order[request, num_rest - num_misses + rest_rank] = slot  # in between
            else:
                new_order[request, rest_rank - num_misses] = slot  # among the least recent
            rest_rank += 1
    cuda.syncthreads()
    for i in range(tid, num_slots, num_threads):
        lru_slots[row, i] = new_order[request, i]

    # ---- 4. misses: they take the least recent slots, in the order of the selection
    for i in range(tid, top_k, num_threads):
        p = positions[request, i]
        slot = int64(-1)
        if p == seq_len - 1:
            slot = num_slots
        elif 0 <= p < seq_len:
            e = lookup(shared, table_bits, p)
            slot = int64(shared[found + e])
            if slot == NOT_FOUND:
                slot = int64(shared[victims + shared[miss_rank + shared[first + e]]])
                device_buffer_tokens[row, slot] = p
        top_k_device_locs[request, i] = slot
    cuda.syncthreads()

    # ---- 5. copy: a warp per record
    for m in range(tid // 32, num_misses, num_threads // 32):
        slot = int64(shared[victims + m])
        p = device_buffer_tokens[row, slot]
        host_row = req_to_host_pool[row, p // page_size] * page_size + p % page_size
        source = host_records + host_row * record_bytes
        target = records + (row * (num_slots + 1) + slot) * record_bytes
        for offset in range(4 * (tid % 32), record_bytes, 128):
            st4(target + offset, ld4_host(source + offset))


@device_function
def hash_of(position, table_bits):
    """Spreads neighbouring and regularly spaced positions over the table (Fibonacci hashing)."""
    return ((position * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - table_bits)


@device_function
def lookup(shared, table_bits, position):
    """The entry of a position in the hash table, or -1."""
    if position < 0:
        return int64(-1)
    e = hash_of(position, table_bits)
    while shared[e] != position:
        if shared[e] == EMPTY:
            return int64(-1)
        e = (e + 1) & ((1 << table_bits) - 1)
    return e


@device_function
def share(length, tid, num_threads):
    """The part of 0..length-1 that belongs to this thread: begin and end."""
    size = (length + num_threads - 1) // num_threads
    return min(tid * size, length), min((tid + 1) * size, length)


@device_function
def sum_below(shared, counts, count):
    """The sum of `count` over the threads before this one; the sum of all is left at the end."""
    tid, num_threads = cuda.threadIdx.x, cuda.blockDim.x
    shared[counts + tid] = count
    cuda.syncthreads()
    if tid == 0:
        total = 0
        for t in range(num_threads):
            total += shared[counts + t]
            shared[counts + t] = total - shared[counts + t]
        shared[counts + num_threads] = total
    cuda.syncthreads()
    return int64(shared[counts + tid])
