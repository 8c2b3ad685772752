"""Contexts and selections that are made up, where real ones cannot be had or would mean nothing.

    fill                 random KV in place of a prefill: a million tokens in seconds
    GivenSelections      a selector that does not select: it repeats given selections
    sliding_selections   selections with a chosen number of misses

For a model with random weights a real selector would mean nothing; its misses then come from a
recorded trace, or from a window that slides over a random order of the positions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minihisparse.batch import Batch
from minihisparse.model import AttentionInputs
from minihisparse.runner import Runner
from minihisparse.selector import Selector


@torch.inference_mode()
def fill(
    runner: Runner, row: int, token_ids: Tensor, progress: Callable[[], object] = lambda: None
) -> Tensor:
    """In place of `Runner.prefill`: random records for a prompt; logits [V] of a first token.

    The same records in all layers and requests, from as many numbers as one layer has.
    """
    model, num_tokens = runner.model, len(token_ids)
    generator = torch.Generator(model.device).manual_seed(0)
    shape = (num_tokens, model.config.record_width)
    records = torch.empty(shape, dtype=model.dtype, device=model.device).normal_(
        generator=generator
    )
    config = model.config
    hidden = records.new_empty(1, config.hidden_size).normal_(generator=generator)
    # A selector reads keys, or the layer's input, which is the same everywhere; never a query.
    q = records.new_empty(0, config.num_attention_heads, config.head_dim)
    inputs = AttentionInputs(hidden.expand(num_tokens, -1), q, records)
    for layer in range(runner.num_layers):
        runner.cache.write_prompt(layer, row, records)
        runner.selector.write_prompt(layer, row, 0, inputs)
        progress()
    return torch.zeros(model.config.vocab_size, device=model.device)


def sliding_selections(
    *,
    num_steps: int,
    num_layers: int,
    num_requests: int,
    top_k: int,
    context_len: int,
    num_misses: int,
    seed: int,
) -> Tensor:
    """positions [num_steps, num_layers, num_requests, K] int32, ascending.

    A request and layer's selection is K successive entries of its random order of the positions
    0..context_len - 1; each step it moves on by num_misses. These are misses in a cache of B slots
    if the order is not gone through before they have been evicted: K + B <= context_len is enough.
    Raises ValueError if top_k is more than the context has.
    """
    if top_k > context_len:
        raise ValueError(f"top_k={top_k} is more than the context has, {context_len} positions")
    generator = torch.Generator().manual_seed(seed)
    steps = torch.arange(num_steps)[:, None] * num_misses
    window = (steps + torch.arange(top_k)) % context_len  # [steps, K]
    positions = torch.empty(num_steps, num_layers, num_requests, top_k, dtype=torch.int32)
    for layer in range(num_layers):
        for request in range(num_requests):
            order = torch.randperm(context_len, generator=generator).int()
            positions[:, layer, request] = order[window].sort(dim=1).values
    return positions


class GivenSelections(Selector):
    """Answers with positions [steps, L, requests, K] int32 in place of a selection.

    A request with a prompt of context_len tokens is given positions[t] in its decode step t, from
    0, and begins anew after the last one; in request row r it is given those of request r, likewise
    round and round. Both follow from the batch's tensors, so a CUDA graph may hold this.
    """

    selects_in_shared_layers = True

    def __init__(
        self,
        positions: Tensor,
        context_len: int,
        device: torch.device,
        anchor_of: tuple[int, ...] | None = None,
    ) -> None:
        """anchor_of: layers that are to share a selection, if so that of their anchor."""
        self.positions = positions.to(device)
        self.context_len = context_len
        self.top_k = positions.shape[-1]
        self.anchor_of = anchor_of

    longest_request = (2**31, "the selector", "--selections")

    @property
    def state_bytes(self) -> int:
        """Device bytes of the selections: no state, but they are there."""
        return self.positions.nbytes

    def admit(self, row: int, num_tokens: int) -> None:
        """It keeps nothing per request."""

    def release(self, row: int) -> None:
        """It keeps nothing per request."""

    def write_prompt(
        self, layer: int, row: int, first_position: int, inputs: AttentionInputs
    ) -> None:
        """It does not look at tokens."""

    def write(self, layer: int, inputs: AttentionInputs, batch: Batch) -> None:
        """It does not look at tokens."""

    def select(self, layer: int, inputs: AttentionInputs, batch: Batch) -> Tensor:
        """[R, K] int32; -1 for positions that a request does not have, and for padding."""
        num_steps, _, num_requests, _ = self.positions.shape
        step = (batch.positions - self.context_len).clamp(min=0) % num_steps  # [R]
        chosen = self.positions[step, layer, batch.req_pool_indices % num_requests]
        return torch.where(chosen < batch.seq_lens[:, None], chosen, -1)
