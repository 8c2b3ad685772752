"""Resolve, the heart of HiSparse: from selected positions to resident slots.

Per request and layer the device keeps B slots. Resolve gets the K positions that the selector
chose, finds those already in a slot (hits), lets the others (misses) take the slots that were used
least recently, says which records must be fetched, and answers with one slot per position.

Upstream names: device_buffer_tokens (here `tokens`), lru_slots, top_k_device_locs (the answer).

The replacement rule, for a request of seq_len S > B (S - 1 is the newest position):

    positions already in a slot are hits; the newest position is always in slot B;
    the m-th miss, in selection order, takes the m-th slot of the LRU order that is not a hit;
    new LRU order = [untouched, old order] + [just filled, in miss order] + [hits, old order].

While S <= B every position p sits in slot p: Resolve answers p and changes nothing. One call, B =
4:

    positions        [4, 2, 7, 9]     S = 10, so 9 is the newest: slot 4
    tokens before    slot 0: 1   slot 1: 4   slot 2: 2   slot 3: 5       lru_slots [0, 1, 2, 3]
                             |          hit         hit
                             v evicted: the least recent slot that is not a hit
    tokens after     slot 0: 7   slot 1: 4   slot 2: 2   slot 3: 5       lru_slots [3, 0, 1, 2]
    answer           [1, 2, 0, 4]     to fetch: position 7 into slot 0

The ladder. Every rung answers the same to the bit, in every table and every copied byte, and each
adds one idea. Microseconds per call at K = 2048, B = 4096, records of 1152 bytes, one request with
256 misses, on one H200 (PCIe 5), 2026-11-30; BENCHMARKS.md has the gain of each part of the last:

    oracle        in Python, below: meant to be obviously right, never clever                  -
    one thread    the oracle as a kernel, a thread per request, below; it searches each
                  position in all slots, one after the other                             551,000
    one block     `resolve_one_block.py`: many threads search at once, in a hash table;
                  a slot's place comes from sums; one warp copies a record                   120
    fused         `resolve_fused.py`: votes instead of sums in memory, a sparse table of
                  keys alone, all in registers, blocks that help to copy, many reads of
                  the host under way (`copy_records.py`)                                      18

`resolve_torch.py` has the rule vectorised, for machines without a GPU. Arguments of the kernels:

    name                  shape, dtype                         who writes it
    positions             [R, K] int32                         the selector
    seq_lens              [R] int32                            the engine, each step
    req_pool_indices      [R] int64                            the engine, each step
    num_real_reqs         [1] int32                            the engine; rows beyond are padding
    device_buffer_tokens  [max_requests, >= B] int32           Resolve, write-through
    lru_slots             [max_requests, >= B] int16           Resolve
    num_slots             int                                  B of this layer
    req_to_host_pool      [max_requests, pages] int32          the host pool, at admission: a page
                                                               for every position below seq_len
    page_size             int                                  positions per page
    host_records          [host rows, record_bytes], pinned    write-through, prefill
    records               [max_requests, B + 1, record_bytes]  Resolve, write-through
    top_k_device_locs     [R, K] int32                         Resolve: every entry, every call

It deliberately does not know who selected the positions, nor what a record holds.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Fetch(NamedTuple):
    """A record to bring in: `position` goes into `slot`, which held `evicted` (-1: nothing)."""

    position: int
    slot: int
    evicted: int


def resolve_oracle(
    positions: list[int],
    seq_len: int,
    tokens: list[int],
    lru_slots: list[int],
    *,
    checked: bool = False,
) -> tuple[list[int], list[Fetch]]:
    """Resolves one request in one layer, one position after the other.

    positions: K logical positions in any order; duplicates are allowed, -1 is padding.
    tokens: B entries, the position in each slot or -1; changed in place.
    lru_slots: B entries, a permutation of the slots, least recent first; changed in place.
    Returns the K slots (-1 where the position is padding or out of range) and the miss plan.
    Raises ValueError in checked mode if a position is below -1 or not below `seq_len`.
    """
    newest_slot = len(tokens)  # B: one slot more than the LRU knows of

    def readable(position: int) -> bool:
        if checked and not -1 <= position < seq_len:
            raise ValueError(f"position {position} is out of range: seq_len is {seq_len}")
        return 0 <= position < seq_len

    if seq_len <= len(tokens):
        return [p if readable(p) else -1 for p in positions], []

    slot_of = {position: slot for slot, position in enumerate(tokens) if position != -1}
    slot_of[seq_len - 1] = newest_slot
    hits = {slot_of[p] for p in positions if readable(p) and p in slot_of}
    candidates = [slot for slot in lru_slots if slot not in hits]

    slots, plan = [], []
    for position in positions:
        if not readable(position):
            slots.append(-1)
            continue
        if position not in slot_of:
            slot = candidates[len(plan)]
            plan.append(Fetch(position, slot, evicted=tokens[slot]))
            tokens[slot] = position
            slot_of[position] = slot  # a duplicate further on finds it here
        slots.append(slot_of[position])

    untouched, filled = candidates[len(plan) :], candidates[: len(plan)]
    lru_slots[:] = untouched + filled + [slot for slot in lru_slots if slot in hits]
    return slots, plan


# ---- second rung: one thread per request ----

KEPT, HIT, FILLED = 0, 1, 2  # what a call did to a slot


@kernel(max_threads=1024)
def resolve_one_thread(
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
    scratch: int32[:, ::1],  # [R, 2 * B], overwritten
):
    """The oracle, step by step, for as many requests as there are threads."""
    request = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x
    if request >= positions.shape[0]:
        return
    row, seq_len = req_pool_indices[request], int64(seq_lens[request])
    if request >= num_real_reqs[0]:
        seq_len = int64(0)
    if seq_len <= num_slots:
        for i in range(positions.shape[1]):
            p = positions[request, i]
            top_k_device_locs[request, i] = p if 0 <= p < seq_len else -1
        return

    for slot in range(num_slots):
        scratch[request, slot] = KEPT
    for i in range(positions.shape[1]):
        p = positions[request, i]
        if 0 <= p < seq_len - 1:
            slot = find(device_buffer_tokens, row, num_slots, p)
            if slot >= 0:
                scratch[request, slot] = HIT
    candidate = 0
    for i in range(positions.shape[1]):
        p = positions[request, i]
        slot = int64(-1)
        if p == seq_len - 1:
            slot = num_slots
        elif 0 <= p < seq_len:
            slot = find(device_buffer_tokens, row, num_slots, p)
            if slot < 0:
                while scratch[request, lru_slots[row, candidate]] != KEPT:
                    candidate += 1  # a hit, or filled for an earlier miss
                slot = int64(lru_slots[row, candidate])
                scratch[request, slot] = FILLED
                device_buffer_tokens[row, slot] = p
                host_row = req_to_host_pool[row, p // page_size] * page_size + p % page_size
                source = host_records + host_row * record_bytes
                target = records + (row * (num_slots + 1) + slot) * record_bytes
                for offset in range(0, record_bytes, 4):
                    st4(target + offset, ld4_host(source + offset))
        top_k_device_locs[request, i] = slot

    place = num_slots
    for state in (KEPT, FILLED, HIT):
        for i in range(num_slots):
            slot = lru_slots[row, i]
            if scratch[request, slot] == state:
                scratch[request, place] = slot
                place += 1
    for i in range(num_slots):
        lru_slots[row, i] = scratch[request, num_slots + i]


@device_function
def find(device_buffer_tokens, row, num_slots, position):
    """The slot that holds a position, or -1."""
    for slot in range(num_slots):
        if device_buffer_tokens[row, slot] == position:
            return slot
    return int64(-1)
