"""What Resolve did in one layer of one decode step, in a form to look at.

A `LayerEvent` is worked out from the slots alone, before and after: it costs the engine nothing
when nobody looks, and is the same whichever backend did the work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minihisparse.batch import Batch
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.kv_cache import KVCache
from minihisparse.runner import LayerResult


@dataclass(frozen=True)
class LayerEvent:
    """One layer of one decode step, R requests. -1 is padding.

    step: 1 for the first decode step (the first token comes from prefill). layer: 0..L-1.
    indices: [R], the requests' places in the caller's list. seq_lens: [R] (S).
    positions: [R, K] int32, selected. slots: [R, K] int32, where they are.
    hit, missed: [R, K] bool. evicted: [R, K] int32, the position that a miss displaced.
    bytes_h2d: [R] int64, record bytes fetched from the host pool.
    attention: [R, Hq, D], the attention output, before the output projection.
    device_buffer_tokens: [R, B] int32 and lru_slots: [R, B] int16 afterwards; None for FullCache.
    """

    step: int
    layer: int
    indices: list[int]
    seq_lens: list[int]
    positions: Tensor
    slots: Tensor
    hit: Tensor
    missed: Tensor
    evicted: Tensor
    bytes_h2d: Tensor
    attention: Tensor
    device_buffer_tokens: Tensor | None
    lru_slots: Tensor | None


def tokens_of(cache: KVCache, layer: int, batch: Batch) -> Tensor | None:
    """A copy of the batch's device_buffer_tokens [R, B]; None for FullCache."""
    if not isinstance(cache, HiSparseCache):
        return None
    return cache.tables(layer)[0][batch.req_pool_indices]


def explain(
    cache: KVCache,
    batch: Batch,
    result: LayerResult,
    tokens_before: Tensor | None,
    *,
    step: int,
    layer: int,
    indices: list[int],
) -> LayerEvent:
    """Tells hits from misses: a position is a hit if its slot held it before.

    tokens_before: of `tokens_of`, before the layer, or before its anchor, whose tables it shares.
    """
    positions, slots = result.positions, result.slots
    resident = slots >= 0
    lru_slots = None
    if tokens_before is None:
        hit, held = resident, torch.full_like(positions, -1)
    else:
        num_slots = tokens_before.shape[1]
        held = tokens_before.gather(1, slots.long().clamp(0, num_slots - 1))
        newest = positions == batch.seq_lens[:, None] - 1  # written through, whatever was there
        hit = resident & (newest | (held == positions))
        lru_slots = cache.tables(layer)[1][batch.req_pool_indices]
    missed = resident & ~hit
    return LayerEvent(
        step=step,
        layer=layer,
        indices=indices,
        seq_lens=batch.seq_lens.tolist(),
        positions=positions.clone(),  # the next layer overwrites them on a GPU
        slots=slots.clone(),
        hit=hit,
        missed=missed,
        evicted=torch.where(missed, held, -1),
        bytes_h2d=missed.sum(1) * cache.record_bytes,
        attention=result.attention,
        device_buffer_tokens=tokens_of(cache, layer, batch),
        lru_slots=lru_slots,
    )
