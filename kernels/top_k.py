"""Top-k of rows of scores, as lists of indices in ascending order. Ties go to the lowest index.

    top_k = TopK(max_rows=8, max_length=131_072, top_k=2048, device=device)
    top_k.select(scores, lens, indices)

The rule and how it is done are in `top_k_of_row.py`. Of row r the scores before lens[r] count; the
list ends with -1 if they are fewer than K. A row has a block, a long one several.

On tensors of a GPU the kernel runs compiled, on tensors of a CPU simulated. `select` allocates
nothing and does not wait, so a CUDA graph can hold it, once `load` has been called.

Reads 4 bytes per score, writes 4 per index; the rest stays in L1 and L2.

It deliberately does not know where scores come from, nor what the indices mean.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from minihisparse.kernels.device import (
    DEVICE_ADDRESS,
    Kernel,
    cuda,
    int32,
    int64,
    kernel,
    uint32,
)
from minihisparse.kernels.top_k_of_row import (
    MAX_TOP_K,
    NUM_THREADS,
    SHORTEST_TILE,
    top_k_of_tiles_function,
)


@cache
def top_k_kernel(*, num_threads: int, top_k: int, wide: bool) -> Kernel:
    THREADS, K, LIST = num_threads, top_k, top_k + 1
    top_k_of_tiles = top_k_of_tiles_function(num_threads=num_threads, top_k=top_k, wide=wide)

    @kernel(max_threads=num_threads)
    def top_k_of_rows(
        scores: DEVICE_ADDRESS,  # [R, N] float32 read
        max_length: int64,  # N
        row_bytes: int64,  # from row to row of the scores
        lens: int32[::1],  # [R] read
        indices: int32[:, ::1],  # [R, K] every entry is written
        candidates: DEVICE_ADDRESS,  # [>= R, C] float32 scratch
        candidate_indices: int32[:, ::1],  # [>= R, C] scratch
        tickets: DEVICE_ADDRESS,  # [>= R] int32, 0 before and after
        tile: int64,  # scores per block
        blocks_per_row: int64,
    ):
        selected = cuda.shared.array(LIST, int32)
        tid = cuda.threadIdx.x & 1023
        block = uint32(cuda.blockIdx.x)
        row = int64(block // uint32(blocks_per_row))
        part = int64(block) - row * blocks_per_row
        length = max(min(int64(lens[row]), max_length), int64(0))
        if part > 0 and part * tile >= length:
            return
        count = top_k_of_tiles(
            scores + row * row_bytes,
            length,
            tile,
            tile,
            part,
            candidates + row * candidate_indices.shape[1] * 4,
            candidate_indices[row],
            tickets + 4 * row,
            selected,
        )
        if count >= 0:
            i = tid
            while i < K:
                indices[row, i] = selected[uint32(i)] if i < count else -1
                i += THREADS

    return top_k_of_rows


class TopK:
    """Top-k of up to max_rows rows of max_length scores, on one stream: calls share the scratch."""

    def __init__(
        self,
        *,
        max_rows: int,
        max_length: int,
        top_k: int,
        device: torch.device,
        tile_scores: int | None = None,
        num_threads: int = NUM_THREADS,
    ) -> None:
        """Allocates the scratch on `device`.

        tile_scores: longest row that one block selects from, a multiple of 4; None: by the sizes.
        num_threads: per block, a power of two in 32..512. Raises ValueError for other sizes.
        """
        if not 1 <= top_k <= MAX_TOP_K:
            raise ValueError(f"top_k={top_k} is not in 1..{MAX_TOP_K}")
        if not 1 <= max_length < 2**30 or max_rows < 1:
            raise ValueError(
                f"max_length={max_length} must be in 1..2**30 - 1, max_rows={max_rows} at least 1"
            )
        if num_threads not in (32, 64, 128, 256, 512):
            raise ValueError(f"num_threads={num_threads} must be a power of two in 32..512")
        if tile_scores is None:
            # The last block reads top_k candidates of each tile: about as many as a tile has.
            tile_scores = max(SHORTEST_TILE, 4 * round(math.sqrt(max_length * top_k) / 4))
        if tile_scores < 4 or tile_scores % 4:
            raise ValueError(f"tile_scores={tile_scores} must be a multiple of 4")
        self.max_rows, self.max_length, self.top_k = max_rows, max_length, top_k
        self.tile_scores, self.num_threads = tile_scores, num_threads
        num_tiles = -(-max_length // tile_scores)
        width = num_tiles * min(top_k, tile_scores) if num_tiles > 1 else 0
        shape = (max_rows, -(-width // 4) * 4)  # rows start at multiples of 16 bytes
        self._candidates = torch.zeros(shape, dtype=torch.float32, device=device)
        self._candidate_indices = torch.zeros(shape, dtype=torch.int32, device=device)
        self._tickets = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def load(self) -> None:
        """Compiles or loads what `select` may launch: on a GPU, before any graph.

        Raises RuntimeError if the GPU cannot run it.
        """
        if self._tickets.device.type != "cpu":
            for wide in (False, True):
                self._kernel(wide).load(self._tickets.device)

    @property
    def device_bytes(self) -> int:
        """Bytes of the scratch."""
        return sum(t.nbytes for t in (self._candidates, self._candidate_indices, self._tickets))

    def select(self, scores: Tensor, lens: Tensor, indices: Tensor) -> None:
        """Writes the top-k of each row: allocates nothing, and does not wait.

        scores [R, N] float32, rows may lie apart; lens [R] int32, how many scores of a row count;
        indices [R, K] int32, all of it is written: ascending, -1 at the end.
        Raises TypeError or ValueError for tensors that do not fit.
        """
        if scores.ndim != 2 or scores.dtype != torch.float32:
            raise ValueError(f"scores is {scores.dtype} {tuple(scores.shape)}, not float32 [R, N]")
        num_rows, length = scores.shape
        if num_rows > self.max_rows or length > self.max_length:
            raise ValueError(
                f"scores is {tuple(scores.shape)}, more than max_rows={self.max_rows} or "
                f"max_length={self.max_length}"
            )
        if lens.shape != (num_rows,) or indices.shape != (num_rows, self.top_k):
            raise ValueError(
                f"lens is {tuple(lens.shape)} and indices {tuple(indices.shape)}, expected "
                f"{(num_rows,)} and {(num_rows, self.top_k)}"
            )
        if not num_rows:
            return
        blocks_per_row = max(1, -(-length // self.tile_scores))
        row_bytes = scores.stride(0) * 4
        wide = (scores.data_ptr() | row_bytes | 4 * length) % 16 == 0
        self._kernel(wide).launch(
            num_rows * blocks_per_row,
            self.num_threads,
            scores,
            length,
            row_bytes,
            lens,
            indices,
            self._candidates,
            self._candidate_indices,
            self._tickets,
            self.tile_scores,
            blocks_per_row,
        )

    def _kernel(self, wide: bool) -> Kernel:
        return top_k_kernel(num_threads=self.num_threads, top_k=self.top_k, wide=wide)
