"""How many requests a device memory budget holds: the sizes of caches and selector, in bytes.

The budget counts what grows with requests: KV records, selector state and tables, for both caches
by the same rule, so that they can be compared at equal memory. Weights, the workspace of a forward
pass and CUDA graphs come on top.

Per request of S tokens, L layers, records of W bytes, pages of P tokens:

    full       L * W * S                        records
    hisparse   L * ((B + 1) * W + 6 * B)        records, device_buffer_tokens and lru_slots (these
                                                once per anchor, where layers are prefetched);
               sum of (B + 1) * W, + 6 * L * max B    where B differs by layer
    both       L * W * S / P                    Quest's page bounds; other selectors say their own
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from minihisparse.config import HiSparseConfig
from minihisparse.model_config import ModelConfig
from minihisparse.quest import QuestSelector
from minihisparse.selector import SelectorSize

GIB = 2**30
DEFAULT_RUNNING_REQUESTS = 8


@dataclass(frozen=True)
class Capacity:
    """Sizes to allocate.

    max_running_requests: request rows. device_slots: FullCache's, of all requests together.
    selector_units: of all requests together. total_bytes: what these take.
    """

    max_running_requests: int
    device_slots: int
    selector_units: int
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
    selector: SelectorSize | None = None,
    num_tables: int | None = None,
) -> Capacity:
    """Sizes for `cache` ("full" or "hisparse"), with elements of `itemsize` bytes.

    selector: its size; None: Quest's. num_tables: layers with tables of their own; None: all.

    Without a budget everything is as large as max_running_requests (8 if None) requests of
    max_model_len tokens need. With one, there are as many rows as it holds such requests; if
    max_running_requests is given too, there are that many rows, and the rest of the budget is
    shared by requests of whatever length, at least one of max_model_len tokens.
    Raises ValueError if the budget is smaller than one request; the message says what helps.
    """
    layers, record_bytes = model.num_hidden_layers, model.record_width * itemsize
    if selector is None:
        selector = QuestSelector.size(
            model, hisparse, itemsize=itemsize, max_model_len=max_model_len
        )
    units, unit_tokens = selector.units(max_model_len), selector.unit_tokens
    row_bytes = 8 + selector.row_bytes  # 8: where its slots begin
    if cache == "full":
        slot_bytes = layers * record_bytes
    else:
        slot_bytes = 0
        sizes = hisparse.device_buffer_sizes_for(layers, record_bytes)
        tables = layers if num_tables is None else num_tables
        row_bytes += (sum(sizes) + layers) * record_bytes + tables * 6 * max(sizes)
        row_bytes += 8 * (len(set(sizes)) - 1)  # each size has its own table of where slots begin
        row_bytes += 4 * -(-max_model_len // hisparse.page_size) + 12 * hisparse.top_k + 64
    length_bytes = max_model_len * slot_bytes + units * selector.unit_bytes

    def capacity(rows: int, slots: int, units: int) -> Capacity:
        total = rows * row_bytes + slots * slot_bytes + units * selector.unit_bytes
        return Capacity(rows, slots, units, total + selector.fixed_bytes)

    if hbm_budget_gib is None:
        rows = max_running_requests or DEFAULT_RUNNING_REQUESTS
        return capacity(rows, rows * max_model_len, rows * units)
    if not 0 < hbm_budget_gib < math.inf:
        raise ValueError(f"--hbm-budget-gib {hbm_budget_gib} must be above 0 and finite")
    budget = int(hbm_budget_gib * GIB) - selector.fixed_bytes
    one = row_bytes + length_bytes
    rows = max(budget, 0) // one
    if max_running_requests is not None:
        rows = max_running_requests
    left = budget - rows * row_bytes
    if rows < 1 or left < length_bytes:
        needed = max(rows, 1) * row_bytes + length_bytes + selector.fixed_bytes
        raise ValueError(
            f"--hbm-budget-gib {hbm_budget_gib:g} is less than one request of {max_model_len} "
            f"tokens needs, {needed / GIB:.3f} GiB; raise it, or lower --max-model-len, "
            "--max-running-requests or --device-buffer-size"
        )
    if max_running_requests is None:
        return capacity(rows, rows * max_model_len, rows * units)
    # The tokens of a unit and its state, as often as they fit.
    most = min(rows * units, left // (unit_tokens * slot_bytes + selector.unit_bytes))
    if most < units:  # there is room for one of full length, but not for all of its last unit
        return capacity(rows, max_model_len, units)
    return capacity(rows, min(most * unit_tokens, rows * max_model_len), most)
