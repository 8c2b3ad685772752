"""A frozen model, one layer at a time: what a selector is trained on and measured with.

    dense_layers          the dense forward pass of one text, stopped at each layer
    dense_probabilities   what dense attention reads: the softmax that a selector should imitate

Shapes: one text of T tokens; R of its positions, `rows`, are looked at as queries.
Cost: a forward pass without logits; [Hq, R, T] float32 for the probabilities: 151 MB for 9 heads,
512 rows and 8,192 tokens, and twice that while they are calculated.
Does not know: selectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from minihisparse.attention import causal_attention
from minihisparse.model import Decoder


class LayerStates(NamedTuple):
    """What goes into one layer's attention: queries of some positions, keys of all up to them."""

    layer: int
    rows: Tensor  # [R] int64, ascending: the queries' positions
    x: Tensor  # [T, hidden], the normed input of every position
    q: Tensor  # [R, Hq, D], rotated
    k: Tensor  # [T, Hkv, D], rotated
    v: Tensor  # [T, Hkv, D]

    @property
    def causal(self) -> Tensor:
        """[R, T] bool: the positions that a query may read."""
        return torch.arange(len(self.x), device=self.rows.device) <= self.rows[:, None]


def dense_layers(model: Decoder, token_ids: Tensor, rows: Tensor) -> Iterator[LayerStates]:
    """Runs token_ids [T] through the model and stops at each layer, with queries at rows [R].

    The tensors are plain ones without gradient, so autograd may keep them for a backward pass.
    """
    positions = torch.arange(len(token_ids), device=model.device)
    hidden = model.embed(token_ids)
    last = model.config.num_hidden_layers - 1
    for layer in range(last + 1):
        x, q, records = model.attention_inputs(layer, hidden, positions)
        # Copies, because autograd refuses what was made in inference mode.
        k, v = split_records(records.clone(), q.shape[2])
        yield LayerStates(layer, rows, x.clone(), q[rows], k, v)
        if layer < last:
            hidden = model.attention_output(layer, hidden, causal_attention(q, records))


def split_records(records: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """records [T, 2 * Hkv * D] to K and V, [T, Hkv, D] each, views."""
    return records.unflatten(1, (2, -1, head_dim)).unbind(1)


@torch.no_grad()
def attention_scores(states: LayerStates) -> Tensor:
    """q . k / sqrt(D) in float32, [Hq, R, T]; what is not causal is not masked."""
    q, k = states.q.float(), states.k.float()
    (num_rows, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    # The heads of a KV group are stacked as more rows of one product.
    grouped = q.unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (grouped * head_dim**-0.5) @ k.permute(1, 2, 0)  # [Hkv, Hq / Hkv * R, T]
    return scores.view(num_heads, num_rows, -1)


@torch.no_grad()
def dense_probabilities(states: LayerStates) -> Tensor:
    """The softmax of dense attention, [Hq, R, T] float32; zero where it is not causal."""
    scores = attention_scores(states)
    scores.masked_fill_(~states.causal, -torch.inf)
    return scores.softmax(dim=-1)
