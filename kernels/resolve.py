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

This file holds the sequential oracle, which is meant to be obviously right and never gets clever.
`resolve_torch.py` holds the same rule vectorised; both agree on every state tensor in the tests.
It deliberately does not know where records live, nor how they are moved.
"""

from __future__ import annotations

from typing import NamedTuple


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
