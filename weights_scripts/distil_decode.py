"""Decoding under a selection, many steps at once: what an engine would do, as masked attention.

A prompt is read densely. The tokens after it are decode steps: in every layer each reads only what
a selection allows, and its K and V are those of the sparse pass. With the tokens given in advance
(teacher forcing) all steps go through a layer together: a step needs from others only what they
were in the same layer's input. With one token at a time the same function decodes freely.

    prefill       TextStates of a prompt, with room for what comes
    decode        steps under a selection -> hidden states of their tokens
    token_losses  -log p of given tokens;  greedy: tokens of the model's own

Shapes: T positions in all, E steps. Numbers are those of the engine's decode up to rounding.
Cost: (hidden + 2 * Hkv * D) * T per layer in the model's dtype, 0.5 GB for SmolLM2-135M at 8,192;
a few tensors of [Hq, E, T] float32 at a time, 151 MB each at E = 512.
Does not know: which selections there are, or what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minihisparse.model import Decoder
from minihisparse.weights_scripts.distil_masks import Selection
from minihisparse.weights_scripts.distil_model import (
    LayerStates,
    attention_scores,
    dense_layers,
    split_records,
)

# Called in each layer with its states and the mask [E, T].
Watch = Callable[[LayerStates, Tensor], None]


@dataclass(frozen=True)
class TextStates:
    """Normed inputs [L, T, hidden], keys and values [L, T, Hkv, D] of one text's positions."""

    x: Tensor
    k: Tensor
    v: Tensor


def dense(states: LayerStates) -> Tensor:
    """The selection that leaves nothing out."""
    return states.causal


@torch.inference_mode()
def prefill(model: Decoder, token_ids: Tensor, num_positions: int) -> TextStates:
    """Reads a prompt [n] int64 densely; there is room for num_positions in all."""
    c, length = model.config, len(token_ids)
    options = {"dtype": model.dtype, "device": model.device}
    x = torch.zeros(c.num_hidden_layers, num_positions, c.hidden_size, **options)
    shape = (c.num_hidden_layers, num_positions, c.num_key_value_heads, c.head_dim)
    k, v = torch.zeros(shape, **options), torch.zeros(shape, **options)
    no_rows = torch.empty(0, dtype=torch.int64, device=model.device)
    for states in dense_layers(model, token_ids, no_rows):
        x[states.layer, :length] = states.x
        k[states.layer, :length] = states.k
        v[states.layer, :length] = states.v
    return TextStates(x, k, v)


@torch.inference_mode()
def decode(
    model: Decoder,
    text: TextStates,
    token_ids: Tensor,
    first: int,
    select: Selection,
    watch: Watch | None = None,
) -> Tensor:
    """Decodes token_ids [E] int64 at the positions from `first` on; hidden [E, hidden] at the end.

    Their states are written into `text`; those of later positions are not read. A selection with a
    method `attend`, to be called like `masked_attention`, replaces that.
    """
    end = first + len(token_ids)
    rows = torch.arange(first, end, device=model.device)
    hidden = model.embed(token_ids)
    for layer in range(model.config.num_hidden_layers):
        x, q, records = model.attention_inputs(layer, hidden, rows)
        k, v = split_records(records, q.shape[2])
        for all_of_text, new in ((text.x, x), (text.k, k), (text.v, v)):
            all_of_text[layer, first:end] = new
        x, k, v = text.x[layer, :end], text.k[layer, :end], text.v[layer, :end]
        states = LayerStates(layer, rows, x, q, k, v)
        mask = select(states)
        if watch:
            watch(states, mask)
        attend = getattr(select, "attend", masked_attention)
        hidden = model.attention_output(layer, hidden, attend(states, mask).to(model.dtype))
    return hidden


def masked_attention(states: LayerStates, mask: Tensor) -> Tensor:
    """One softmax over the positions of the mask [E, T]: [E, Hq, D] float32."""
    probabilities = attention_scores(states).masked_fill_(~mask, -torch.inf).softmax(dim=-1)
    num_heads, num_rows, num_positions = probabilities.shape
    v = states.v.float().transpose(0, 1)  # [Hkv, T, D]
    stacked = probabilities.view(len(v), -1, num_positions)  # [Hkv, Hq / Hkv * E, T]
    return (stacked @ v).view(num_heads, num_rows, -1).transpose(0, 1)


@torch.inference_mode()
def token_losses(model: Decoder, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [E, hidden], the tokens that follow [E] -> -log p [E] float32, and [E] bool: the most
    likely one is right.
    """
    logits = model.logits(hidden)
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses, logits.argmax(dim=-1) == targets


def greedy(
    model: Decoder, prompt: Tensor, num_tokens: int, select: Selection, progress: Callable[[], None]
) -> Tensor:
    """The model's own continuation [num_tokens] int64 of a prompt [n] int64 under a selection.

    The prompt's last token is the first decode step. progress: called after each token.
    """
    first = len(prompt) - 1
    text = prefill(model, prompt[:-1], first + num_tokens)
    token, tokens = prompt[-1:], []
    for position in range(first, first + num_tokens):
        hidden = decode(model, text, token, position, select)
        token = model.logits(hidden).argmax(dim=-1)
        tokens.append(token)
        progress()
    return torch.cat(tokens)
