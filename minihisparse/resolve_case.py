"""What `bench resolve` calls Resolve with: tables with a known number of misses, and their check.

A case has the tables of several layers, random and independent of each other, so that every call
has the same work to do. Every request selects K positions: exactly `misses` of them have to be
fetched, from random pages of the host pool, the others are in random slots. The layers share one
tensor of records and one page table.

Invariants: every layer's tables are full, valid, and differ; `restore` brings them back after a
call. Cost on the device: batch * (B + 1) * record_bytes, and 4 K + 12 B bytes per layer and
request. It deliberately does not know how a call is timed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from minihisparse.host_store import HostPool
from minihisparse.kernels.resolve_torch import resolve_torch
from minihisparse.kernels.resolver import Resolver

PAGE_SIZE = 16
UNTOUCHED = 0xA5  # fills the slots before a check


class Point(NamedTuple):
    """What is measured; misses are per request."""

    batch: int
    misses: int
    record_bytes: int
    top_k: int
    device_buffer_size: int

    @property
    def seq_len(self) -> int:
        """Long enough that positions without a slot abound."""
        return 4 * self.device_buffer_size


class Tables(NamedTuple):
    """What the calls find: L layers of R requests."""

    positions: Tensor  # [L, R, K] int32
    device_buffer_tokens: Tensor  # [L, R, B] int32
    lru_slots: Tensor  # [L, R, B] int16


def make_tables(point: Point, num_layers: int, generator: torch.Generator) -> Tables:
    """Random tables of which every request misses exactly `point.misses` of its K positions.

    The other positions are in a slot, in random ones; the newest position, which is always in a
    slot, is not selected. Positions ascend, like a selector's; the LRU order is random.
    """
    batch, misses, _, top_k, slots = point

    def random_order(length: int) -> Tensor:
        noise = torch.rand(batch, length, generator=generator, device=generator.device)
        return noise.argsort(dim=1)

    layers = []
    for _ in range(num_layers):
        order = random_order(point.seq_len - 1)
        tokens, missed = order[:, :slots], order[:, slots : slots + misses]
        resident = tokens.gather(1, random_order(slots)[:, : top_k - misses])
        positions = torch.cat([resident, missed], dim=1).sort(dim=1).values
        layers.append((positions.int(), tokens.int(), random_order(slots).short()))
    return Tables(*(torch.stack(tables) for tables in zip(*layers, strict=True)))


def make_pool(record_bytes: int, num_bytes: int, seed: int, device: torch.device) -> HostPool:
    """A host pool of random bytes: one layer, records [host rows, record_bytes] uint8."""
    pool = HostPool(
        num_layers=1,
        record_width=record_bytes,
        num_pages=num_bytes // (record_bytes * PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_requests=1,  # no request is admitted: they share the pages, see Case
        max_pages_per_request=1,
        dtype=torch.uint8,
        device=device,
    )
    generator = torch.Generator(device).manual_seed(seed)
    noise = torch.empty(pool.records.shape, dtype=torch.uint8, device=device)
    pool.records.copy_(noise.random_(0, 256, generator=generator))  # made where that is fast
    return pool


class Case:
    """All tensors of one point."""

    def __init__(
        self, point: Point, pool: HostPool, seed: int, device: torch.device, num_layers: int
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        batch, slots = point.batch, point.device_buffer_size
        on_device = {"dtype": torch.int32, "device": device}
        self.point = point
        self.before = make_tables(point, num_layers, generator)
        self.device_buffer_tokens = self.before.device_buffer_tokens.clone()
        self.lru_slots = self.before.lru_slots.clone()
        self.seq_lens = torch.full((batch,), point.seq_len, **on_device)
        self.req_pool_indices = torch.arange(batch, device=device)
        self.num_real_reqs = torch.full((1,), batch, **on_device)
        pages = (batch, -(-point.seq_len // PAGE_SIZE))  # random ones: requests may share a page
        self.req_to_host_pool = torch.randint(
            pool.num_pages, pages, generator=generator, **on_device
        )
        self.host_records = pool.records[0]  # [host rows, record_bytes] uint8
        shape = (batch, slots + 1, point.record_bytes)
        self.records = torch.empty(shape, dtype=torch.uint8, device=device)
        self.counters = torch.zeros(3, dtype=torch.int64, device=device)

    def resolver(self, **settings) -> Resolver:
        return Resolver(
            max_requests=self.point.batch,
            top_k=self.point.top_k,
            device_buffer_size=self.point.device_buffer_size,
            record_bytes=self.point.record_bytes,
            req_to_host_pool=self.req_to_host_pool,
            page_size=PAGE_SIZE,
            **settings,
        )

    def restore(self) -> None:
        """Makes the tables of all layers what they were before any call."""
        self.device_buffer_tokens.copy_(self.before.device_buffer_tokens)
        self.lru_slots.copy_(self.before.lru_slots)

    def call(self, resolver: Resolver, layer: int) -> Tensor:
        return resolver.resolve(
            self.before.positions[layer],
            self.seq_lens,
            self.req_pool_indices,
            self.num_real_reqs,
            device_buffer_tokens=self.device_buffer_tokens[layer],
            lru_slots=self.lru_slots[layer],
            host_records=self.host_records,
            records=self.records,
            counters=self.counters,
        )

    def check(self, resolver: Resolver) -> None:
        """One call against resolve_torch: answer, tables, and all bytes of all slots.

        Raises RuntimeError that names what differs. Without IO, no byte may have changed.
        """
        self.restore()
        self.records.fill_(UNTOUCHED)
        self.counters.zero_()
        slots = self.call(resolver, 0)
        positions, tokens, lru_slots = (table[0] for table in self.before)
        right = resolve_torch(positions, self.seq_lens, tokens, lru_slots)
        batch, misses, top_k = self.point.batch, self.point.misses, self.point.top_k
        counts = [batch * (top_k - misses), batch * misses, batch * misses]
        pairs = {
            "top_k_device_locs": (slots.long(), right.slots),
            "device_buffer_tokens": (self.device_buffer_tokens[0], right.tokens),
            "lru_slots": (self.lru_slots[0], right.lru_slots),
            "the misses": (right.fetch.sum(1), torch.full_like(self.req_pool_indices, misses)),
        }
        if resolver.rung == "fused":  # the others do not count
            pairs["counters"] = (self.counters, self.counters.new_tensor(counts))
        wrong = [name for name, (found, expected) in pairs.items() if not found.equal(expected)]
        for request in range(batch):  # one by one: the records of all may fill the GPU
            expected = torch.full_like(self.records[request], UNTOUCHED)
            if not resolver.skip_io:
                fetch = right.fetch[request]
                position = positions[request, fetch].long()
                page = self.req_to_host_pool[request, position // PAGE_SIZE].long()
                host_rows = page * PAGE_SIZE + position % PAGE_SIZE
                fetched = self.host_records.index_select(0, host_rows.cpu())
                expected[right.slots[request, fetch]] = fetched.to(expected.device)
            if not self.records[request].equal(expected):
                wrong.append(f"records of request {request}")
                break
        if wrong:
            raise RuntimeError(
                f"rung {resolver.rung!r}, skip_io={resolver.skip_io}: wrong {', '.join(wrong)} at "
                f"{self.point}; it was not timed"
            )
