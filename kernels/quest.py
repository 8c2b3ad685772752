"""Quest's page selection on a GPU: key bounds per page, and the pages whose bounds promise most.

The rule is QuestSelector's, in `minihisparse/indexer.py`, which is the reference in torch. A write
is one launch, a selection two (`quest_kernels.py`):

    add_keys       the newest key of each request goes into its page's bounds, or starts a page
    score_pages    the bound of every query head for every page, and for tiles of pages what the
                   softmax needs to know: their maximum, and their sum of exponentials
    select_pages   softmax over a request's pages from these, summed over the heads; the newest page
                   is forced; the best K / page_size pages (`top_k_of_row.py`) become positions

    quest = QuestKernels(max_requests=8, max_pages_per_request=512, num_q_heads=9, ...)
    quest.write(bounds, first_page, k, seq_lens, req_pool_indices, num_real_reqs)
    positions = quest.select(bounds, first_page, q, seq_lens, req_pool_indices, num_real_reqs)

On tensors of a GPU the kernels run compiled, on tensors of a CPU simulated. Calls allocate nothing
and do not wait, so a CUDA graph can hold them, once `load` has been called. Grids depend on R only,
not on how long the requests are; blocks that find no pages leave at once.

Shapes: `bounds` [pages, Hkv, 2, D] in the model's dtype, each page's maxima and minima of one
layer; a request row's pages are contiguous, from first_page[row] on.

Cost: 4 * (Hq + 1) bytes of scratch per page of max_requests requests, for all layers. A selection
reads the bounds once, and writes and reads the scratch, which stays in L2 unless it is large.

It deliberately does not know where KV lies, nor what a prompt is: who writes a prompt's keys fills
their bounds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minihisparse.kernels.numbers import dtype_name
from minihisparse.kernels.quest_kernels import (
    KEY_THREADS,
    SCORE_THREADS,
    key_kernel,
    score_kernel,
    select_kernel,
)
from minihisparse.kernels.top_k_of_row import MAX_TOP_K

# Pages per tile: as few as a block reads at once, so that a short request has many blocks; more
# for long requests, so that there are about so many tiles, while their scores fit.
MIN_TILE_PAGES, TILES, MAX_TILE_SCORES = 64, 512, 4096
# Blocks of a launch, if there is work for so many: a few per multiprocessor. A graph for a large
# batch of requests that may be long should not be full of blocks that find nothing to do.
SCORE_BLOCKS, SELECT_BLOCKS = 1024, 256
SELECT_THREADS = 512
LONGEST_IN_ONE_BLOCK = 4096  # pages that one block selects from: it holds them in registers


class QuestKernels:
    """Quest for the layers of one model, on one stream: calls share the scratch and the answer."""

    def __init__(
        self,
        *,
        max_requests: int,
        max_pages_per_request: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        top_k: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates scratch for a batch of max_requests rows, padding included, on `device`.

        max_pages_per_request: no request may be longer. dtype: of bounds, q and k.
        Raises ValueError for what the kernels cannot do.
        """
        name = dtype_name(dtype)
        if head_dim < 1 or head_dim * dtype.itemsize % 16:
            raise ValueError(
                f"head_dim={head_dim}: a head has {head_dim * dtype.itemsize} bytes, which must be "
                "a multiple of 16"
            )
        if num_q_heads % num_kv_heads:
            raise ValueError(
                f"num_q_heads={num_q_heads} is not a multiple of num_kv_heads={num_kv_heads}"
            )
        if top_k < page_size or top_k % page_size:
            raise ValueError(
                f"quest reads whole pages: top_k={top_k} is not a multiple of "
                f"page_size={page_size}; change --top-k or --page-size"
            )
        if top_k // page_size > MAX_TOP_K:
            raise ValueError(
                f"top_k={top_k} is {top_k // page_size} pages, more than {MAX_TOP_K}; lower --top-k"
            )
        if min(max_requests, max_pages_per_request) < 1:
            raise ValueError(f"{max_requests=} and {max_pages_per_request=} must be at least 1")
        self.max_requests, self.max_pages = max_requests, max_pages_per_request
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, head_dim
        self.top_k, self.page_size, self.dtype, self.device = top_k, page_size, dtype, device
        tile_pages = MIN_TILE_PAGES
        group = num_q_heads // num_kv_heads
        while tile_pages * TILES < max_pages_per_request:
            if 2 * tile_pages * group > MAX_TILE_SCORES:
                break
            tile_pages *= 2
        self._tile_pages = tile_pages
        self._max_tiles = -(-max_pages_per_request // tile_pages)
        sizes = {"num_q_heads": num_q_heads, "page_size": page_size}
        kv_sizes = {"dtype": name, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        self._add_keys = key_kernel(**kv_sizes, page_size=page_size)
        self._score_pages = score_kernel(**kv_sizes, **sizes, tile_pages=tile_pages)
        self._select_threads = SELECT_THREADS
        self._select_pages = select_kernel(
            **sizes, top_k=top_k, num_threads=SELECT_THREADS, longest=LONGEST_IN_ONE_BLOCK
        )

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(max_requests, *shape, dtype=dtype, device=device)

        self._head_scores = empty(num_q_heads, self._max_tiles * tile_pages)
        self._tile_max = empty(num_q_heads, self._max_tiles)
        self._tile_sum = empty(num_q_heads, self._max_tiles)
        self._page_scores = empty(self._max_tiles * tile_pages)
        candidates = 0
        if max_pages_per_request > LONGEST_IN_ONE_BLOCK:
            candidates = self._blocks_per_request(1) * (top_k // page_size)
            candidates = min(candidates, max_pages_per_request)
        candidates = -(-candidates // 4) * 4  # rows start at multiples of 16 bytes
        self._candidates = empty(candidates)
        self._candidate_indices = empty(candidates, dtype=torch.int32)
        self._tickets = empty(dtype=torch.int32)
        self.positions = empty(top_k, dtype=torch.int32).fill_(-1)

    def load(self) -> None:
        """Compiles or loads the kernels: on a GPU, before any graph.

        On a CPU they are simulated, and there is nothing to do. Raises RuntimeError if the GPU
        cannot run them, ValueError if its shared memory is too small for them.
        """
        if self.device.type != "cpu":
            for kernel in (self._add_keys, self._score_pages, self._select_pages):
                kernel.load(self._tickets.device)

    @property
    def device_bytes(self) -> int:
        """Bytes of the scratch and the answer."""
        scratch = (self._head_scores, self._tile_max, self._tile_sum, self._page_scores)
        top_k = (self._candidates, self._candidate_indices, self._tickets)
        return sum(tensor.nbytes for tensor in (*scratch, *top_k, self.positions))

    def write(
        self,
        bounds: Tensor,
        first_page: Tensor,
        k: Tensor,
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        num_real_reqs: Tensor,
    ) -> None:
        """Adds each real request's newest key, of position S - 1, to its page of one layer.

        bounds [pages, Hkv, 2, D], changed; first_page [request rows] int64; k [R, Hkv, D], rows may
        lie apart; seq_lens [R] int32, the new token included; req_pool_indices [R] int64;
        num_real_reqs [1] int32. Two requests must not share a row. Padding and S = 0 write nothing.
        Equal to torch.maximum and minimum in every bit, but for the sign of a zero and NaN's bits.
        Raises TypeError or ValueError for tensors that do not fit.
        """
        num_requests = len(k)
        self._check(bounds, k, "k", self.num_kv_heads, seq_lens, req_pool_indices)
        if num_requests:
            self._add_keys.launch(
                num_requests,
                KEY_THREADS,
                bounds,
                first_page,
                k,
                k.stride(0) * k.element_size(),
                seq_lens,
                req_pool_indices,
                num_real_reqs,
            )

    def select(
        self,
        bounds: Tensor,
        first_page: Tensor,
        q: Tensor,
        seq_lens: Tensor,
        req_pool_indices: Tensor,
        num_real_reqs: Tensor,
    ) -> Tensor:
        """The positions to read in one layer, int32 [R, K]: ascending, less than S, -1 at the end.

        q [R, Hq, D], rows may lie apart; the rest as for `write`, nothing of it is changed.
        All -1 for padding and for S = 0. The next call overwrites what is returned.
        Raises TypeError or ValueError for tensors that do not fit.
        """
        num_requests = len(q)
        self._check(bounds, q, "q", self.num_q_heads, seq_lens, req_pool_indices)
        positions = self.positions[:num_requests]
        if not num_requests:
            return positions
        blocks_per_head = -(-SCORE_BLOCKS // (num_requests * self.num_kv_heads))
        blocks_per_head = min(blocks_per_head, self._max_tiles)
        blocks_per_request = self._blocks_per_request(num_requests)
        self._score_pages.launch(
            num_requests * self.num_kv_heads * blocks_per_head,
            SCORE_THREADS,
            bounds,
            first_page,
            q,
            q.stride(0) * q.element_size(),
            seq_lens,
            req_pool_indices,
            num_real_reqs,
            self._head_scores,
            self._tile_max,
            self._tile_sum,
            blocks_per_head,
        )
        self._select_pages.launch(
            num_requests * blocks_per_request,
            self._select_threads,
            self._head_scores,
            self._tile_max,
            self._tile_sum,
            self._tile_pages,
            seq_lens,
            num_real_reqs,
            self._page_scores,
            self._candidates,
            self._candidate_indices,
            self._tickets,
            positions,
            blocks_per_request,
        )
        return positions

    def _blocks_per_request(self, num_requests: int) -> int:
        """To select pages: no more than are useful for one request, or than run at about once."""
        return min(-(-self.max_pages // self._select_threads), -(-SELECT_BLOCKS // num_requests))

    def _check(
        self,
        bounds: Tensor,
        rows: Tensor,
        name: str,
        num_heads: int,
        seq_lens: Tensor,
        req_pool_indices: Tensor,
    ) -> None:
        """Raises ValueError for a shape, dtype or address that the kernels would misread."""
        num_requests = len(rows)
        if num_requests > self.max_requests:
            raise ValueError(
                f"{name} has {num_requests} rows, more than max_requests={self.max_requests}"
            )
        shapes = {
            "bounds": (bounds, (len(bounds), self.num_kv_heads, 2, self.head_dim)),
            name: (rows, (num_requests, num_heads, self.head_dim)),
            "seq_lens": (seq_lens, (num_requests,)),
            "req_pool_indices": (req_pool_indices, (num_requests,)),
        }
        for what, (tensor, shape) in shapes.items():
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{what} is {tuple(tensor.shape)}, expected {shape}")
        for what, tensor in (("bounds", bounds), (name, rows)):
            if tensor.dtype != self.dtype:
                raise ValueError(f"{what} is {tensor.dtype}, expected {self.dtype}")
            if (tensor.data_ptr() | tensor.stride(0) * tensor.element_size()) % 16:
                raise ValueError(
                    f"{what}: address and row stride must be multiples of 16 bytes, got "
                    f"{tensor.data_ptr():#x} and {tensor.stride(0) * tensor.element_size()}"
                )
        if not bounds.is_contiguous():
            raise ValueError(f"bounds must be contiguous, got strides {bounds.stride()}")
