"""From bytes to throughput: how long a decode step takes, and how many requests share it.

    step = fixed + per_request * R                          what full KV costs too
           + L * (bookkeeping + scan * B)                   Resolve without IO
           + L * io_latency                                 if anything is missed
           + R * L * K * miss_rate * record_bytes / link    the missed records, over the bus

    requests  R = budget / bytes per request  (`capacity.py`)
    throughput  = R / step

Full KV has the first line alone, and few requests; HiSparse all of them, and many. So HiSparse wins
where the budget is what limits R, and loses where R is given, or where the bus is full: there its
throughput no longer grows with R, and the last line alone gives its limit,
link / (L * K * miss_rate * record_bytes) tokens per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

# Of one H200 with PCIe 5 (BENCHMARKS.md).
KERNEL_SHARE_OF_LINK = 0.9  # what kernels that read pinned memory reach of a memcpy's speed
BOOKKEEPING_US = 4.0  # Resolve without IO, a layer, K of 256 to 2,048
IO_LATENCY_US = 2.0  # a call with few misses takes this, and its bytes, longer than one without
SCAN_US_PER_SLOT = 0.8e-3  # from 2,048 to 16,384 slots


@dataclass(frozen=True)
class CostModel:
    """Times in microseconds.

    fixed_us, per_request_us: a step of full KV with R requests takes fixed + per_request * R.
    bookkeeping_us: Resolve without IO, one layer; if it is to depend on B, scan_us_per_slot is what
    each slot adds. link_gb_per_s: 10^9 bytes per second. io_latency_us: one layer, with any IO.
    """

    fixed_us: float
    per_request_us: float
    num_layers: int
    top_k: int
    record_bytes: int
    link_gb_per_s: float
    bookkeeping_us: float = 0.0
    io_latency_us: float = 0.0
    scan_us_per_slot: float = 0.0

    @classmethod
    def fit(cls, batches: Sequence[float], steps_us: Sequence[float], **settings) -> CostModel:
        """From measured steps of full KV: least squares of relative errors, no cost below 0.

        batches: requests in a step, or in a mean step. steps_us: its time. settings: the other
        fields. Raises ValueError without two different batches.
        """
        _check_batches(batches)
        design = np.stack([np.ones(len(batches)), np.asarray(batches, float)], axis=1)
        return cls(*_fit(design, steps_us, steps_us), **settings)

    @classmethod
    def fit_rows(cls, rows: Sequence[Mapping[str, Any]], **settings) -> CostModel:
        """From rows of `bench decode`, with whatever of full, no-io and hisparse there is.

        settings: the other fields; link, io_latency_us and scan_us_per_slot are taken as given, and
        so is bookkeeping_us if all rows are full KV's. The B of a row is found from its bytes.
        Raises ValueError: without two different batches, or if the rows are of a model with other
        layers or records.
        """
        rows = [row for row in rows if row["mode"] in ("full", "no-io", "hisparse")]
        rows = [row for row in rows if row["step_ms"]]
        batches = [row["running_mean"] for row in rows]
        _check_batches(batches)
        cached = [row["mode"] != "full" for row in rows]
        if any(cached):
            settings["bookkeeping_us"] = 0.0
        known = cls(0.0, 0.0, **settings)
        steps_us = np.array([1e3 * row["step_ms"]["mean"] for row in rows])
        unexplained = [us - known.known_us(row) for us, row in zip(steps_us, rows, strict=True)]
        columns = [np.ones(len(rows)), np.asarray(batches, float)]
        if any(cached):
            columns.append(known.num_layers * np.asarray(cached, float))
        costs = _fit(np.stack(columns, axis=1), np.array(unexplained), steps_us)
        if any(cached):
            settings["bookkeeping_us"] = costs.pop()
        return cls(*costs, **settings)

    def known_us(self, row: Mapping[str, Any]) -> float:
        """What slots and IO add to a row's step, and its bookkeeping: all but the first line."""
        if row["mode"] == "full":
            return 0.0
        us = self.num_layers * (self.bookkeeping_us + self.scan_us_per_slot * self.slots_of(row))
        if row["mode"] == "hisparse" and row["bytes_h2d_per_step"]:
            us += self.num_layers * self.io_latency_us
            us += row["bytes_h2d_per_step"] / self.link_gb_per_s / 1e3
        return us

    def row_us(self, row: Mapping[str, Any]) -> float:
        """What the model says for the step of a row of `bench decode`."""
        return self.full_step_us(row["running_mean"]) + self.known_us(row)

    def slots_of(self, row: Mapping[str, Any]) -> int:
        """B of a row of hisparse or no-io; a layer's, if B differs by layer.

        Raises ValueError if its bytes are not those of this many layers and record bytes.
        """
        one = row["running_max"] * self.num_layers * self.record_bytes
        slots = row["memory"]["device_kv_bytes"] / one - 1
        if slots < self.top_k:
            raise ValueError(
                f"{row['memory']['device_kv_bytes']} bytes of KV for {row['running_max']} requests "
                f"are fewer than K = {self.top_k} slots in each of {self.num_layers} layers, with "
                f"records of {self.record_bytes} bytes: measured with another model?"
            )
        return round(slots)

    def full_step_us(self, num_requests: float) -> float:
        """A step of full KV."""
        return self.fixed_us + self.per_request_us * num_requests

    def io_us(self, num_requests: float, miss_rate: float) -> float:
        """Time on the bus per step. miss_rate: misses over selected positions."""
        missed = num_requests * self.num_layers * self.top_k * miss_rate
        latency = self.num_layers * self.io_latency_us if missed else 0.0
        return latency + missed * self.record_bytes / self.link_gb_per_s / 1e3

    def hisparse_step_us(
        self, num_requests: float, miss_rate: float, num_slots: float = 0
    ) -> float:
        """A step of HiSparse; nothing is assumed to overlap. num_slots: B, a mean over layers."""
        bookkeeping = self.num_layers * (self.bookkeeping_us + self.scan_us_per_slot * num_slots)
        return self.full_step_us(num_requests) + bookkeeping + self.io_us(num_requests, miss_rate)

    def tokens_per_second(
        self, num_requests: float, miss_rate: float | None = None, num_slots: float = 0
    ) -> float:
        """Of HiSparse at a miss rate (and B), or of full KV without one."""
        if miss_rate is None:
            return 1e6 * num_requests / self.full_step_us(num_requests)
        return 1e6 * num_requests / self.hisparse_step_us(num_requests, miss_rate, num_slots)


def _check_batches(batches: Sequence[float]) -> None:
    if len(set(batches)) < 2:
        raise ValueError(f"got batches {sorted(set(batches))}, expected two different ones")


def _fit(design: np.ndarray, target: Sequence[float], scale: Sequence[float]) -> list[float]:
    """Costs, none below 0, with the least sum of ((design @ costs - target) / scale)^2.

    The best fit is the plain least squares of some of the columns, the others' costs being 0: noise
    may make one negative, and then the others alone fit best. There are few, so all are tried.
    """
    scale = np.asarray(scale, float)
    design, target = design / scale[:, None], np.asarray(target, float) / scale
    best, least = np.zeros(design.shape[1]), float((target**2).sum())
    for chosen in product([True, False], repeat=design.shape[1]):
        costs = np.zeros(design.shape[1])
        costs[list(chosen)], *_ = np.linalg.lstsq(design[:, chosen], target, rcond=None)
        error = float(((design @ costs - target) ** 2).sum())
        if (costs >= 0).all() and error < least:
            best, least = costs, error
    return best.tolist()
