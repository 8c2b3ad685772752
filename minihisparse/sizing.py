"""Stack distances: the misses of plain LRU for all B at once, from one pass over a trace.

LRU has the inclusion property: what B slots hold, B + 1 slots hold too. So each selected position
has one number, its stack distance: the smallest B at which it is a hit. Misses of B slots are the
positions with a distance above B. (Mattson et al., "Evaluation techniques for storage hierarchies",
1970.) The engine's own rule (`replay.py`, "engine") has no such number: replay it at the B wanted.

The rules are those of `replay.py`, so that a curve at B equals replay(trace, "lru", B), number for
number, for every B from K on; three of them look at B, and none breaks the inclusion property:

    the newest position     a hit at every B; the step counts as a use of it while S <= B only
    the start               a prompt of up to B tokens begins in the slots, in order of position;
                            of a longer one nothing is resident
    S <= B                  everything is resident: all distances are below S

So there are three kinds of positions at a step. For a prompt of P tokens, and positions in order of
their last use:

    used before       distance = 1 + others used since. At B > P a newest position counts as used,
                      if it was selected then and is below B, so a few slots more may be needed.
    used as newest    the same, but no B up to the position itself: it is in no slot there.
    never used        in a slot from the start if it is below B, at the least recent end.

Shapes: as in `trace.py`. Cost: O(log n) per selected position, with n of them in a request and
layer, by Fenwick trees. Memory, per thread: a copy of one request's positions in one layer, twice
that for distances and tree, 14 bytes for each of its S positions.

Compiled by Numba for the CPU, some seconds once; then its cache on disk has it. Threads take one
layer each. It deliberately does not know bytes or times (`cost_model.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numba import njit
from torch import Tensor

from minihisparse.config import MAX_DEVICE_BUFFER_SIZE
from minihisparse.replay import requests_of
from minihisparse.trace import Trace


@dataclass(frozen=True)
class MissCurves:
    """Misses of plain LRU for every B, per layer, in equal parts of the steps.

    misses: [parts, layers, largest B + 1] int64; index B, from top_k on. selected: [parts, layers]
    int64, hits and misses together.
    """

    misses: Tensor
    selected: Tensor
    top_k: int

    @property
    def largest(self) -> int:
        """The largest B."""
        return self.misses.shape[-1] - 1

    def layer_misses(self, part: int | None = None) -> Tensor:
        """Misses [layers, largest B + 1] of one part, or of all."""
        return self.misses.sum(0) if part is None else self.misses[part]

    def layer_miss_rates(self, size: int, part: int | None = None) -> list[float]:
        """Misses over selected positions at B = size, for each layer.

        Raises ValueError: a size that is not in top_k..largest.
        """
        self._check(size)
        selected = self.selected.sum(0) if part is None else self.selected[part]
        return (self.layer_misses(part)[:, size] / selected.clamp(min=1)).tolist()

    def miss_rate(self, size: int, part: int | None = None) -> float:
        """The same for all layers together. 0.0 if nothing was selected."""
        self._check(size)
        parts = slice(None) if part is None else part
        selected = int(self.selected[parts].sum())
        return int(self.misses[parts, ..., size].sum()) / max(1, selected)

    def _check(self, size: int) -> None:
        if not self.top_k <= size <= self.largest:
            raise ValueError(
                f"--device-buffer-size {size} is not in {self.top_k}..{self.largest}, K to the "
                "longest request"
            )


def miss_curves(
    trace: Trace,
    *,
    parts: int = 1,
    warmup_steps: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> MissCurves:
    """The curves of a trace, for all B from K to its longest request (32,767 at most, but K at
    least).

    parts: equal parts of the steps, counted apart. warmup_steps: the first, not counted. progress:
    called after each layer. Uses torch.get_num_threads() threads.
    Raises ValueError if there are fewer steps than parts.
    """
    steps, num_layers, _, top_k = trace.positions.shape
    if not 0 <= warmup_steps <= steps - parts:
        raise ValueError(
            f"--warmup-steps {warmup_steps} of {steps} steps leave fewer than {parts} to count"
        )
    bounds = np.linspace(warmup_steps, steps, parts + 1).astype(int)
    largest = max(top_k, min(int(trace.seq_lens.max()), MAX_DEVICE_BUFFER_SIZE))
    misses = np.zeros((parts, num_layers, largest + 1), dtype=np.int64)
    selected = np.zeros((parts, num_layers), dtype=np.int64)

    def count_layer(layer: int) -> None:
        for _, start, distances in _layer_distances(trace, layer):
            for part in range(parts):
                first, end = np.maximum(bounds[part : part + 2] - start, 0)
                own = distances[first:end]
                own = np.minimum(own[own >= 0], largest + 1)
                at = np.bincount(own, minlength=largest + 2)
                misses[part, layer] += len(own) - np.cumsum(at[:-1])
                selected[part, layer] += len(own)

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(count_layer, range(num_layers)):
            progress()
    return MissCurves(torch.from_numpy(misses), torch.from_numpy(selected), top_k)


def stack_distances(trace: Trace) -> Tensor:
    """The stack distance of every selected position: the smallest B at which it is a hit.

    Returns [steps, layers, requests, K] int32: 0 for the newest position, a hit anyway; else 1 to
    seq_len - 1; -1 where positions has -1. Uses torch.get_num_threads() threads.
    """
    distances = np.full(tuple(trace.positions.shape), -1, dtype=np.int32)

    def fill_layer(layer: int) -> None:
        for row, start, own in _layer_distances(trace, layer):
            distances[start : start + len(own), layer, row] = own

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        list(threads.map(fill_layer, range(trace.positions.shape[1])))
    return torch.from_numpy(distances)


def _layer_distances(trace: Trace, layer: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """Row, first step, and distances [steps, K] of each request in one layer."""
    positions, seq_lens = trace.positions.numpy(), trace.seq_lens.numpy()
    for row, start, end in requests_of(seq_lens):
        own = np.ascontiguousarray(positions[start:end, layer, row])
        yield row, start, request_distances(own, np.ascontiguousarray(seq_lens[start:end, row]))


# ---- Fenwick trees: counts at 1..n, their sums up to i and changes in O(log n) ----


@njit(cache=True, nogil=True)
def add(tree, i, change):
    """Adds to the count at i."""
    while i < len(tree):
        tree[i] += change
        i += i & -i


@njit(cache=True, nogil=True)
def sum_to(tree, i):
    """The sum of the counts at 1..i."""
    total = 0
    while i > 0:
        total += tree[i]
        i -= i & -i
    return total


@njit(cache=True, nogil=True)
def first_with(tree, wanted):
    """The smallest i whose sum is `wanted` > 0 or more; n + 1 if there is none."""
    step = 1
    while 2 * step < len(tree):
        step *= 2
    i = 0
    while step > 0:
        if i + step < len(tree) and tree[i + step] < wanted:
            i += step
            wanted -= tree[i]
        step //= 2
    return i + 1


# ---- one request in one layer ----


@njit(cache=True, nogil=True)
def request_distances(positions, seq_lens):
    """Stack distances [steps, K] int32 of positions [steps, K] int32, seq_lens [steps] int32,
    consecutive.
    """
    steps, top_k = positions.shape
    num_positions, prompt_len = seq_lens[-1], seq_lens[0] - 1
    distances = np.full((steps, top_k), -1, np.int32)
    # When a position was used last, as a number from 1 on: a step's positions ascend, the newest
    # is its last; 0: never. Position p is at p + 1 in the trees over positions.
    last = np.zeros(num_positions, np.int32)
    as_newest = np.zeros(num_positions, np.bool_)  # used as the newest, not since
    recency = np.zeros(steps * (top_k + 1) + 1, np.int32)  # by last use; not those as_newest
    used = np.zeros(num_positions + 1, np.int32)  # by position: last > 0, not as_newest
    kept = np.zeros(num_positions + 1, np.int32)  # by position: all that are not as_newest
    for i in range(1, len(kept)):
        kept[i] = i & -i  # counts of 1
    num_used = 0

    for step in range(steps):
        newest = seq_lens[step] - 1
        for i in range(top_k):
            p = positions[step, i]
            if p < 0:
                break
            if p == newest:
                distances[step, i] = 0
                continue
            if last[p] > 0:
                distance = 1 + num_used - sum_to(recency, last[p])
                # From here on, newest positions used after p have taken slots too.
                start = prompt_len + last[p] // (top_k + 1)
                if as_newest[p]:
                    start = p + 1
                if distance > start:
                    distance = first_with(kept, distance - start + sum_to(kept, start))
                elif as_newest[p]:
                    distance = start
            else:
                # B slots: p's rank from the least recent end is p + 1, less those up to p that were
                # used; each used position between p and B moves it up by one.
                distance = max(p + 1, prompt_len)
                wanted = num_used + 1 - sum_to(kept, p + 1)
                if wanted > 0:
                    between = first_with(used, wanted + sum_to(used, p + 1))
                    distance = max(distance, between)
            distances[step, i] = distance

        for i in range(top_k):
            p = positions[step, i]
            if p < 0:
                break
            if p == newest:
                last[p] = (step + 1) * (top_k + 1)
                as_newest[p] = True
                add(kept, p + 1, -1)
                continue
            if as_newest[p]:
                as_newest[p] = False
                add(kept, p + 1, 1)
            elif last[p] > 0:
                add(recency, last[p], -1)
                add(used, p + 1, -1)
                num_used -= 1
            last[p] = step * (top_k + 1) + i + 1
            add(recency, last[p], 1)
            add(used, p + 1, 1)
            num_used += 1
    return distances
