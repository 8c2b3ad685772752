"""Resolve's replacement rule, vectorised over requests in torch: the backend that runs anywhere.

Same rule, same words and same results as `resolve.resolve_oracle`, whose header states the rule. It
works on whole [R, K] and [R, B] tables, with sorts in place of a hash table, and never loops.

Cost per call, beside the fetch: one sort of B and one of K entries per request, and a dozen passes
over them. It deliberately does not move records: it says which ones to move.
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
    num_slots, top_k = tokens.shape[1], positions.shape[1]
    lens = seq_lens[:, None]
    readable = (positions >= 0) & (positions < lens)
    if checked:
        check_positions(positions, seq_lens)

    resident = lens <= num_slots  # position p is in slot p
    newest = positions == lens - 1
    searched = readable & ~newest & ~resident

    # Hits: binary search in the tokens, sorted by position.
    sorted_tokens, slot_at = tokens.sort(dim=1)
    at = torch.searchsorted(sorted_tokens, positions).clamp_(max=num_slots - 1)
    hit = searched & (sorted_tokens.gather(1, at) == positions)
    hit_slot = slot_at.gather(1, at)

    # Misses: a position is fetched once, where it occurs first.
    first = first_occurrence(positions)
    fetch = searched & ~hit & (first == torch.arange(top_k, device=first.device))
    miss_rank = (fetch.cumsum(1) - 1).gather(1, first)

    # LRU order with the hits moved behind the rest; the misses take it from the front.
    spare = torch.full_like(hit_slot, num_slots)  # a column to scatter into and throw away
    is_hit = torch.zeros(len(tokens), num_slots + 1, dtype=torch.bool, device=tokens.device)
    is_hit = is_hit.scatter_(1, torch.where(hit, hit_slot, spare), True)[:, :num_slots]
    old_order = lru_slots.long()
    hit_last = is_hit.gather(1, old_order).sort(dim=1, stable=True).indices
    order = old_order.gather(1, hit_last)
    filled_slot = order.gather(1, miss_rank.clamp_(min=0))

    # New order: [untouched] + [filled] + [hits], that is, what is not a hit rotates by the misses.
    place = torch.arange(num_slots, device=order.device)
    num_not_hit = num_slots - is_hit.sum(1, keepdim=True)
    rotated = (place + fetch.sum(1, keepdim=True)) % num_not_hit.clamp(min=1)
    new_order = order.gather(1, torch.where(place < num_not_hit, rotated, place))

    evicted = torch.where(fetch, tokens.gather(1, filled_slot), -1)
    new_tokens = torch.nn.functional.pad(tokens, (0, 1))
    new_tokens.scatter_(1, torch.where(fetch, filled_slot, spare), positions)

    slots = torch.where(hit, hit_slot, filled_slot)
    slots = torch.where(newest, num_slots, slots)
    slots = torch.where(resident, positions, slots)
    slots = torch.where(readable, slots, -1)
    return Resolution(slots, fetch, evicted, new_tokens[:, :num_slots], new_order.to(torch.int16))


def first_occurrence(positions: Tensor) -> Tensor:
    """The index at which each entry's value occurs first in its row; [R, K] int64."""
    ordered, index = positions.sort(dim=1, stable=True)
    starts = torch.arange(positions.shape[1], device=positions.device).repeat(len(positions), 1)
    starts[:, 1:].masked_fill_(ordered[:, 1:] == ordered[:, :-1], 0)
    group_start = starts.cummax(dim=1).values
    return torch.empty_like(index).scatter_(1, index, index.gather(1, group_start))


def check_positions(positions: Tensor, seq_lens: Tensor) -> None:
    """Raises ValueError that names the first position out of range, and its row."""
    bad = ((positions < -1) | (positions >= seq_lens[:, None])).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise ValueError(
            f"row {row}: position {int(positions[row, column])} is out of range: "
            f"seq_len is {int(seq_lens[row])}"
        )
