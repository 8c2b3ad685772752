"""Where KV records live on the device: a few of them per request, the rest in host memory.

`KVCache` is what both caches share, `HiSparseCache` the one this project is about; `FullCache`, all
records on the device, is in `full_cache.py`. They have the same interface and differ in exactly one
thing: what `resolve` answers and which tensor the answer indexes. Everything around them (selector,
order of positions, padding, attention) is the same, and that is why their outputs can be compared
bit for bit.

    row = cache.admit(num_tokens)                    a request comes; refused: ValueError, no change
    cache.write_prompt(layer, row, records)          its prompt's records, layer by layer
    cache.write_through(layer, records, batch)       each step: the newest record of each request
    slots = cache.resolve(layer, positions, batch)   each step: selected positions -> slots
    cache.slot_records(layer)                        [N, W]: slot s of row r is first_slot[r] + s
    cache.release(row)                               the request leaves, finished or aborted

Upstream names: device_buffer_tokens, lru_slots, device_buffer_size, write-through.

Invariants (`check_integrity`): every occupied slot's record equals the host row of its (layer,
position); the positions in a request's slots are distinct; lru_slots is a permutation; what belongs
to no request is empty.

Cost on the device: (B + 1) * W elements per request and layer, whatever the request's length, and
6 bytes of tables per slot. On a GPU everything that happens in a step is a kernel, on a CPU torch
operations. A cache deliberately knows neither scores nor models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minihisparse.batch import Batch
from minihisparse.host_store import HostPool, check
from minihisparse.kernels.resolve_torch import resolve_torch

if TYPE_CHECKING:
    from minihisparse.kernels.resolver import Resolver


class KVCache:
    """What both caches share: who holds which request row, and how a record is found.

    first_slot: [max_requests] int64, where a row's slots begin in `slot_records`.
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

    def admit(self, num_tokens: int) -> int:
        """Takes the lowest free request row, with room for `num_tokens` positions.

        Raises ValueError if there is no row or no room; then nothing has changed.
        """
        row = next((r for r in range(self.max_requests) if r not in self.rows), None)
        if row is None:
            raise ValueError(
                f"all {self.max_requests} request rows are taken; raise --max-running-requests"
            )
        self._reserve(row, num_tokens)
        self.rows.add(row)
        return row

    def release(self, row: int) -> None:
        """Gives the row back. Raises ValueError, and changes nothing, if no request holds it."""
        if row not in self.rows:
            raise ValueError(f"request row {row} is not admitted")
        self._clear(row)
        self.rows.remove(row)

    def slot_records(self, layer: int) -> Tensor:
        """[N, W]: the records of all slots, all request rows."""
        return self.records[layer].flatten(0, -2)

    @property
    def record_bytes(self) -> int:
        """Bytes of one record in one layer."""
        return self.records[0].shape[-1] * self.records[0].itemsize

    @property
    def device_kv_bytes(self) -> int:
        """Device bytes of KV records, all request rows."""
        return sum(records.nbytes for records in self.records)


