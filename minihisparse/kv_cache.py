"""What both caches share: the interface through which the rest of the engine sees KV.

    row = cache.admit(num_tokens)                    a request comes; refused: ValueError, no change
    cache.read_first(layer, row, records)            a shared prefix's records, before its prefill
    cache.write_prompt(layer, row, records)          its prompt's records, layer by layer
    cache.write_through(layer, records, batch)       each step: the newest record of each request
    slots = cache.resolve(layer, positions, batch)   each step: selected positions -> slots
    cache.slot_records(layer)                        [N, W]: the records of all its slots
    first = cache.first_slots(layer)                 [max_requests]: slot s of row r is first[r] + s
    cache.release(row)                               the request leaves, finished or aborted

`HiSparseCache` (gpu_cache.py) and `FullCache` (full_cache.py) differ in exactly one thing: what
`resolve` answers and which tensor the answer indexes. Everything around them (selector, order of
positions, padding, attention) is the same, and that is why their outputs can be compared bit for
bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minihisparse.host_store import HostPool
from minihisparse.prefix import Prefix


class KVCache:
    """What both caches share: who holds which request row, and how a record is found.

    first_slot: [max_requests] int64, where a row's slots begin, if it is the same in all layers;
        what holds for either cache is `first_slots`.
    counters: [L, 3] int64, hits, misses and evictions; None where there is nothing to count.
    """

    records: list[Tensor]  # per layer, [..., W]
    host: HostPool | None = None
    first_slot: Tensor
    counters: Tensor | None = None
    metadata_bytes: int

    def __init__(self, num_layers: int, max_requests: int, device: torch.device, checked: bool):
        self.num_layers = num_layers
        self.max_requests = max_requests
        self.device = device
        self.checked = checked
        self.rows: set[int] = set()

    def admit(self, num_tokens: int, prefix: Prefix | None = None) -> int:
        """Takes the lowest free request row, with room for `num_tokens` positions.

        prefix: the first of them are another request's, and their records are there already.
        Raises ValueError if there is no row or no room; then nothing has changed.
        """
        row = next((r for r in range(self.max_requests) if r not in self.rows), None)
        if row is None:
            raise ValueError(
                f"all {self.max_requests} request rows are taken; raise --max-running-requests"
            )
        self._reserve(row, num_tokens, prefix)
        self.rows.add(row)
        return row

    def release(self, row: int) -> None:
        """Gives the row back. Raises ValueError, and changes nothing, if no request holds it."""
        if row not in self.rows:
            raise ValueError(f"request row {row} is not admitted")
        self._clear(row)
        self.rows.remove(row)

    def has_own_tables(self, layer: int) -> bool:
        """Whether the layer's slots are decided for it alone, and not for its anchor."""
        return True

    def slot_records(self, layer: int) -> Tensor:
        """[N, W]: the records of all slots, all request rows."""
        return self.records[layer].flatten(0, -2)

    def first_slots(self, layer: int) -> Tensor:
        """[max_requests] int64: where each row's slots begin in `slot_records`."""
        return self.first_slot

    @property
    def record_bytes(self) -> int:
        """Bytes of one record in one layer."""
        return self.records[0].shape[-1] * self.records[0].itemsize

    @property
    def device_kv_bytes(self) -> int:
        """Device bytes of KV records, all request rows."""
        return sum(records.nbytes for records in self.records)


def pad_rows(slots: Tensor, num_rows: int) -> Tensor:
    """Slots [R, K] with rows of -1 appended, for the padding of a batch."""
    if len(slots) == num_rows:
        return slots
    return torch.nn.functional.pad(slots, (0, 0, 0, num_rows - len(slots)), value=-1)
