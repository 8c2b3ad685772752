"""Quest: which pages a step reads, by upper bounds of what their keys can score. No training.

Pages of `page_size` positions, the elementwise minimum and maximum of each page's keys, and from
them an upper bound of q . k over the page. The bounds of each query head go through a softmax over
the pages, the heads are summed, and the best pages are read whole. (arXiv 2406.10774; here one
selection per layer instead of one per head.)

Cost: 2 * Hkv * D elements per page and layer on the device, as much as one record: with pages of
16, 1/16 of the KV. It is read once per step and layer, and it grows with the context. On a GPU a
selection is a few kernels (`kernels/quest.py`), on a CPU torch operations, below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minihisparse.batch import Batch
from minihisparse.config import HiSparseConfig
from minihisparse.model import AttentionInputs
from minihisparse.model_config import ModelConfig
from minihisparse.selector import Selector, SelectorSize

if TYPE_CHECKING:
    from minihisparse.kernels.quest import QuestKernels


class QuestSelector(Selector):
    """Quest over pages; the newest page is always read.

    bounds: [L, num_pages, Hkv, 2, D] in the model's dtype, each page's max and min key; a request's
    pages lie side by side.
    """

    unit_name = "pages"

    def __init__(
        self,
        *,
        num_layers: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        top_k: int,
        page_size: int,
        max_requests: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        num_pages: int | None = None,
        kernels: bool | None = None,
    ) -> None:
        """num_pages: of all requests together; None: for max_requests of max_model_len tokens.
        kernels: select with kernels (simulated on a CPU) or with torch; None: kernels on a GPU.

        Raises ValueError if `top_k` is not a whole number of pages.
        """
        if top_k < page_size or top_k % page_size:
            raise ValueError(
                f"quest reads whole pages: top_k={top_k} is not a multiple of "
                f"page_size={page_size}; change --top-k or --page-size"
            )
        super().__init__(
            top_k=top_k,
            unit_tokens=page_size,
            num_units=num_pages,
            max_requests=max_requests,
            max_model_len=max_model_len,
            device=device,
        )
        self.page_size = page_size
        shape = (num_layers, self.extents.num_units, num_kv_heads, 2, head_dim)
        self.bounds = torch.zeros(shape, dtype=dtype, device=device)
        self._kernels: QuestKernels | None = None
        if device.type == "cuda" if kernels is None else kernels:
            from minihisparse.kernels.quest import QuestKernels

            self._kernels = QuestKernels(
                max_requests=max_requests,
                max_pages_per_request=-(-max_model_len // page_size),
                num_q_heads=num_q_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                top_k=top_k,
                page_size=page_size,
                dtype=dtype,
                device=device,
            )
            self._kernels.load()

    @staticmethod
    def size(
        model: ModelConfig, hisparse: HiSparseConfig, *, itemsize: int, max_model_len: int
    ) -> SelectorSize:
        """What the state takes, the kernels' buffers included."""
        heads, pages = model.num_attention_heads, -(-max_model_len // hisparse.page_size)
        tiles = -(-pages // 64)  # the kernels' tiles have 64 pages
        scores = 4 * 64 * tiles * (heads + 1) + 8 * heads * tiles
        return SelectorSize(
            unit_tokens=hisparse.page_size,
            # A page's bounds are as large as a record.
            unit_bytes=model.num_hidden_layers * model.record_width * itemsize,
            row_bytes=12 + scores + 4 * hisparse.top_k,
        )

    @property
    def unit_state(self) -> tuple[Tensor, ...]:
        return (self.bounds,)

    @property
    def state_bytes(self) -> int:
        kernel_bytes = self._kernels.device_bytes if self._kernels else 0
        return self.bounds.nbytes + self.extents.first.nbytes + kernel_bytes

    def write_prompt(
        self, layer: int, row: int, first_position: int, inputs: AttentionInputs
    ) -> None:
        k, page_size = inputs.k, self.page_size  # k [T, Hkv, D]
        page = self.extents.extent_of(row)[0] + first_position // page_size
        head = min(-first_position % page_size, len(k))
        if head:  # the chunk begins inside a page
            old_max, old_min = self.bounds[layer, page].unbind(1)  # [Hkv, D] each
            old_max.copy_(torch.maximum(old_max, k[:head].amax(0)))
            old_min.copy_(torch.minimum(old_min, k[:head].amin(0)))
            page, k = page + 1, k[head:]
        num_full = len(k) // page_size
        blocks = [k[: num_full * page_size].unflatten(0, (num_full, page_size))]
        if num_full * page_size < len(k):
            blocks.append(k[None, num_full * page_size :])
        for block in blocks:  # [pages, tokens, Hkv, D]
            if len(block):
                bounds = torch.stack([block.amax(1), block.amin(1)], dim=2)  # [pages, Hkv, 2, D]
                self.bounds[layer, page : page + len(block)] = bounds
                page += len(block)

    def write(self, layer: int, inputs: AttentionInputs, batch: Batch) -> None:
        """Adds the newest key of each request to its page."""
        bounds, k = self.bounds[layer], inputs.k  # k [R, Hkv, D]
        if self._kernels:
            self._kernels.write(bounds, self.extents.first, k, *batch.tensors)
            return
        batch, k = batch.real, k[: batch.num_real_reqs]
        positions = batch.positions
        page = self.extents.first[batch.req_pool_indices] + positions // self.page_size
        old_max, old_min = bounds[page].unbind(2)  # [R, Hkv, D] each
        starts_page = (positions % self.page_size == 0)[:, None, None]
        new_max = torch.where(starts_page, k, torch.maximum(old_max, k))
        new_min = torch.where(starts_page, k, torch.minimum(old_min, k))
        bounds[page] = torch.stack([new_max, new_min], dim=2)

    def select(self, layer: int, inputs: AttentionInputs, batch: Batch) -> Tensor:
        q = inputs.q  # [R, Hq, D]
        if self._kernels:
            return self._kernels.select(self.bounds[layer], self.extents.first, q, *batch.tensors)
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
        page = torch.arange(num_pages, device=q.device)
        pages = self.extents.first[batch.req_pool_indices, None] + page
        # A shorter request's pages may end before those of the batch: what is read there is masked.
        pages = pages.clamp(max=self.extents.num_units - 1)
        bounds = self.bounds[layer].index_select(0, pages.flatten()).float()
        bounds = bounds.view(*pages.shape, *bounds.shape[1:]).transpose(1, 2).flatten(3)
        # bounds [R, Hkv, P, 2 * D]
        q = q.float().view(num_reqs, bounds.shape[1], -1, head_dim)  # [R, Hkv, group, D]
        signed = torch.cat([q.clamp(min=0), q.clamp(max=0)], dim=-1)
        bound = signed @ bounds.transpose(-1, -2) * head_dim**-0.5  # [R, Hkv, group, P]
        unwritten = page * self.page_size >= batch.seq_lens[:, None]  # [R, P]
        bound.masked_fill_(unwritten[:, None, None, :], -torch.inf)
        scores = bound.softmax(dim=-1).sum(dim=(1, 2))
        return scores.masked_fill_(unwritten, -torch.inf)
