"""Resolve's replacement rule, vectorised over requests in torch: the backend that runs anywhere.

Same rule, same words and same results as `resolve.resolve_oracle`, whose header states the rule. It
works on whole [R, K] and [R, B] tables, with sorts in place of a hash table, and never loops.

Cost per call, beside the fetch: two sorts of about B and one of K entries per request, and some
forty small operations on tables of these sizes. It deliberately does not move records: it says
which ones to move.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Resolution(NamedTuple):
    """What Resolve decided. Indices are int64, ready for torch's gather and scatter."""

    slots: Tensor  # [R, K] int64, -1 for padding
    fetch: Tensor  # [R, K] bool: a miss, at its first occurrence; its record must be brought in
    evicted: Tensor  # [R, K] int32: the position that a fetched record displaced, else -1
    tokens: Tensor  # [R, B] int32: device_buffer_tokens afterwards
    lru_slots: Tensor  # [R, B] int16: the LRU order afterwards


def resolve_torch(
    positions: Tensor, seq_lens: Tensor, tokens: Tensor, lru_slots: Tensor, *, checked: bool = False
) -> Resolution:
    """Resolves R requests in one layer; no argument is changed.

    positions [R, K] int32, seq_lens [R] int32, tokens [R, B] int32, lru_slots [R, B] int16.
    Raises ValueError in checked mode if a position is below -1 or not below its seq_len.
    """
    if checked:
        check_positions(positions, seq_lens)
    num_slots, top_k = tokens.shape[1], positions.shape[1]
    lens = seq_lens[:, None]
    readable = (positions >= 0) & (positions < lens)
    resident = lens <= num_slots  # position p is in slot p
    searched = readable & ~resident

    # Hits: binary search in the tokens sorted by position, the newest token (slot B) among them.
    all_tokens = torch.cat([tokens, lens - 1], dim=1)  # [R, B + 1]
    sorted_tokens, slot_at = all_tokens.sort(dim=1)
    at = torch.searchsorted(sorted_tokens, positions).clamp_(max=num_slots)
    hit = searched & (sorted_tokens.gather(1, at) == positions)
    hit_slot = slot_at.gather(1, at)

    # Misses: a position is fetched once, where it occurs first.
    first = first_occurrence(positions)
    fetch = (searched ^ hit) & (first == torch.arange(top_k, device=first.device))
    miss_rank = (fetch.cumsum(1) - 1).gather(1, first)

    # LRU order with the hits moved behind the rest; the misses take it from the front. Column B of
    # the scattered tables takes what is meant for no slot of the LRU, and is thrown away.
    is_hit = torch.zeros_like(all_tokens, dtype=torch.bool)
    is_hit.scatter_(1, torch.where(hit, hit_slot, num_slots), True)
    old_order = lru_slots.long()
    hit_in_order, hits_last = is_hit.gather(1, old_order).sort(dim=1, stable=True)
    order = old_order.gather(1, hits_last)
    filled_slot = order.gather(1, miss_rank.clamp_(min=0))

    # New order: [untouched] + [filled] + [hits], that is, what is not a hit rotates by the misses.
    place = torch.arange(num_slots, device=order.device)
    num_not_hit = num_slots - hit_in_order.sum(1, keepdim=True)
    rotated = (place + fetch.sum(1, keepdim=True)) % num_not_hit.clamp(min=1)
    new_order = order.gather(1, torch.where(hit_in_order, place, rotated))

    evicted = torch.where(fetch, tokens.gather(1, filled_slot), -1)
    all_tokens.scatter_(1, torch.where(fetch, filled_slot, num_slots), positions)

    slots = torch.where(hit, hit_slot, filled_slot)
    slots = torch.where(searched, slots, torch.where(readable, positions, -1))
    return Resolution(slots, fetch, evicted, all_tokens[:, :num_slots], new_order.short())


def first_occurrence(values: Tensor) -> Tensor:
    """The index at which each entry's value occurs first in its row; [R, K] int64."""
    ordered, index = values.sort(dim=1, stable=True)
    return index.gather(1, torch.searchsorted(ordered, values))


def check_positions(positions: Tensor, seq_lens: Tensor) -> None:
    """Raises ValueError that names the first position out of range, and its row."""
    bad = ((positions < -1) | (positions >= seq_lens[:, None])).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise ValueError(
            f"row {row}: position {int(positions[row, column])} is out of range: "
            f"seq_len is {int(seq_lens[row])}"
        )
