"""Sparse selectors: which positions a decode step reads. They know nothing of where KV lives.

A selector keeps its own small state on the device and answers, per request and layer, with one list
of K positions: ascending, unique, -1 at the end. One list serves all heads, because a record holds
the K and V of all KV heads. Ties go to the lowest position, so that the same state always gives the
same list.

Quest (arXiv 2406.10774; here one selection per layer instead of one per head): pages of
`page_size` positions, the elementwise minimum and maximum of each page's keys, and from them an
upper bound of q . k over the page. The bounds of each query head go through a softmax over the
pages, the heads are summed, and the best pages are read whole.

Cost: 2 * Hkv * D elements per page and layer on the device, as much as one record: with pages of
16, 1/16 of the KV. It is read once per step and layer, and it grows with the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minihisparse.batch import Batch


class QuestSelector:
    """Quest over pages; the newest page is always read.

    `bounds`: [L, max_requests, Hkv, P, 2, D] in the model's dtype, each page's max and min key.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        top_k: int,
        page_size: int,
        max_requests: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises ValueError if `top_k` is not a whole number of pages."""
        if top_k < page_size or top_k % page_size:
            raise ValueError(
                f"quest reads whole pages: top_k={top_k} is not a multiple of "
                f"page_size={page_size}; change --top-k or --page-size"
            )
        self.page_size = page_size
        self.top_k = top_k
        num_pages = -(-max_model_len // page_size)
        shape = (num_layers, max_requests, num_kv_heads, num_pages, 2, head_dim)
        self.bounds = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def state_bytes(self) -> int:
        return self.bounds.nbytes

    def write_prompt(self, layer: int, row: int, k: Tensor) -> None:
        """Builds the bounds of a whole prompt; k [T, Hkv, D], positions 0..T-1."""
        num_full = len(k) // self.page_size
        pages = [k[: num_full * self.page_size].unflatten(0, (num_full, self.page_size))]
        if num_full * self.page_size < len(k):
            pages.append(k[None, num_full * self.page_size :])
        first = 0
        for block in pages:  # [pages, tokens, Hkv, D]
            if len(block):
                bounds = torch.stack([block.amax(1), block.amin(1)], dim=2)  # [pages, Hkv, 2, D]
                span = slice(first, first + len(block))
                self.bounds[layer, row, :, span] = bounds.transpose(0, 1)
                first += len(block)

    def write(self, layer: int, k: Tensor, batch: Batch) -> None:
        """Adds the newest key of each request to its page; k [R, Hkv, D]."""
        batch, k = batch.real, k[: batch.num_real_reqs]
        rows, positions = batch.req_pool_indices, batch.positions
        bounds, page = self.bounds[layer], positions // self.page_size
        old_max, old_min = bounds[rows, :, page].unbind(2)  # [R, Hkv, D] each
        starts_page = (positions % self.page_size == 0)[:, None, None]
        new_max = torch.where(starts_page, k, torch.maximum(old_max, k))
        new_min = torch.where(starts_page, k, torch.minimum(old_min, k))
        bounds[rows, :, page] = torch.stack([new_max, new_min], dim=2)

    def select(self, layer: int, q: Tensor, batch: Batch) -> Tensor:
        """The positions to read, [R, K] int32, for the newest queries q [R, Hq, D]."""
        num_pages = max(-(-batch.max_seq_len // self.page_size), 1)  # 1: all rows are padding
        scores = self._page_scores(layer, q, batch, num_pages)  # [R, P]
        newest = (batch.positions // self.page_size)[:, None]
        scores.scatter_(1, newest.clamp(min=0), torch.inf)
        # A stable sort keeps equal scores in order of position; torch.topk does not.
        best = scores.sort(dim=1, descending=True, stable=True)
        num_selected = min(self.top_k // self.page_size, num_pages)
        exists = best.values[:, :num_selected] > -torch.inf
        pages = torch.where(exists, best.indices[:, :num_selected], num_pages).sort(dim=1).values
        offsets = torch.arange(self.page_size, device=q.device)
        positions = (pages[:, :, None] * self.page_size + offsets).flatten(1)
        positions = torch.where(positions < batch.seq_lens[:, None], positions, -1)
        return torch.nn.functional.pad(
            positions.int(), (0, self.top_k - positions.shape[1]), value=-1
        )

    def _page_scores(self, layer: int, q: Tensor, batch: Batch, num_pages: int) -> Tensor:
        """[R, P] float32: softmax over pages of each query head's bound, summed over heads.

        max over k in the page of q . k <= sum_d max(q_d * max_d, q_d * min_d)
                                         = relu(q) . max + min(q, 0) . min
        """
        num_reqs, _, head_dim = q.shape
        bounds = self.bounds[layer, :, :, :num_pages][batch.req_pool_indices].float()
        bounds = bounds.flatten(3)  # [R, Hkv, P, 2 * D]
        q = q.float().view(num_reqs, bounds.shape[1], -1, head_dim)  # [R, Hkv, group, D]
        signed = torch.cat([q.clamp(min=0), q.clamp(max=0)], dim=-1)
        bound = signed @ bounds.transpose(-1, -2) * head_dim**-0.5  # [R, Hkv, group, P]
        page_start = torch.arange(num_pages, device=q.device) * self.page_size
        unwritten = page_start >= batch.seq_lens[:, None]  # [R, P]
        bound.masked_fill_(unwritten[:, None, None, :], -torch.inf)
        scores = bound.softmax(dim=-1).sum(dim=(1, 2))
        return scores.masked_fill_(unwritten, -torch.inf)
