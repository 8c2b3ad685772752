"""One decode step's batch: which requests take part, and how long each of them is.

Upstream names: req_pool_indices, seq_lens, num_real_reqs. Every part of a step (model, selector,
cache) is handed the same `Batch`; none of them ever sees a request object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """R batch rows. Rows from `num_real_reqs` on are padding: they must change nobody's state.

    req_pool_indices: [R] int64, the row that each request owns in every per-request table.
    seq_lens: [R] int32, tokens of the request so far, the one being decoded included (S).
    num_real_reqs_tensor: [1] int32, `num_real_reqs` where kernels read it.
    min_seq_len, max_seq_len, num_real_reqs: host integers, of the real rows, for torch operations:
        what need not be looked at is not. None in a CUDA graph, which would freeze them.
    """

    req_pool_indices: Tensor
    seq_lens: Tensor
    num_real_reqs_tensor: Tensor
    min_seq_len: int | None = None
    max_seq_len: int | None = None
    num_real_reqs: int | None = None

    @classmethod
    def make(
        cls,
        rows: Sequence[int],
        seq_lens: Sequence[int],
        device: torch.device | str,
        padding: int = 0,
    ) -> Batch:
        """From host numbers; `padding` rows are appended (of length 0, pointing at row 0)."""
        return cls(
            torch.tensor([*rows, *[0] * padding], dtype=torch.int64, device=device),
            torch.tensor([*seq_lens, *[0] * padding], dtype=torch.int32, device=device),
            torch.tensor([len(rows)], dtype=torch.int32, device=device),
            min(seq_lens, default=0),
            max(seq_lens, default=0),
            len(rows),
        )

    @cached_property
    def positions(self) -> Tensor:
        """[R] int64: the newest position of each request, S - 1; 0 in a row of length 0."""
        return (self.seq_lens.long() - 1).clamp(min=0)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """What kernels are given of a batch: seq_lens, req_pool_indices, num_real_reqs."""
        return self.seq_lens, self.req_pool_indices, self.num_real_reqs_tensor

    @property
    def real(self) -> Batch:
        """The batch without its padding."""
        return self if self.num_real_reqs == len(self.seq_lens) else self._unpadded

    @cached_property
    def _unpadded(self) -> Batch:
        num = self.num_real_reqs
        rows, lens = self.req_pool_indices[:num], self.seq_lens[:num]
        host = self.min_seq_len, self.max_seq_len, num
        return Batch(rows, lens, self.num_real_reqs_tensor, *host)
