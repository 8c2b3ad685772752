"""The policies of `replay.py`, and the loop that runs one of them over one request in one layer.

    policy(cache, found)     one step of one request in one layer; what it evicts, and for whom
    replay_request(...)      all steps of a request: looks up, asks the policy, fills the slots

found [n] int32 holds the slot of each selected position, ascending by position; -1: a miss. The
policy writes into each -1 the slot that the position gets, which is none of the others, and updates
what it remembers. What the policies are, and the rules that all of them share: `replay.py`.

Cost: per step O(B), with a sort of O(B log B) for random, lfu and belady.

Compiled by Numba for the CPU, some ten seconds once; then its cache on disk has it. That cache
looks at the caller's file only: the policies must stay in one file with who calls them. It
deliberately does not know traces, threads or layers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

POLICIES = ("last_step", "random", "fifo", "clock", "lfu", "lru", "engine", "belady")
LAST_STEP, RANDOM, FIFO, CLOCK, LFU, LRU, ENGINE, BELADY = range(len(POLICIES))
NEVER = np.int32(2**31 - 1)  # a step that does not come


class Cache(NamedTuple):
    """One request's cache in one layer, and all that some policy remembers."""

    tokens: np.ndarray  # [B] int32, the position in each slot, -1: none
    slot_of: np.ndarray  # [S] int32, the slot of each position, -1: none
    order: np.ndarray  # [B] int32, the slots in the policy's own order, first to go first
    uses: np.ndarray  # [B] int32, lfu: steps that used a slot since it was filled
    referenced: np.ndarray  # [B] bool, clock: used since the hand last passed
    hand: np.ndarray  # [1] int64, clock: the slot that is looked at next
    next_use: np.ndarray  # [S] int32, belady: the next step that selects a position, or NEVER


@njit(cache=True, nogil=True)
def split(slots, members):
    """`slots` without and with those that are in `members` (-1 is nobody); both keep the order."""
    is_member = np.zeros(len(slots), np.bool_)  # by slot: there are no others than `slots`
    for slot in members:
        if slot >= 0:
            is_member[slot] = True
    return slots[~is_member[slots]], slots[is_member[slots]]


@njit(cache=True, nogil=True)
def place(found, candidates):
    """The m-th miss takes the m-th candidate; the number of misses."""
    misses = 0
    for i in range(len(found)):
        if found[i] < 0:
            found[i] = candidates[misses]
            misses += 1
    return misses


@njit(cache=True, nogil=True)
def arrange(order, first, last):
    """Makes `order` [first..., last...]."""
    order[: len(first)], order[len(first) :] = first, last


@njit(cache=True, nogil=True)
def lowest_first(slots, keys):
    """The slots by their keys [len(slots)] float64; equal ones in the order that they have."""
    return slots[np.argsort(keys, kind="mergesort")]


# ---- the policies ----


@njit(cache=True, nogil=True)
def last_step(cache, found):
    unused, _ = split(cache.order, found)
    for slot in unused:
        if cache.tokens[slot] >= 0:
            cache.slot_of[cache.tokens[slot]] = -1
            cache.tokens[slot] = -1
    place(found, unused)


@njit(cache=True, nogil=True)
def random(cache, found):
    unused, _ = split(cache.order, found)
    draws = np.random.random(len(unused))
    draws[cache.tokens[unused] < 0] = -1.0  # before every other
    place(found, lowest_first(unused, draws))


@njit(cache=True, nogil=True)
def fifo(cache, found):
    unused, _ = split(cache.order, found)
    misses = place(found, unused)
    stay, filled = split(cache.order, unused[:misses])
    arrange(cache.order, stay, filled)


@njit(cache=True, nogil=True)
def clock(cache, found):
    in_use = np.zeros(len(cache.tokens), np.bool_)
    for slot in found:
        if slot >= 0:
            in_use[slot] = cache.referenced[slot] = True
    hand = cache.hand[0]
    for i in range(len(found)):
        if found[i] >= 0:
            continue
        while in_use[hand] or cache.referenced[hand]:
            if not in_use[hand]:
                cache.referenced[hand] = False  # spared, once
            hand = (hand + 1) % len(in_use)
        found[i] = hand
        in_use[hand] = cache.referenced[hand] = True
        hand = (hand + 1) % len(in_use)
    cache.hand[0] = hand


