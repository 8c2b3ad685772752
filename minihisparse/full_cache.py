"""FullCache: every KV record on the device ("full HBM"), what HiSparse is compared with.

The slot of position p is p, so nothing is looked up and nothing ever misses. A request's slots are
one range of the device's, as long as the request may become.

Cost: a record per position and layer on the device. The interface is in `kv_cache.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minihisparse.batch import Batch
from minihisparse.extents import ExtentPool
from minihisparse.kernels.resolve_torch import check_positions
from minihisparse.kv_cache import KVCache, pad_rows
from minihisparse.prefix import Prefix


class FullCache(KVCache):
    """All KV on the device. records: per layer [num_slots, W]."""

    def __init__(
        self,
        *,
        num_layers: int,
        record_width: int,
        max_requests: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int | None = None,
        checked: bool = False,
        kernels: bool | None = None,
    ) -> None:
        """num_slots: of all requests together; None: for max_requests of max_model_len tokens.
        kernels: write with a kernel (simulated on a CPU) or with torch; None: a kernel on a GPU.
        """
        super().__init__(num_layers, max_requests, device, checked)
        self.max_model_len = max_model_len
        num_slots = max_requests * max_model_len if num_slots is None else num_slots
        shape = (num_slots, record_width)
        self.records = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.slots = ExtentPool(num_slots, max_requests, device)
        self.first_slot = self.slots.first
        self._write_kernels = None
        if device.type == "cuda" if kernels is None else kernels:
            from minihisparse.kernels import write_through

            self._write_kernels = write_through

    @property
    def metadata_bytes(self) -> int:
        return self.first_slot.nbytes

    @property
    def longest_request(self) -> tuple[int, str, str]:
        """Tokens that a request can have while no other has any; where, and the flag that helps."""
        tokens = min(self.max_model_len, self.slots.num_units)
        return tokens, "the device", "--hbm-budget-gib"

    def _reserve(self, row: int, num_tokens: int, prefix: Prefix | None) -> None:
        """A prefix is copied: slots of one request lie side by side, so they cannot be shared."""
        if num_tokens > self.max_model_len:
            raise ValueError(
                f"{num_tokens} tokens are more than a request may have, {self.max_model_len}; "
                "raise --max-model-len"
            )
        if not self.slots.allocate(row, num_tokens):
            raise ValueError(
                f"the device has {self.slots.num_free} of {self.slots.num_units} slots free, "
                f"{num_tokens} in one piece are needed; raise --hbm-budget-gib, or lower "
                "--max-new-tokens"
            )
        if prefix is None:
            return
        first, _ = self.slots.extent_of(row)
        try:
            for layer, records in enumerate(self.records):
                self.read_first(layer, prefix.row, records[first : first + prefix.num_tokens])
        except BaseException:  # Ctrl-C: nobody knows of the row yet
            self.slots.release(row)
            raise

    def _clear(self, row: int) -> None:
        """What a request did not write is never read, so there is nothing to empty."""
        self.slots.release(row)

    def read(self, layer: int, row: int, positions: Tensor) -> Tensor:
        """The records [T, W] of a request's positions [T]."""
        first, _ = self.slots.extent_of(row)
        return self.records[layer][first + positions.long()]

    def read_first(self, layer: int, row: int, records: Tensor) -> None:
        """Copies the records of positions 0..T-1 into `records` [T, W]."""
        first, _ = self.slots.extent_of(row)
        records.copy_(self.records[layer][first : first + len(records)])

    def write_prompt(self, layer: int, row: int, records: Tensor) -> None:
        """Stores records [T, W] of positions 0..T-1."""
        first, _ = self.slots.extent_of(row)
        self.records[layer][first : first + len(records)] = records

    def write_through(self, layer: int, records: Tensor, batch: Batch) -> None:
        """Stores the newest record of each request; records [R, W]."""
        if self._write_kernels:
            self._write_kernels.append(
                records, *batch.tensors, self.first_slot, self.records[layer]
            )
            return
        batch, records = batch.real, records[: batch.num_real_reqs]
        slots = self.first_slot[batch.req_pool_indices] + batch.positions
        self.records[layer][slots] = records

    def resolve(self, layer: int, positions: Tensor, batch: Batch) -> Tensor:
        """Slots [R, K] int32 of positions [R, K] int32: the positions themselves.

        Raises ValueError in checked mode if a position is out of range; else it becomes -1, except
        with kernels: there a selector is trusted, so that a step costs nothing here.
        """
        if self.checked:
            check_positions(positions[: batch.num_real_reqs], batch.real.seq_lens)
        if self._write_kernels:
            return positions
        num_rows, positions = len(positions), positions[: batch.num_real_reqs]
        readable = (positions >= 0) & (positions < batch.real.seq_lens[:, None])
        return pad_rows(torch.where(readable, positions, -1), num_rows)

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot has two owners or is lost."""
        self.slots.check_integrity()
        if self.slots.owners != self.rows:
            raise AssertionError("request rows and owners of slots differ")
