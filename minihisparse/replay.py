"""Replay: what would another cache have fetched? A recorded trace of selections, any policy, any B.

What was selected does not depend on where records live, so one trace tells the hits and misses of
every cache: users choose B with it (the paper's Figure 6). The policies, shortest memory first:

    last_step   keeps the last step's selection and nothing else (Figure 6's B = K)
    random      evicts any slot
    fifo        evicts what was fetched first
    clock       fifo, but what was used since the hand last passed is spared once
    lfu         evicts what was used in the fewest steps since it was fetched; then as lru
    lru         evicts what was used least recently
    engine      the engine's rule (`kernels/resolve.py`), number for number: lru, but hits rank
                above what was just fetched, and Resolve changes nothing while S <= B
    belady      evicts what is needed again last: no policy misses less; it needs the future

The rules that all of them share:

    A step selects a set. All of it must be resident at once: no policy evicts what the step uses.
    The newest position S - 1 is on the device anyway: a hit, without a slot once S > B. One step
    later it is in no slot, like any position that was never fetched. (While S <= B it gets slot
    S - 1, by write-through.)
    A request's first step has S - 1 tokens before it, its prompt: up to B of them begin in slots
    0, 1, ...; of a longer prompt nothing is resident (the engine's rule). A slot that holds nothing
    is taken before one that does.
    While S <= B every position is resident and nothing misses; all policies but engine take note
    of what is used.
    A request ends where its row has seq_len 0, or a seq_len that is not one more than before.

Shapes: steps, layers, requests, K as in `trace.py`; B slots, which may differ by layer.
Cost: per step, layer and request O(B), with a sort of O(B log B) for random, lfu and belady.
Memory, per thread: a copy of one request's positions in one layer (belady: two), and 4 bytes (8)
for each of its S positions.

Compiled by Numba for the CPU, some ten seconds once; then its cache on disk has it. (That cache
looks at the caller's file only: the policies must stay in one file with who calls them.) Threads
take one layer each. It deliberately does not know models, records or bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from minihisparse.trace import Trace

POLICIES = ("last_step", "random", "fifo", "clock", "lfu", "lru", "engine", "belady")
LAST_STEP, RANDOM, FIFO, CLOCK, LFU, LRU, ENGINE, BELADY = range(len(POLICIES))
NEVER = np.int32(2**31 - 1)  # a step that does not come


@dataclass(frozen=True)
class ReplayResult:
    """hits, misses: [steps, layers] int64, all requests together; device_buffer_size: by layer.

    Their sum is the number of selected positions, whatever the policy.
    """

    policy: str
    device_buffer_size: tuple[int, ...]
    hits: Tensor
    misses: Tensor

    def miss_rate(self, warmup_steps: int = 0) -> float:
        """Misses over selected positions, of all layers, the first `warmup_steps` left out.

        0.0 if nothing was selected. Raises ValueError if no step is left.
        """
        hits, misses = self._counts(warmup_steps)
        return int(misses.sum()) / max(1, int((hits + misses).sum()))

    def layer_miss_rates(self, warmup_steps: int = 0) -> list[float]:
        """The same for each layer."""
        hits, misses = self._counts(warmup_steps)
        return (misses / (hits + misses).clamp(min=1)).tolist()

    def _counts(self, warmup_steps: int) -> tuple[Tensor, Tensor]:
        """Hits and misses [layers] of the steps that count."""
        if not 0 <= warmup_steps < len(self.hits):
            raise ValueError(f"warmup_steps {warmup_steps} is not in 0..{len(self.hits) - 1}")
        return self.hits[warmup_steps:].sum(0).double(), self.misses[warmup_steps:].sum(0).double()


def replay(
    trace: Trace,
    policy: str,
    device_buffer_size: int | Sequence[int],
    *,
    seed: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> ReplayResult:
    """Runs a trace through one of POLICIES with B slots per request and layer.

    device_buffer_size: B, or one for each layer. seed: of the policy random; each request and layer
    has random numbers of its own, so the result depends on nothing else. progress: called after
    each layer. Uses torch.get_num_threads() threads.
    Raises ValueError: an unknown policy; B < K; not as many B as layers.
    """
    steps, num_layers, _, top_k = trace.positions.shape
    if policy not in POLICIES:
        raise ValueError(f"--policy {policy!r} is not one of: {', '.join(POLICIES)}")
    one = isinstance(device_buffer_size, Integral)
    sizes = [device_buffer_size] * num_layers if one else device_buffer_size
    sizes = tuple(int(size) for size in sizes)
    if len(sizes) != num_layers:
        raise ValueError(f"--device-buffer-size: {len(sizes)} sizes for {num_layers} layers")
    if min(sizes) < top_k:
        raise ValueError(
            f"--device-buffer-size {min(sizes)} is less than the trace's K = {top_k}: all "
            "positions of a step must be resident at once"
        )
    positions, seq_lens = trace.positions.numpy(), trace.seq_lens.numpy()
    requests = requests_of(seq_lens)
    counts = np.zeros((2, num_layers, steps), dtype=np.int64)

    def replay_layer(layer: int) -> None:
        for row, start, end in requests:
            replay_request(
                POLICIES.index(policy),
                np.ascontiguousarray(positions[start:end, layer, row]),
                np.ascontiguousarray(seq_lens[start:end, row]),
                sizes[layer],
                request_seed(seed, layer, row, start),
                counts[0, layer, start:end],
                counts[1, layer, start:end],
            )

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(replay_layer, range(num_layers)):
            progress()
    hits, misses = torch.from_numpy(counts).transpose(1, 2).contiguous()
    return ReplayResult(policy, sizes, hits, misses)


def requests_of(seq_lens: np.ndarray) -> list[tuple[int, int, int]]:
    """The requests in seq_lens [steps, rows]: each one's row, first step, and step after its last.

    A request that comes and goes without a gap, one longer than the last by chance, is not seen.
    """
    requests = []
    for row, lens in enumerate(seq_lens.T.astype(np.int64)):
        breaks = np.flatnonzero(np.diff(lens) != 1) + 1
        for start, end in zip([0, *breaks], [*breaks, len(lens)], strict=True):
            start += int(lens[start] == 0)  # 0, 1: the second is one more than no request
            if start < end:
                requests.append((row, int(start), int(end)))
    return requests


def request_seed(seed: int, layer: int, row: int, start: int) -> int:
    """The seed of one request in one layer."""
    return int(np.random.SeedSequence([seed, layer, row, start]).generate_state(1)[0])


# ---- the policies ----
#
# policy(cache, found): one step of one request in one layer. found [n] int32 holds the slot of each
# selected position, ascending by position; -1: a miss. The policy writes into each -1 the slot that
# the position gets, which is none of the others, and updates what it remembers.


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
