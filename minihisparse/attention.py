"""Attention over KV records: the prompt's own (prefill), or those at given slots (decode).

Decode reads its K and V through slots, gathers them into one compact [R, K] block and attends over
that. The block's shape and order depend on the selection alone, never on where the records lie, so
both caches feed the same numbers to the same operations: equal inputs, equal order, equal bits.

The heads of one KV group are stacked as extra queries of that KV head (GQA without copying K or V).
Padding: records at slot -1 are zeroed, because a weight of 0 times NaN is NaN. On a GPU decode is
a kernel that gathers nothing first (`kernels/attention.py`); the prompt's is torch's everywhere.
It deliberately does not know positions: keys are rotated before they are stored.

Some selectors split attention into branches (`Branches`): each has a softmax of its own, over its
part of the slots, and the outputs are added up, with a gate on each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right


class Branches(NamedTuple):
    """Attention in three gated parts (NSA, `nsa.py`) instead of one softmax over the selection."""

    compressed: Tensor  # [R, Hq, D], the output of the first: it reads no records of the cache
    selected: Tensor  # [R, K] bool, which of the slots the second reads
    window: Tensor  # [R, K] bool, which of them the third
    gates: Tensor  # [R, Hq, 3] float32, what each branch's output is multiplied with


def gated_attention(
    attend: Callable[[Tensor], Tensor], slots: Tensor, branches: Branches
) -> Tensor:
    """The sum of the branches' outputs times their gates: [R, Hq, D].

    attend: from slots [R, K] int32, -1 anywhere is padding, to [R, Hq, D], zeros in a row without
    any; the kernel or `decode_attention`.
    """
    selected, window = (
        attend(slots.masked_fill(~read, -1)) for read in (branches.selected, branches.window)
    )
    outputs = [branches.compressed, selected, window]
    return gated_sum(outputs, branches.gates).to(selected.dtype)


def gated_sum(outputs: Sequence[Tensor], gates: Tensor) -> Tensor:
    """Outputs [R, Hq, D] of n branches, gates [R, Hq, n] float32 -> [R, Hq, D] float32."""
    return (torch.stack(tuple(outputs), dim=3).float() * gates[:, :, None]).sum(dim=3)


def decode_attention(q: Tensor, records: Tensor, slots: Tensor, first_slots: Tensor) -> Tensor:
    """Attends one query per request to the records at its slots.

    q [R, Hq, D]; records [N, W], W = 2 * Hkv * D; slots [R, K] int32, -1 is padding; first_slots
    [R] int64: slot s of request r is records[first_slots[r] + s]. Returns [R, Hq, D]; a row without
    any slot gives zeros.
    """
    (num_reqs, num_heads, head_dim), top_k = q.shape, slots.shape[1]
    num_kv_heads = records.shape[1] // (2 * head_dim)
    used = slots >= 0
    index = first_slots[:, None] + slots.clamp(min=0)
    block = records.index_select(0, index.flatten()).view(num_reqs, top_k, -1)
    block.masked_fill_(~used[:, :, None], 0)
    k, v = block.view(num_reqs, top_k, 2, num_kv_heads, head_dim).permute(2, 0, 3, 1, 4)
    grouped = q.view(num_reqs, num_kv_heads, -1, head_dim)  # [R, Hkv, Hq / Hkv, D]
    # An empty row attends to its zeroed records: a softmax over nothing would be NaN.
    mask = used | ~used.any(dim=1, keepdim=True)
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask[:, None, None, :])
    return out.reshape(num_reqs, num_heads, head_dim)


def causal_attention(q: Tensor, records: Tensor) -> Tensor:
    """Attends the last T positions of a prompt to all N positions up to and including themselves.

    q [T, Hq, D]; records [N, W] with N >= T, the prompt's KV so far. Returns [T, Hq, D].
    """
    (num_tokens, num_heads, head_dim), num_keys = q.shape, len(records)
    k, v = records.view(num_keys, 2, -1, head_dim).permute(1, 2, 0, 3)  # [Hkv, N, D] each
    num_kv_heads = len(k)
    group = num_heads // num_kv_heads
    grouped = q.view(num_tokens, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = (x[:, None].expand(-1, group, -1, -1) for x in (k, v))  # a view: no copy per query head
    if q.is_cuda:  # a fused kernel that skips what the mask hides
        mask = causal_lower_right(num_tokens, num_keys)
    else:
        mask = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=q.device)
        mask = mask.tril_(num_keys - num_tokens)  # [T, N]: the last row sees every key
    out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
    return out.permute(2, 0, 1, 3).reshape(num_tokens, num_heads, head_dim)
