"""How many requests run at once with B slots, and what that B gives: TPOT, tokens per second.

Device memory, host memory and clients each allow some number of requests; the least of them runs:

    device    the budget over a request's slots, selector state and tables  (`capacity.py`)
    host      L * record_bytes for each token that a request may have
    clients   as many as there are

A larger B means fewer misses, but fewer requests in the budget and more slots to scan; so there is
a best one. It deliberately does not know where miss rates come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from minihisparse.capacity import GIB, plan_capacity
from minihisparse.config import HiSparseConfig
from minihisparse.cost_model import CostModel
from minihisparse.selector import SelectorSize

CLOSE = 0.01  # throughputs that differ by less are as good: half a percent is noise


class _Shape(NamedTuple):
    """What `plan_capacity` reads of a model; the width in bytes."""

    num_hidden_layers: int
    record_width: int


@dataclass(frozen=True)
class Deployment:
    """cost: the machine and the model's shape. max_model_len: most tokens of a request.

    hbm_budget_gib, host_gib, max_running_requests: None: no limit; at least one is given.
    selector_bytes_per_token: device bytes of the selector's state per token, all layers.
    """

    cost: CostModel
    max_model_len: int
    hbm_budget_gib: float | None = None
    host_gib: float | None = None
    max_running_requests: int | None = None
    selector_bytes_per_token: int = 0

    def __post_init__(self) -> None:
        limits = (self.hbm_budget_gib, self.host_gib, self.max_running_requests)
        if all(limit is None for limit in limits):
            raise ValueError(
                "nothing limits the number of requests; pass --hbm-budget-gib, --host-gib or "
                "--max-running-requests"
            )

    @property
    def host_bytes_per_request(self) -> int:
        """Host memory of a request of max_model_len tokens."""
        return self.max_model_len * self.cost.num_layers * self.cost.record_bytes

    def num_requests(self, size: int | Sequence[int]) -> int:
        """Requests at once with B = size slots, or so many in each layer; 0: not even one."""
        limits = [self._on_device(size), self.max_running_requests]
        if self.host_gib is not None:
            limits.append(int(self.host_gib * GIB) // self.host_bytes_per_request)
        return min(limit for limit in limits if limit is not None)

    def predict(self, size: int | Sequence[int], miss_rate: float) -> dict[str, Any]:
        """requests, tpot_ms and tokens_per_second, the last two None if no request fits.

        TPOT is the time of a step, which gives each request a token; no prefill comes between.
        """
        requests = self.num_requests(size)
        if requests < 1:
            return {"requests": 0, "tpot_ms": None, "tokens_per_second": None}
        slots = size if isinstance(size, int) else sum(size) / len(size)
        step_us = self.cost.hisparse_step_us(requests, miss_rate, slots)
        return {
            "requests": requests,
            "tpot_ms": round(step_us / 1e3, 4),
            "tokens_per_second": round(1e6 * requests / step_us, 1),
        }

    def best(self, sizes: Sequence[int], miss_rate: Callable[[int], float]) -> int:
        """The smallest B of `sizes` whose throughput is within 1% of the highest.

        miss_rate: of a B. Raises ValueError if no request fits at any.
        """
        rates = [self.predict(size, miss_rate(size))["tokens_per_second"] or 0 for size in sizes]
        if max(rates) == 0:
            raise ValueError(
                f"not one request of {self.max_model_len} tokens fits; raise --hbm-budget-gib or "
                "--host-gib, or lower --max-model-len"
            )
        pairs = zip(sizes, rates, strict=True)
        return min(size for size, rate in pairs if rate >= (1 - CLOSE) * max(rates))

    def _on_device(self, size: int | Sequence[int]) -> int | None:
        """Requests in the device budget; 0 if it holds none."""
        if self.hbm_budget_gib is None:
            return None
        top_k = self.cost.top_k
        page_size = 16 if top_k % 16 == 0 else 1
        config = HiSparseConfig(
            top_k=top_k,
            device_buffer_size=size if isinstance(size, int) else tuple(size),
            page_size=page_size,
        )
        try:
            return plan_capacity(
                _Shape(self.cost.num_layers, self.cost.record_bytes),
                config,
                cache="hisparse",
                itemsize=1,
                max_model_len=self.max_model_len,
                hbm_budget_gib=self.hbm_budget_gib,
                selector=SelectorSize(1, self.selector_bytes_per_token, 0),
            ).max_running_requests
        except ValueError:  # the budget is above 0: it does not hold one request
            return 0
