"""Plain causal attention over all positions: the oracle that shares nothing with the caches.

K and V of every position are kept in lists; scores are masked with -inf and softmaxed explicitly,
in fp32. No SDPA, no cache, no selector.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minihisparse.model import Decoder


class DenseRun:
    """One sequence, fed in pieces: a prompt, then its next tokens."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.seq_len = 0
        self.keys: list[list[Tensor]] = [[] for _ in decoder.layers]  # per layer: [T, Hkv, D] each
        self.values: list[list[Tensor]] = [[] for _ in decoder.layers]

    def forward(self, token_ids: Tensor) -> Tensor:
        """The next token_ids [T] int64 -> logits [T, V] float32 of each."""
        decoder = self.decoder
        token_ids = token_ids.to(decoder.device)
        positions = torch.arange(self.seq_len, self.seq_len + len(token_ids), device=decoder.device)
        self.seq_len += len(token_ids)
        hidden = decoder.embed(token_ids)
        for layer in range(decoder.config.num_hidden_layers):
            _, q, records = decoder.attention_inputs(layer, hidden, positions)
            k, v = records.view(len(q), 2, -1, q.shape[2]).unbind(1)
            self.keys[layer].append(k.clone())
            self.values[layer].append(v.clone())
            attn = dense_attention(
                q, torch.cat(self.keys[layer]), torch.cat(self.values[layer]), positions
            )
            hidden = decoder.attention_output(layer, hidden, attn)
        return decoder.logits(hidden)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """q [T, Hq, D] at positions [T]; k, v [S, Hkv, D] at 0..S-1 -> [T, Hq, D] in q's dtype."""
    group = q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(group, dim=1)  # [S, Hq, D]
    v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->ths", q.float(), k) / q.shape[-1] ** 0.5
    future = torch.arange(len(k), device=q.device) > positions[:, None]  # [T, S]
    scores = scores.masked_fill(future[:, None, :], float("-inf"))
    weights = torch.softmax(scores, dim=-1)
    return torch.einsum("ths,shd->thd", weights, v).to(q.dtype)


def dense_logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """token_ids [T] int64 -> logits [T, V] float32 of every position."""
    return DenseRun(decoder).forward(token_ids)