@njit(cache=True, nogil=True)
def lfu(cache, found):
    unused, _ = split(cache.order, found)
    unused = lowest_first(unused, cache.uses[unused].astype(np.float64))
    misses = place(found, unused)
    cache.uses[unused[:misses]] = 0
    cache.uses[found] += 1
    unused, _ = split(cache.order, found)
    arrange(cache.order, unused, found)


@njit(cache=True, nogil=True)
def lru(cache, found):
    unused, _ = split(cache.order, found)
    misses = place(found, unused)
    arrange(cache.order, unused[misses:], found)


@njit(cache=True, nogil=True)
def engine(cache, found):
    unused, used = split(cache.order, found)
    misses = place(found, unused)
    arrange(cache.order, unused, used)
    arrange(cache.order[: len(unused)], unused[misses:], unused[:misses])


@njit(cache=True, nogil=True)
def belady(cache, found):
    unused, _ = split(cache.order, found)
    until_use = np.full(len(unused), np.inf)
    for i, slot in enumerate(unused):
        if cache.tokens[slot] >= 0:
            until_use[i] = cache.next_use[cache.tokens[slot]]
    place(found, lowest_first(unused, -until_use))


# ---- one request in one layer ----


@njit(cache=True, nogil=True)
def uses_ahead(positions, num_positions):
    """When each position is used next: [steps, K] after a step, [num_positions] from the start."""
    next_use = np.full(num_positions, NEVER, np.int32)
    after = np.full(positions.shape, NEVER, np.int32)
    for step in range(len(positions) - 1, -1, -1):
        for i, position in enumerate(positions[step]):
            if position >= 0:
                after[step, i] = next_use[position]
                next_use[position] = step
    return after, next_use


@njit(cache=True, nogil=True)
def replay_request(policy, positions, seq_lens, num_slots, seed, hits, misses):
    """Adds a request's hits and misses to those of its steps.

    positions [steps, K] int32, seq_lens [steps] int32, consecutive; hits, misses [steps] int64.
    """
    np.random.seed(seed)
    after, next_use = positions[:0], positions[0, :0]
    if policy == BELADY:
        after, next_use = uses_ahead(positions, seq_lens[-1])
    cache = Cache(
        tokens=np.full(num_slots, -1, np.int32),
        slot_of=np.full(seq_lens[-1], -1, np.int32),
        order=np.arange(num_slots).astype(np.int32),
        uses=np.zeros(num_slots, np.int32),
        referenced=np.zeros(num_slots, np.bool_),
        hand=np.zeros(1, np.int64),
        next_use=next_use,
    )
    prompt_len = seq_lens[0] - 1
    if prompt_len <= num_slots:
        cache.tokens[:prompt_len] = cache.slot_of[:prompt_len] = cache.order[:prompt_len]

    for step in range(len(positions)):
        newest = seq_lens[step] - 1
        resident = newest < num_slots  # S <= B
        if resident:
            cache.tokens[newest] = cache.slot_of[newest] = newest
        selected = positions[step][positions[step] >= 0]
        hits[step] += len(selected)
        if not resident and len(selected) and selected[-1] == newest:
            selected = selected[:-1]
        found = cache.slot_of[selected]
        num_misses = (found < 0).sum()
        hits[step] -= num_misses
        misses[step] += num_misses

        if policy == RANDOM:
            random(cache, found)
        elif policy == FIFO:
            fifo(cache, found)
        elif policy == CLOCK:
            clock(cache, found)
        elif policy == LFU:
            lfu(cache, found)
        elif policy == LRU:
            lru(cache, found)
        elif policy == BELADY:
            belady(cache, found)
            next_use[selected] = after[step, : len(selected)]
        elif policy == ENGINE and not resident:
            engine(cache, found)
        elif policy == LAST_STEP and not resident:
            last_step(cache, found)

        for position, slot in zip(selected, found):  # noqa: B905, which Numba cannot compile
            old = cache.tokens[slot]
            if old != position:
                if old >= 0:
                    cache.slot_of[old] = -1
                cache.tokens[slot] = position
                cache.slot_of[position] = slot
