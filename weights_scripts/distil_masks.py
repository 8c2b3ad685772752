"""Selections as masks: what each selector reads, for many queries of one text at once.

    oracle       the K positions that all heads together attend to most: no selector holds more
    dsa          a trained indexer (distil_dsa.py), with sinks and recent positions inside K
    quest        pages of 16 by the bounds of their keys, as minihisparse/indexer.py scores them
    mean-pooled  blocks of 32 by the mean of their keys: NSA's selection without its training
    recent       4 sinks and the most recent positions: no look at the text at all

A selection is called with LayerStates, layer by layer in order, and gives [R, T] bool: true where
the query of `rows[r]` reads position t. At most K positions a row, ties to the lowest position; all
of them if there are no more than K.
Cost: a few tensors of [Hq, R, T] float32 at a time.
Does not know: engines, caches; that the texts are run with it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minihisparse.addon import Addon
from minihisparse.rope import rope_angles
from minihisparse.weights_scripts.distil_dsa import (
    TENSORS,
    Indexer,
    forced,
    tensor_name,
)
from minihisparse.weights_scripts.distil_model import LayerStates, dense_probabilities

Selection = Callable[[LayerStates], Tensor]


def top_k_mask(scores: Tensor, allowed: Tensor, top_k: int) -> Tensor:
    """[R, N] bool: each row's top_k highest allowed scores, ties to the lowest index.

    scores [R, N] float32, +inf allowed; allowed [R, N] bool.
    """
    if scores.shape[1] <= top_k:
        return allowed
    scores = scores.masked_fill(~allowed, -torch.inf)
    least = scores.topk(top_k, dim=1).values[:, -1:]
    above, ties = scores > least, scores == least
    room = top_k - above.sum(dim=1, keepdim=True)
    return (above | (ties & (ties.cumsum(dim=1) <= room))) & allowed


def positions_of(mask: Tensor, top_k: int) -> Tensor:
    """[R, K] int32: the positions of a mask [R, N], ascending, -1 at the end."""
    num_positions = mask.shape[1]
    index = torch.arange(num_positions, dtype=torch.int32, device=mask.device)
    index = torch.where(mask, index, num_positions)
    best = index.topk(min(top_k, num_positions), dim=1, largest=False, sorted=True).values
    best = torch.where(best < num_positions, best, -1)
    return torch.nn.functional.pad(best, (0, top_k - best.shape[1]), value=-1)


def oracle(top_k: int) -> Selection:
    def select(states: LayerStates) -> Tensor:
        return top_k_mask(dense_probabilities(states).sum(dim=0), states.causal, top_k)

    return select


def recent(top_k: int, num_sinks: int = 4) -> Selection:
    settings = {"num_sinks": num_sinks, "num_recent": top_k - num_sinks}
    return lambda states: forced(states, settings)


def quest(top_k: int, page_size: int = 16) -> Selection:
    def select(states: LayerStates) -> Tensor:
        q, k = states.q.float().transpose(0, 1), states.k.float()  # [Hq, R, D], [T, Hkv, D]
        pages = _blocks(k, page_size)  # [P, page, Hkv, D], the last one may lack keys
        group = len(q) // k.shape[1]

        def bound(most: Tensor, least: Tensor) -> Tensor:  # [N, Hkv, D] -> [N, Hq, D]
            return torch.stack([most, least]).repeat_interleave(group, dim=2)

        most, least = bound(pages.amax(1), pages.amin(1)).permute(0, 2, 3, 1)  # [Hq, D, P]
        scores = q.clamp(min=0) @ most + q.clamp(max=0) @ least  # [Hq, R, P]
        # The newest page of a query ends with it, so its bounds are the query's own.
        newest = states.rows // page_size
        inside = torch.arange(page_size, device=newest.device) <= (states.rows % page_size)[:, None]
        own = pages[newest]  # [R, page, Hkv, D]
        own_most = own.masked_fill(~inside[:, :, None, None], -torch.inf).amax(1)
        own_least = own.masked_fill(~inside[:, :, None, None], torch.inf).amin(1)
        most, least = bound(own_most, own_least).transpose(1, 2)  # [Hq, R, D]
        score = (q.clamp(min=0) * most + q.clamp(max=0) * least).sum(dim=-1)  # [Hq, R]
        scores.scatter_(2, newest.expand(len(q), -1)[:, :, None], score[:, :, None])
        options = {"num_first": 0, "num_last": 1, "newest_has_score": True}
        return _best_blocks(states, scores, page_size, top_k, **options)

    return select


def mean_pooled(
    top_k: int, block_size: int = 32, num_first: int = 1, num_last: int = 2
) -> Selection:
    def select(states: LayerStates) -> Tensor:
        q, k = states.q.float().transpose(0, 1), states.k.float()
        means = _blocks(k, block_size).mean(1).repeat_interleave(q.shape[0] // k.shape[1], dim=1)
        scores = q @ means.permute(1, 2, 0)  # [Hq, R, P]
        # A block that is not whole has no mean yet: it is the newest, which is read in any case.
        options = {"num_first": num_first, "num_last": num_last, "newest_has_score": False}
        return _best_blocks(states, scores, block_size, top_k, **options)

    return select


def dsa(addon: Addon, num_positions: int, device: torch.device) -> Selection:
    """The indexers of an add-on; layers without one use the selection of the last anchor."""
    settings = addon.settings
    indexers = {}
    for layer in addon.anchors:
        tensors = {name: addon.tensors[tensor_name(layer, name)] for name in TENSORS}
        indexers[layer] = Indexer(tensors, settings).to(device)
    angles = rope_angles(num_positions, settings["rope_dim"], settings["rope_theta"]).to(device)
    mask: Tensor | None = None

    def select(states: LayerStates) -> Tensor:
        nonlocal mask
        if states.layer in indexers:
            scores = indexers[states.layer].scores(states.x, states.rows, angles)
            scores.masked_fill_(forced(states, settings), torch.inf)
            mask = top_k_mask(scores, states.causal, settings["top_k"])
        return mask

    return select


def selection_of(addon: Addon, num_positions: int, device: torch.device) -> Selection:
    """The selection of an add-on file, whatever its selector."""
    if addon.selector in ("dsa", "dsa-shared"):
        return dsa(addon, num_positions, device)
    from minihisparse.weights_scripts.distil_nsa import nsa_selection

    return nsa_selection(addon, num_positions, device)


# ---- blocks ----


def _blocks(k: Tensor, size: int) -> Tensor:
    """k [T, Hkv, D] as [P, size, Hkv, D]; a last block that is not full repeats the last key."""
    missing = -len(k) % size
    if missing:
        k = torch.cat([k, k[-1:].expand(missing, -1, -1)])
    return k.unflatten(0, (-1, size))


def _best_blocks(
    states: LayerStates,
    scores: Tensor,
    size: int,
    top_k: int,
    *,
    num_first: int,
    num_last: int,
    newest_has_score: bool,
) -> Tensor:
    """The mask of the best blocks: softmax over blocks of each head's scores, heads summed.

    scores [Hq, R, P], q . key; the num_first first and num_last newest blocks are always read.
    """
    block = torch.arange(scores.shape[2], device=scores.device)
    newest = (states.rows // size)[:, None]
    scored = block <= newest if newest_has_score else block < newest
    scores = (scores * states.q.shape[2] ** -0.5).masked_fill(~scored, -torch.inf)
    shares = scores.softmax(dim=2).nan_to_num(0).sum(dim=0)  # [R, P]; NaN: no block has a score
    shares.masked_fill_((block < num_first) | (block > newest - num_last), torch.inf)
    best = top_k_mask(shares, block <= newest, top_k // size)
    return best.repeat_interleave(size, dim=1)[:, : len(states.x)] & states.causal