class HiSparseCache(KVCache):
    """Per request and layer B slots and one for the newest token; the history is in a HostPool."""

    def __init__(
        self,
        *,
        host: HostPool,
        max_requests: int,
        top_k: int,
        device_buffer_size: int,
        device: torch.device,
        checked: bool = False,
        swap_in_block_size: int | None = None,
        skip_io: bool = False,
        kernels: bool | None = None,
    ) -> None:
        """The caches of `max_requests` request rows, as many layers and as wide as the host pool.

        top_k: positions per request in each `resolve`. swap_in_block_size: threads per block of the
        Resolve kernel; None: by the sizes. skip_io: the no-IO oracle: all decisions are made, no
        record is fetched, and outputs are wrong. kernels: work with kernels (simulated on a CPU) or
        with torch; None: kernels on a GPU. Raises ValueError or RuntimeError if the GPU cannot run
        them.
        """
        num_layers, _, record_width = host.records.shape
        super().__init__(num_layers, max_requests, device, checked)
        self.host = host
        self.device_buffer_size = device_buffer_size
        self.top_k = top_k
        self.skip_io = skip_io
        self.counters = torch.zeros(num_layers, 3, dtype=torch.int64, device=device)
        shape = (max_requests, device_buffer_size + 1, record_width)
        # What is never fetched is read all the same, and should be numbers.
        empty = torch.zeros if skip_io else torch.empty
        self.records = [
            empty(shape, dtype=host.records.dtype, device=device) for _ in range(num_layers)
        ]
        rows = torch.arange(max_requests, dtype=torch.int64, device=device)
        self.first_slot = rows * (device_buffer_size + 1)
        shape = (num_layers, max_requests, device_buffer_size)
        self.device_buffer_tokens = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._initial_order = torch.arange(device_buffer_size, dtype=torch.int16, device=device)
        self.lru_slots = self._initial_order.expand(shape).contiguous()  # [L, max_requests, B]
        self._resolver: Resolver | None = None
        if device.type == "cuda" if kernels is None else kernels:
            from minihisparse.kernels import write_through
            from minihisparse.kernels.resolver import Resolver

            self._write_kernels = write_through
            self._resolver = Resolver(
                max_requests=max_requests,
                top_k=top_k,
                device_buffer_size=device_buffer_size,
                record_bytes=record_width * host.records.dtype.itemsize,
                req_to_host_pool=host.req_to_host_pool,
                page_size=host.page_size,
                swap_in_block_size=swap_in_block_size,
                skip_io=skip_io,
                checked=checked,
            )
            self._resolver.load()

    @property
    def metadata_bytes(self) -> int:
        """Device bytes of the tables: slots, LRU order, host pages, and the kernel's own."""
        tables = (self.device_buffer_tokens, self.lru_slots, self.host.req_to_host_pool)
        tables += (self.first_slot, self.counters, self._initial_order)
        kernel_bytes = self._resolver.device_bytes if self._resolver else 0
        return sum(table.nbytes for table in tables) + kernel_bytes

    def _reserve(self, row: int, num_tokens: int) -> None:
        self.host.allocate(row, num_tokens)

    @property
    def longest_request(self) -> tuple[int, str, str]:
        """Tokens that a request can have while no other has any; where, and the flag that helps."""
        return self.host.max_tokens_per_request, "the host pool", "--host-to-device-ratio"

    def _clear(self, row: int) -> None:
        self.host.release(row)
        self.device_buffer_tokens[:, row] = -1
        self.lru_slots[:, row] = self._initial_order

    def write_prompt(self, layer: int, row: int, records: Tensor) -> None:
        """Stores records [T, W] of positions 0..T-1 in the host pool; if T <= B, in slots 0..T-1
        too.

        A longer prompt starts with empty slots (upstream's rule), so its first step is all misses.
        """
        num_tokens = len(records)
        positions = torch.arange(num_tokens, device=self.device)
        if self._resolver:
            self._write_kernels.write_prompt(
                records,
                self.host.req_to_host_pool[row],
                self.host.page_size,
                self.host.records[layer],
            )
        else:
            requests = torch.full_like(positions, row)
            self.host.write(layer, self.host.host_rows_of(requests, positions), records)
        if num_tokens <= self.device_buffer_size:
            self.records[layer][row, :num_tokens] = records
            self.device_buffer_tokens[layer, row, :num_tokens] = positions.int()

    def write_through(self, layer: int, records: Tensor, batch: Batch) -> None:
        """Stores the newest record of each request on the device and in the host pool at once.

        records [R, W]. Position S-1 goes to slot S-1 while S <= B, and to slot B afterwards.
        """
        if self._resolver:
            self._write_kernels.write_through(
                records,
                *batch.tensors,
                self.device_buffer_tokens[layer],
                self.records[layer],
                self.device_buffer_size,
                self.host.req_to_host_pool,
                self.host.page_size,
                self.host.records[layer],
            )
            return
        batch, records = batch.real, records[: batch.num_real_reqs]
        rows, positions = batch.req_pool_indices, batch.positions
        slots = positions.clamp(max=self.device_buffer_size)
        self.records[layer][rows, slots] = records
        self.host.write(layer, self.host.host_rows_of(rows, positions), records)

        if batch.min_seq_len > self.device_buffer_size:
            return  # nobody grows any more: slot B is in no table
        tokens = self.device_buffer_tokens[layer]
        growing = slots < self.device_buffer_size
        slots = torch.where(growing, slots, 0)  # who does not grow rewrites slot 0 as it is
        tokens[rows, slots] = torch.where(growing, positions.int(), tokens[rows, slots])

    def resolve(self, layer: int, positions: Tensor, batch: Batch) -> Tensor:
        """Makes the records of positions [R, K] int32 resident; their slots [R, K] int32.

        On a GPU in one kernel, and the next call overwrites the answer; else in torch operations.
        Raises ValueError in checked mode if a position is out of range.
        """
        if self._resolver:
            return self._resolver.resolve(
                positions,
                *batch.tensors,
                device_buffer_tokens=self.device_buffer_tokens[layer],
                lru_slots=self.lru_slots[layer],
                host_records=self.host.records[layer],
                records=self.records[layer],
                counters=self.counters[layer],
            )
        num_rows, positions = len(positions), positions[: batch.num_real_reqs]
        batch = batch.real
        rows = batch.req_pool_indices
        tokens, lru_slots = self.device_buffer_tokens[layer], self.lru_slots[layer]
        done = resolve_torch(
            positions,
            batch.seq_lens,
            tokens.index_select(0, rows),
            lru_slots.index_select(0, rows),
            checked=self.checked,
        )
        if not self.skip_io:
            self._fetch(layer, rows, positions, done.slots, done.fetch)
        tokens.index_copy_(0, rows, done.tokens)
        lru_slots.index_copy_(0, rows, done.lru_slots)
        misses = done.fetch.sum()
        hits, evictions = (done.slots >= 0).sum() - misses, (done.evicted >= 0).sum()
        self.counters[layer] += torch.stack([hits, misses, evictions])
        return pad_rows(done.slots.int(), num_rows)

    def _fetch(
        self, layer: int, rows: Tensor, positions: Tensor, slots: Tensor, fetch: Tensor
    ) -> None:
        """Copies the missed records from the host pool into their slots."""
        missed = fetch.flatten().nonzero()[:, 0]  # indices into [R * K]
        requests = rows.index_select(0, missed // fetch.shape[1])
        host_rows = self.host.host_rows_of(requests, positions.flatten().index_select(0, missed))
        flat_slots = requests * (self.device_buffer_size + 1)
        flat_slots += slots.flatten().index_select(0, missed)
        fetched = self.host.read(layer, host_rows)
        self.records[layer].flatten(0, 1).index_copy_(0, flat_slots, fetched)

    def check_integrity(self, seq_lens: Sequence[int] | None = None) -> None:
        """Checks the module docstring's invariants; AssertionError names the first one broken.

        seq_lens: the length of each request row at its last decode step, 0 if it had none; with it,
        slot B is checked too. Slow (reads every record of every slot): for tests, `verify` and
        debugging.
        """
        self.host.check_integrity()
        check(self.host.owners == self.rows, "request rows and owners of host pages differ")
        ordered = self.lru_slots.long().sort(dim=-1).values
        check(bool((ordered == self._initial_order).all()), "lru_slots is not a permutation")
        for row in range(self.max_requests):
            for layer in range(self.num_layers):
                tokens = self.device_buffer_tokens[layer, row]
                if seq_lens is not None and seq_lens[row] > len(tokens):
                    tokens = torch.nn.functional.pad(tokens, (0, 1), value=seq_lens[row] - 1)
                slots = (tokens >= 0).nonzero()[:, 0]
                where = f"layer {layer}, request row {row}"
                check(row in self.rows or not len(slots), f"{where}: free, but its slots are not")
                in_pages = (tokens >= -1) & (tokens < self.host.num_tokens_of(row))
                check(bool(in_pages.all()), f"{where}: a slot's position is in none of its pages")
                if not len(slots):
                    continue
                check(
                    len(tokens[slots].unique()) == len(slots), f"{where}: a position in two slots"
                )
                requests = torch.full_like(slots, row)
                host_rows = self.host.host_rows_of(requests, tokens[slots])
                same = bits(self.records[layer][row, slots]) == bits(
                    self.host.read(layer, host_rows)
                )
                check(bool(same.all()), f"{where}: a slot differs from its host row")


def bits(records: Tensor) -> Tensor:
    """The records' bytes, so that comparing them treats NaN like any other value."""
    return records.contiguous().view(torch.uint8)


def pad_rows(slots: Tensor, num_rows: int) -> Tensor:
    """Slots [R, K] with rows of -1 appended, for the padding of a batch."""
    if len(slots) == num_rows:
        return slots
    return torch.nn.functional.pad(slots, (0, 0, 0, num_rows - len(slots)), value=-1)
