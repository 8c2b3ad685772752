"""Where KV records live on the device: a few of them per request, the rest in host memory.

`HiSparseCache` is what this project is about; its interface is `kv_cache.py`'s. Beside it:

    cache.replay(layer, batch)    in place of `resolve`, in a layer that shares a selection
    cache.check_integrity()       all invariants below

Upstream names: device_buffer_tokens, lru_slots, device_buffer_size, write-through.

Invariants (`check_integrity`): every occupied slot's record equals the host row of its (layer,
position); the positions in a request's slots are distinct; lru_slots is a permutation; what belongs
to no request is empty.

Layers that share a selection (`anchor_of`): the first of such a group is its anchor and resolves,
the others replay what it fetched. They have one set of tables, the anchor's, so that no admission,
growth or abort can bring them out of step; records and host rows are each layer's own.

B may differ by layer, not within a group. Slots are numbered per layer: B holds the newest. Tables
are as wide as the largest B; what lies beyond a layer's own is as in the beginning.

Cost on the device: (B + 1) * W elements per request and layer, whatever the request's length, and
6 bytes of tables per slot (of the largest B), once per group. On a GPU everything that happens in a
step is a kernel, on a CPU torch operations. A cache deliberately knows neither scores nor models,
nor streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minihisparse.anchors import check_anchors
from minihisparse.batch import Batch
from minihisparse.config import sizes_of_layers
from minihisparse.host_store import HostPool, check
from minihisparse.kernels.resolve_torch import resolve_torch
from minihisparse.kv_cache import KVCache, pad_rows
from minihisparse.prefix import Prefix

if TYPE_CHECKING:
    from minihisparse.kernels.replay import Replayer
    from minihisparse.kernels.resolver import Resolver


class HiSparseCache(KVCache):
    """Per request and layer B slots and one for the newest token; the history is in a HostPool."""

    def __init__(
        self,
        *,
        host: HostPool,
        max_requests: int,
        top_k: int,
        device_buffer_size: int | Sequence[int],
        device: torch.device,
        checked: bool = False,
        swap_in_block_size: int | None = None,
        skip_io: bool = False,
        kernels: bool | None = None,
        anchor_of: Sequence[int] | None = None,
        replay_blocks: int | None = None,
    ) -> None:
        """The caches of `max_requests` request rows, as many layers and as wide as the host pool.

        top_k: positions per request in each `resolve`. device_buffer_size: B, or one for each
        layer, equal within a group. swap_in_block_size: threads per block of the Resolve kernel;
        None: by the sizes. skip_io: the no-IO oracle: all decisions are made, no
        record is fetched, and outputs are wrong. kernels: work with kernels (simulated on a CPU) or
        with torch; None: kernels on a GPU. anchor_of: per layer the one whose selection it uses,
        itself if it is an anchor; such layers `replay`. None: every layer resolves. replay_blocks:
        see `Replayer`.
        Raises ValueError if anchor_of or the number of sizes is not right, ValueError or
        RuntimeError if the GPU cannot run the kernels.
        """
        num_layers, _, record_width = host.records.shape
        super().__init__(num_layers, max_requests, device, checked)
        self.host = host
        self.device_buffer_sizes = sizes_of_layers(device_buffer_size, num_layers)
        self.device_buffer_size = max(self.device_buffer_sizes)  # the width of the tables
        self.top_k = top_k
        self.skip_io = skip_io
        self.anchor_of = check_anchors(anchor_of, num_layers)
        check_lockstep(self.device_buffer_sizes, self.anchor_of)
        anchors = sorted(set(self.anchor_of))
        self._table_of = [anchors.index(anchor) for anchor in self.anchor_of]
        self._counters = torch.zeros(len(anchors), 3, dtype=torch.int64, device=device)
        # What is never fetched is read all the same, and should be numbers.
        empty = torch.zeros if skip_io else torch.empty
        self.records = [
            empty((max_requests, size + 1, record_width), dtype=host.records.dtype, device=device)
            for size in self.device_buffer_sizes
        ]
        rows = torch.arange(max_requests, dtype=torch.int64, device=device)
        self._first_slots = {size: rows * (size + 1) for size in set(self.device_buffer_sizes)}
        width = self.device_buffer_size
        shape = (len(anchors), max_requests, width)
        self._tokens = torch.full(shape, -1, dtype=torch.int32, device=device)
        self._initial_order = torch.arange(width, dtype=torch.int16, device=device)
        self._lru_slots = self._initial_order.repeat(len(anchors), max_requests, 1)
        self._make_views()
        self.top_k_device_locs: Tensor | None = None  # [R, K] int32, the answer shared by a group
        self._resolved: int | None = None  # the layer of the last resolve
        self._plan: tuple[Tensor, Tensor] | None = None  # without kernels: what it fetched
        self._resolver: Resolver | None = None
        self._replayer: Replayer | None = None
        if device.type == "cuda" if kernels is None else kernels:
            from minihisparse.kernels import write_through
            from minihisparse.kernels.resolver import Resolver

            self._write_kernels = write_through
            self._resolver = Resolver(
                max_requests=max_requests,
                top_k=top_k,
                device_buffer_size=width,
                record_bytes=record_width * host.records.dtype.itemsize,
                req_to_host_pool=host.req_to_host_pool,
                page_size=host.page_size,
                swap_in_block_size=swap_in_block_size,
                skip_io=skip_io,
                record_plan=self.has_shared_layers and not skip_io,
                checked=checked,
            )
            self._resolver.load()
            if self._resolver.record_plan:
                from minihisparse.kernels.replay import Replayer

                self._replayer = Replayer(
                    self._resolver.miss_plan,
                    device_buffer_size=width,
                    record_bytes=self._resolver.record_bytes,
                    replay_blocks=replay_blocks,
                )
                self._replayer.load()

    # -- tables: stored once per anchor -----------------------------------------------------------

    @property
    def has_shared_layers(self) -> bool:
        return len(self._tokens) < self.num_layers

    def tables(self, layer: int) -> tuple[Tensor, Tensor]:
        """A layer's device_buffer_tokens [max_requests, B] int32 and lru_slots, likewise int16.

        Layers that share a selection share them: they are the anchor's own, not copies.
        """
        return self._views[layer]

    @property
    def device_buffer_tokens(self) -> Tensor:
        """[L, max_requests, largest B] int32: the position in each slot, -1 if none, also where a
        layer has no such slot; to be read only."""
        return self._of_all_layers(self._tokens)

    @property
    def lru_slots(self) -> Tensor:
        """[L, max_requests, largest B] int16: the slots, least recent first, and what lies beyond
        a layer's B; to be read only."""
        return self._of_all_layers(self._lru_slots)

    @property
    def counters(self) -> Tensor:
        """[L, 3] int64: hits, misses, evictions; a shared layer's are its anchor's. To be read."""
        return self._of_all_layers(self._counters)

    def reset_counters(self) -> None:
        self._counters.zero_()

    def first_slots(self, layer: int) -> Tensor:
        return self._first_slots[self.device_buffer_sizes[layer]]

    def has_own_tables(self, layer: int) -> bool:
        return self.anchor_of[layer] == layer

    def end_sharing(self) -> None:
        """From now on every layer resolves: between two steps, and before any CUDA graph.

        Each gets a copy of its anchor's tables, which are its own, since they are in lockstep.
        """
        self._tokens = self._tokens[self._table_of].clone()
        self._lru_slots = self._lru_slots[self._table_of].clone()
        self._counters = self._counters[self._table_of].clone()
        self.anchor_of = tuple(range(self.num_layers))
        self._table_of = list(self.anchor_of)
        self._make_views()
        self._resolved = None

    def _make_views(self) -> None:
        """Once and not in every step: each costs some operations."""
        tables = list(zip(self._table_of, self.device_buffer_sizes, strict=True))
        self._views = [(self._tokens[t, :, :b], self._lru_slots[t, :, :b]) for t, b in tables]

    def _of_all_layers(self, tables: Tensor) -> Tensor:
        """Itself where every layer has its own table, else a copy with a table per layer."""
        return tables[self._table_of] if self.has_shared_layers else tables

    @property
    def metadata_bytes(self) -> int:
        """Device bytes of the tables: slots, LRU order, host pages, and the kernel's own."""
        tables = (self._tokens, self._lru_slots, self.host.req_to_host_pool)
        tables += (*self._first_slots.values(), self._counters, self._initial_order)
        kernel_bytes = self._resolver.device_bytes if self._resolver else 0
        return sum(table.nbytes for table in tables) + kernel_bytes

    def _reserve(self, row: int, num_tokens: int, prefix: Prefix | None) -> None:
        self.host.allocate(row, num_tokens, prefix)

    @property
    def longest_request(self) -> tuple[int, str, str]:
        """Tokens that a request can have while no other has any; where, and the flag that helps."""
        return self.host.max_tokens_per_request, "the host pool", "--host-to-device-ratio"

    def _clear(self, row: int) -> None:
        self.host.release(row)
        self._tokens[:, row] = -1
        self._lru_slots[:, row] = self._initial_order

    def read_first(self, layer: int, row: int, records: Tensor) -> None:
        """Copies the records of positions 0..T-1 into `records` [T, W], on the device."""
        self.host.read_first(layer, row, records)

    def write_prompt(self, layer: int, row: int, records: Tensor) -> None:
        """Stores records [T, W] of positions 0..T-1 in the host pool; if T <= B, in slots 0..T-1
        too. In pages that the row shares with another they are already.

        A longer prompt starts with empty slots (upstream's rule), so its first step is all misses.
        """
        num_tokens, shared = len(records), self.host.num_shared_tokens_of(row)
        positions = torch.arange(num_tokens, device=self.device)
        if self._resolver:
            self._write_kernels.write_prompt(
                records[shared:],
                self.host.req_to_host_pool[row, shared // self.host.page_size :],
                self.host.page_size,
                self.host.records[layer],
            )
        else:
            requests = torch.full_like(positions, row)
            host_rows = self.host.host_rows_of(requests, positions)
            self.host.write(layer, host_rows[shared:], records[shared:])
        if num_tokens <= self.device_buffer_sizes[layer]:
            self.records[layer][row, :num_tokens] = records
            tokens, _ = self.tables(layer)
            tokens[row, :num_tokens] = positions.int()

    def write_through(self, layer: int, records: Tensor, batch: Batch) -> None:
        """Stores the newest record of each request on the device and in the host pool at once.

        records [R, W]. Position S-1 goes to slot S-1 while S <= B, and to slot B afterwards.
        Layers that share a table enter the same position in it, one after the other.
        """
        num_slots = self.device_buffer_sizes[layer]
        if self._resolver:
            self._write_kernels.write_through(
                records,
                *batch.tensors,
                self._tokens[self._table_of[layer]],
                self.records[layer],
                num_slots,
                self.host.req_to_host_pool,
                self.host.page_size,
                self.host.records[layer],
            )
            return
        batch, records = batch.real, records[: batch.num_real_reqs]
        rows, positions = batch.req_pool_indices, batch.positions
        slots = positions.clamp(max=num_slots)
        self.records[layer][rows, slots] = records
        self.host.write(layer, self.host.host_rows_of(rows, positions), records)

        if batch.min_seq_len > num_slots:
            return  # nobody grows any more: slot B is in no table
        tokens, _ = self.tables(layer)
        growing = slots < num_slots
        slots = torch.where(growing, slots, 0)  # who does not grow rewrites slot 0 as it is
        tokens[rows, slots] = torch.where(growing, positions.int(), tokens[rows, slots])

    def resolve(self, layer: int, positions: Tensor, batch: Batch) -> Tensor:
        """Makes the records of positions [R, K] int32 resident; their slots [R, K] int32.

        On a GPU in one kernel, and the next call overwrites the answer; else in torch operations.
        Raises ValueError for a layer that is no anchor; in checked mode if a position is out of
        range.
        """
        if self.anchor_of[layer] != layer:
            raise ValueError(
                f"layer {layer} shares the selection of layer {self.anchor_of[layer]}: it has no "
                "Resolve of its own, see replay"
            )
        self._resolved = None  # until it is
        table = self._table_of[layer]
        counters = self._counters[table]
        if self._resolver:
            self.top_k_device_locs = self._resolver.resolve(
                positions,
                *batch.tensors,
                device_buffer_tokens=self._tokens[table],
                lru_slots=self._lru_slots[table],
                host_records=self.host.records[layer],
                records=self.records[layer],
                counters=counters,
                num_slots=self.device_buffer_sizes[layer],
            )
            self._resolved = layer
            return self.top_k_device_locs
        num_rows, positions = len(positions), positions[: batch.num_real_reqs]
        batch = batch.real
        rows = batch.req_pool_indices
        tokens, lru_slots = self.tables(layer)
        done = resolve_torch(
            positions,
            batch.seq_lens,
            tokens.index_select(0, rows),
            lru_slots.index_select(0, rows),
            checked=self.checked,
        )
        if not self.skip_io:
            plan = self._miss_plan(layer, rows, positions, done.slots, done.fetch)
            self._fetch(layer, plan)
            self._plan = plan if self.has_shared_layers else None
        tokens.index_copy_(0, rows, done.tokens)
        lru_slots.index_copy_(0, rows, done.lru_slots)
        misses = done.fetch.sum()
        hits, evictions = (done.slots >= 0).sum() - misses, (done.evicted >= 0).sum()
        counters += torch.stack([hits, misses, evictions])
        answer = pad_rows(done.slots.int(), num_rows)
        self._resolved = layer
        self.top_k_device_locs = answer if self.has_shared_layers else None
        return answer

    def replay(self, layer: int, batch: Batch) -> None:
        """Fetches into a layer's slots what its anchor's `resolve`, the last one, fetched.

        With skip_io nothing. On a GPU in one kernel, on the current stream.
        Raises ValueError if the layer is an anchor, or the last resolve was not its anchor's.
        """
        anchor = self.anchor_of[layer]
        if anchor == layer or anchor != self._resolved:
            raise ValueError(
                f"layer {layer}, whose anchor is {anchor}, cannot replay what layer "
                f"{self._resolved} has resolved"
            )
        if self.skip_io:
            return
        if self._replayer is None:
            self._fetch(layer, self._plan)
            return
        self._replayer.replay(
            batch.req_pool_indices,
            batch.num_real_reqs_tensor,
            host_records=self.host.records[layer],
            records=self.records[layer],
            num_slots=self.device_buffer_sizes[layer],
        )

    def _miss_plan(
        self, layer: int, rows: Tensor, positions: Tensor, slots: Tensor, fetch: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of the missed records, host rows and slots, the latter counted from request row 0."""
        missed = fetch.flatten().nonzero()[:, 0]  # indices into [R * K]
        requests = rows.index_select(0, missed // fetch.shape[1])
        host_rows = self.host.host_rows_of(requests, positions.flatten().index_select(0, missed))
        flat_slots = self.first_slots(layer).index_select(0, requests)
        flat_slots += slots.flatten().index_select(0, missed)
        return host_rows, flat_slots

    def _fetch(self, layer: int, plan: tuple[Tensor, Tensor]) -> None:
        """Copies the plan's records from the host pool into their slots."""
        host_rows, flat_slots = plan
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
        for layer, size in enumerate(self.device_buffer_sizes):
            _, lru_slots = self.tables(layer)
            ordered = lru_slots.long().sort(dim=-1).values
            right = bool((ordered == self._initial_order[:size]).all())
            check(right, f"layer {layer}: lru_slots is not a permutation")
            table = self._table_of[layer]
            beyond = (self._lru_slots[table, :, size:] == self._initial_order[size:]).all()
            beyond &= (self._tokens[table, :, size:] == -1).all()
            check(bool(beyond), f"layer {layer}: its tables have changed beyond its {size} slots")
        for row in range(self.max_requests):
            for layer in range(self.num_layers):
                tokens = self.tables(layer)[0][row]
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


def check_lockstep(sizes: Sequence[int], anchor_of: Sequence[int] | None) -> None:
    """Raises ValueError if a layer has not as many slots (`sizes`, per layer) as its anchor."""
    for layer, anchor in enumerate(anchor_of or ()):
        if sizes[layer] != sizes[anchor]:
            raise ValueError(
                f"layer {layer} has {sizes[layer]} slots and its anchor, layer {anchor}, "
                f"{sizes[anchor]}, but they are prefetched in lockstep: make them equal in "
                "--device-buffer-size, or pass --no-enable-layer-prefetch"
            )


def bits(records: Tensor) -> Tensor:
    """The records' bytes, so that comparing them treats NaN like any other value."""
    return records.contiguous().view(torch.uint8)
