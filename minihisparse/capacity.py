"""How many requests a device memory budget holds: the sizes of caches and selector, in bytes.

The budget counts what grows with requests: KV records, selector state and tables, for both caches
by the same rule, so that they can be compared at equal memory. Weights, the workspace of a forward
pass and CUDA graphs come on top.

Per request of S tokens, L layers, records of W bytes, pages of P tokens:

    full       L * W * S                        records
    hisparse   L * ((B + 1) * W + 6 * B)        records, device_buffer_tokens and lru_slots
    both       L * W * S / P                    Quest's page bounds
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minihisparse.config import HiSparseConfig
from minihisparse.model_config import ModelConfig

GIB = 2**30
DEFAULT_RUNNING_REQUESTS = 8


@dataclass(frozen=True)
class Capacity:
    """Sizes to allocate.

    max_running_requests: request rows. device_slots: FullCache's, of all requests together.
    selector_pages: of all requests together. total_bytes: what these take.
    """

    max_running_requests: int
    device_slots: int
    selector_pages: int
    total_bytes: int


def plan_capacity(
    model: ModelConfig,
    hisparse: HiSparseConfig,
    *,
    cache: str,
    itemsize: int,
    max_model_len: int,
    max_running_requests: int | None = None,
    hbm_budget_gib: float | None = None,
) -> Capacity:
    """Sizes for `cache` ("full" or "hisparse"), with elements of `itemsize` bytes.

    Without a budget everything is as large as max_running_requests (8 if None) requests of
    max_model_len tokens need. With one, there are as many rows as it holds such requests; if
    max_running_requests is given too, there are that many rows, and the rest of the budget is
    shared by requests of whatever length, at least one of max_model_len tokens.
    Raises ValueError if the budget is smaller than one request; the message says what helps.
    """
    layers, page_size = model.num_hidden_layers, hisparse.page_size
    record_bytes = model.record_width * itemsize
    pages = -(-max_model_len // page_size)
    page_bytes = layers * record_bytes  # a page's bounds are as large as a record
    row_bytes = _table_bytes(model, hisparse, pages)
    if cache == "full":
        slot_bytes = layers * record_bytes
    else:
        slot_bytes = 0
        num_slots = hisparse.device_buffer_size_for(layers, record_bytes)
        row_bytes += layers * ((num_slots + 1) * record_bytes + 6 * num_slots)
        row_bytes += 4 * pages + 12 * hisparse.top_k + 64
    length_bytes = max_model_len * slot_bytes + pages * page_bytes

    def capacity(rows: int, slots: int, pages: int) -> Capacity:
        total = rows * row_bytes + slots * slot_bytes + pages * page_bytes
        return Capacity(rows, slots, pages, total)

    if hbm_budget_gib is None:
        rows = max_running_requests or DEFAULT_RUNNING_REQUESTS
        return capacity(rows, rows * max_model_len, rows * pages)
    if not 0 < hbm_budget_gib < math.inf:
        raise ValueError(f"--hbm-budget-gib {hbm_budget_gib} must be above 0 and finite")
    budget = int(hbm_budget_gib * GIB)
    one = row_bytes + length_bytes
    rows = budget // one
    if max_running_requests is not None:
        rows = max_running_requests
    left = budget - rows * row_bytes
    if rows < 1 or left < length_bytes:
        needed = max(rows, 1) * row_bytes + length_bytes
        raise ValueError(
            f"--hbm-budget-gib {hbm_budget_gib:g} is less than one request of {max_model_len} "
            f"tokens needs, {needed / GIB:.3f} GiB; raise it, or lower --max-model-len, "
            "--max-running-requests or --device-buffer-size"
        )
    if max_running_requests is None:
        return capacity(rows, rows * max_model_len, rows * pages)
    # A page of tokens and its bounds, as often as they fit.
    most = min(rows * pages, left // (page_size * slot_bytes + page_bytes))
    if most < pages:  # there is room for one of full length, but not for all of its last page
        return capacity(rows, max_model_len, pages)
    return capacity(rows, min(most * page_size, rows * max_model_len), most)


def _table_bytes(model: ModelConfig, hisparse: HiSparseConfig, pages: int) -> int:
    """Bytes per request row of what both caches need: ranges, and the buffers of the selection."""
    heads, tiles = model.num_attention_heads, -(-pages // 64)  # the kernels' tiles have 64 pages
    scores = 4 * 64 * tiles * (heads + 1) + 8 * heads * tiles
    return 20 + scores + 4 * hisparse.top_k
