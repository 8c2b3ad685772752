"""From bytes to throughput: how long a decode step takes, and how many requests share it.

    step = fixed + per_request * R                          what full KV costs too
           + L * bookkeeping                                Resolve without IO
           + R * L * K * miss_rate * record_bytes / link    the missed records, over the bus

    requests  R = budget / bytes per request  (`capacity.py`)
    throughput  = R / step

Full KV has the first line alone, and few requests; HiSparse all three, and many. So HiSparse wins
where the budget is what limits R, and loses where R is given, or where the bus is full: there its
throughput no longer grows with R, and the last line alone gives its limit,
link / (L * K * miss_rate * record_bytes) tokens per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CostModel:
    """Times in microseconds.

    fixed_us, per_request_us: a step of full KV with R requests takes fixed + per_request * R.
    bookkeeping_us: Resolve without IO, one layer. link_gb_per_s: 10^9 bytes per second.
    """

    fixed_us: float
    per_request_us: float
    num_layers: int
    top_k: int
    record_bytes: int
    link_gb_per_s: float
    bookkeeping_us: float = 0.0

    @classmethod
    def fit(cls, batches: Sequence[float], steps_us: Sequence[float], **settings) -> CostModel:
        """From measured steps of full KV: least squares of relative errors, no cost below 0.

        batches: requests in a step, or in a mean step. steps_us: its time. settings: the other
        fields. Raises ValueError without two different batches.
        """
        if len(set(batches)) < 2:
            raise ValueError(f"got batches {sorted(set(batches))}, expected two different ones")
        r, t = np.asarray(batches, float), np.asarray(steps_us, float)
        design = np.stack([1 / t, r / t], axis=1)  # times the two costs: a step over itself, 1
        costs, *_ = np.linalg.lstsq(design, np.ones_like(t), rcond=None)
        for other in (0, 1):  # noise may make one negative; then the other alone fits best
            if costs[other] < 0:
                column = design[:, 1 - other]
                costs[other], costs[1 - other] = 0.0, column.sum() / (column**2).sum()
        return cls(*costs.tolist(), **settings)

    def full_step_us(self, num_requests: float) -> float:
        """A step of full KV."""
        return self.fixed_us + self.per_request_us * num_requests

    def io_us(self, num_requests: float, miss_rate: float) -> float:
        """Time on the bus per step. miss_rate: misses over selected positions."""
        missed = num_requests * self.num_layers * self.top_k * miss_rate
        return missed * self.record_bytes / self.link_gb_per_s / 1e3

    def hisparse_step_us(self, num_requests: float, miss_rate: float) -> float:
        """A step of HiSparse; nothing is assumed to overlap."""
        bookkeeping = self.num_layers * self.bookkeeping_us
        return self.full_step_us(num_requests) + bookkeeping + self.io_us(num_requests, miss_rate)

    def tokens_per_second(self, num_requests: float, miss_rate: float | None = None) -> float:
        """Of HiSparse at a miss rate, or of full KV without one."""
        if miss_rate is None:
            return 1e6 * num_requests / self.full_step_us(num_requests)
        return 1e6 * num_requests / self.hisparse_step_us(num_requests, miss_rate)
