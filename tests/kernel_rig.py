"""What the kernel tests share: a cache on some device, the oracle's copy of it, and fences around.

Every tensor that a kernel is handed lies between fences and has a twin: a copy of all its bytes, on
which the oracle does the same work. After each call every byte of both is compared, so that what
was written beside a record, into another layer or into an input shows like a wrong slot does.
Nothing is right by accident: a record's bytes say layer, request and position, request rows and
host pages come in random order, and what nobody wrote is NaN in every dtype.
"""

import random
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from rig import difference
from torch import Tensor

from minihisparse.kernels import simulator
from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.kernels.resolver import MissPlan, Resolver

CPU = torch.device("cpu")
GARBAGE = 123456  # what outputs hold before a call, and what padded rows ask for
NAN_BYTE, FENCE_BYTE = 0xFF, 0xAB
FENCE_BYTES = 1024  # on both sides
INT32_MAX = 2**31 - 1


def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def poison(shape: tuple[int, ...]) -> Tensor:
    """Bytes that are NaN in every dtype of a record."""
    return torch.full(shape, NAN_BYTE, dtype=torch.uint8)


class Twin:
    """A tensor between fences, and what all of it must be equal to."""

    def __init__(
        self,
        name: str,
        values: Tensor,
        device: torch.device,
        *,
        offset: int = 0,
        host: bool = False,
    ) -> None:
        """offset: bytes by which it misses an alignment of 16. host: in (pinned) host memory."""
        self.name, self._start, size = name, FENCE_BYTES + offset, values.nbytes
        self.expected_bytes = torch.full(
            (self._start + size + FENCE_BYTES,), FENCE_BYTE, dtype=torch.uint8
        )
        if host:
            pinned = device.type == "cuda"
            self.actual_bytes = torch.empty_like(self.expected_bytes, pin_memory=pinned)
        else:
            self.actual_bytes = torch.empty_like(self.expected_bytes, device=device)
        self.expected, self.actual = (
            whole[self._start : self._start + size].view(values.dtype).view(values.shape)
            for whole in (self.expected_bytes, self.actual_bytes)
        )
        assert self.actual.data_ptr() % 16 == offset % 16
        self.expected.copy_(values)
        self.actual_bytes.copy_(self.expected_bytes)

    def set(self, at: object, values: object) -> None:
        """Writes to both."""
        values = values if isinstance(values, Tensor) else ints(values, self.expected.dtype)
        self.expected[at] = values
        self.actual[at] = values.to(self.actual.device)

    def forgive(self) -> None:
        """Whatever is in it now is right; its fences stay as they were."""
        self.expected.copy_(self.actual)

    def check(self, when: str = "") -> None:
        actual = self.actual_bytes.cpu()
        if torch.equal(actual, self.expected_bytes):
            return
        inside = slice(self._start, len(actual) - FENCE_BYTES)
        found = actual[inside].view(self.expected.dtype).view(self.expected.shape)
        if not torch.equal(actual[inside], self.expected_bytes[inside]):
            pytest.fail(f"{self.name} {when}: {difference(found, self.expected)}")
        pytest.fail(f"bytes beside {self.name} {when}: {difference(actual, self.expected_bytes)}")


@dataclass
class Layer:
    num_slots: int
    tokens: Twin  # [rows, width] int32
    lru_slots: Twin  # [rows, width] int16
    host: Twin  # [host_rows, record_bytes] uint8
    records: Twin  # [rows, B + 1, record_bytes] uint8
    counters: Twin  # [3] int64

    @property
    def twins(self) -> list[Twin]:
        return [self.tokens, self.lru_slots, self.host, self.records, self.counters]


class KernelRig:
    """Resolve on a device, and the oracle beside it, in one or more layers."""

    def __init__(
        self,
        device: torch.device,
        *,
        top_k: int = 3,
        num_slots: int | list[int] = 4,
        device_buffer_size: int | None = None,
        width: int | None = None,
        record_bytes: int = 16,
        num_rows: int = 3,
        max_requests: int | None = None,
        max_len: int = 64,
        page_size: int = 3,
        swap_in_block_size: int | None = 32,
        dtype: torch.dtype = torch.uint8,
        record_offset: int = 0,
        host_offset: int = 0,
        seed: int = 0,
        **options,
    ) -> None:
        """num_slots: B of each layer. width: of the tables. num_rows: request rows, each of which
        owns pages from the start; max_requests: of a batch. The rest is as for Resolver.
        """
        max_requests = max_requests or num_rows
        sizes = num_slots if isinstance(num_slots, list) else [num_slots]
        self.device, self.dtype = device, dtype
        self.rng, self.page_rng = random.Random(seed), random.Random(seed)
        self.top_k, self.record_bytes = top_k, record_bytes
        self.max_len, self.page_size = max_len, page_size
        self.device_buffer_size = device_buffer_size or max(sizes)
        self.skip_io = options.get("skip_io", False)
        self.record_plan = options.get("record_plan", False)
        self.checked = options.get("checked", False)
        self.counts = options.get("rung", "fused") == "fused"
        self.uids = list(range(num_rows))  # of the requests that own the rows
        self.num_uids = num_rows
        self.lens: dict[int, int] = {}  # by row, of the requests that joined
        self.decoding: set[int] = set()  # rows whose newest record was written through

        pages_each = -(-max_len // page_size)
        self.free_pages = list(range((num_rows + 1) * pages_each))
        self.page_rng.shuffle(self.free_pages)
        num_host_rows = len(self.free_pages) * page_size
        table = [[self.free_pages.pop() for _ in range(pages_each)] for _ in range(num_rows)]
        self.table = Twin("req_to_host_pool", ints(table), device)
        self.layers = []
        for i, size in enumerate(sizes):
            wide = max(width or 0, size)
            # Beyond B, what must not be read: positions that might be selected, and a slot.
            tokens = torch.arange(wide, dtype=torch.int32).repeat(num_rows, 1)
            tokens[:, :size] = -1
            lru_slots = torch.zeros(num_rows, wide, dtype=torch.int16)
            lru_slots[:, :size] = torch.arange(size)
            records = poison((num_rows, size + 1, record_bytes))
            layer = Layer(
                size,
                Twin(f"device_buffer_tokens of layer {i}", tokens, device),
                Twin(f"lru_slots of layer {i}", lru_slots, device),
                Twin(
                    f"host_records of layer {i}",
                    poison((num_host_rows, record_bytes)),
                    device,
                    offset=host_offset,
                    host=True,
                ),
                Twin(f"records of layer {i}", records, device, offset=record_offset),
                Twin(f"counters of layer {i}", ints([10, 20, 30], torch.int64), device),
            )
            self.layers.append(layer)
        for row in range(num_rows):
            self.write_host(row, range(max_len))

        self.resolver = Resolver(
            max_requests=max_requests,
            top_k=top_k,
            device_buffer_size=self.device_buffer_size,
            record_bytes=record_bytes,
            req_to_host_pool=self.table.actual,
            page_size=page_size,
            swap_in_block_size=swap_in_block_size,
            **options,
        )
        shape = (max_requests, top_k)
        unwritten = torch.full(shape, GARBAGE, dtype=torch.int32)
        self.answer = Twin("top_k_device_locs", unwritten, device)
        self.plan = [
            Twin("miss_plan.host_rows", unwritten, device),
            Twin("miss_plan.slots", unwritten, device),
            Twin("miss_plan.counts", unwritten[:, 0].contiguous(), device),
        ]
        self.resolver.top_k_device_locs = self.answer.actual
        self.resolver.miss_plan = MissPlan(*(twin.actual for twin in self.plan))
        self.twins = [self.table, self.answer, *self.plan]
        self.twins += [twin for layer in self.layers for twin in layer.twins]

    # ---- records and states ----

    def content(self, layer: int, row: int, positions: Tensor) -> Tensor:
        """[..., record_bytes]: no word of any two records is equal."""
        words = self.record_bytes // 4
        number = (self.uids[row] * len(self.layers) + layer) * self.max_len + positions.long()
        number = number[..., None] * words + torch.arange(words)
        assert number.numel() == 0 or number.max() < 2**31  # else they would repeat
        mixed = (number * 0x9E3779B1) % 2**32
        return torch.where(mixed < 2**31, mixed, mixed - 2**32).int().view(torch.uint8)

    def host_row(self, row: int, position: int) -> int:
        page = int(self.table.expected[row, position // self.page_size])
        return page * self.page_size + position % self.page_size

    def write_host(self, row: int, positions: range) -> None:
        """What prefill and write-through do, in all layers."""
        at = torch.tensor(positions)
        pages = self.table.expected[row, at // self.page_size].long()
        host_rows = pages * self.page_size + at % self.page_size
        for i, layer in enumerate(self.layers):
            layer.host.set(host_rows, self.content(i, row, at))

    def set_state(
        self, row: int, tokens: list[int], lru_slots: list[int] | None = None, layer: int = 0
    ) -> None:
        """Which position each slot holds, with its record, and the LRU order."""
        state = self.layers[layer]
        assert len(tokens) == state.num_slots
        state.tokens.set((row, slice(state.num_slots)), tokens)
        lru_slots = list(range(len(tokens))) if lru_slots is None else lru_slots
        state.lru_slots.set((row, slice(state.num_slots)), lru_slots)
        held = [slot for slot, position in enumerate(tokens) if 0 <= position < self.max_len]
        records = poison((state.num_slots + 1, self.record_bytes))
        records[held] = self.content(layer, row, ints([tokens[slot] for slot in held]))
        state.records.set(row, records)

    def state(self, row: int, layer: int = 0) -> tuple[list[int], list[int]]:
        """The device's tokens and LRU order."""
        found = self.layers[layer]
        tokens, lru_slots = found.tokens.actual[row].tolist(), found.lru_slots.actual[row].tolist()
        return tokens[: found.num_slots], lru_slots[: found.num_slots]

    def random_state(self, row: int, seq_len: int, layer: int = 0) -> None:
        """Any positions before the newest one, some slots empty, any order."""
        num_slots = self.layers[layer].num_slots
        num_held = min(self.rng.choice((0, num_slots // 2, num_slots)), max(seq_len - 1, 0))
        tokens = self.rng.sample(range(max(seq_len - 1, 0)), num_held) + [-1] * num_slots
        tokens = tokens[:num_slots]
        self.rng.shuffle(tokens)
        self.set_state(row, tokens, self.rng.sample(range(num_slots), num_slots), layer)

    # ---- one call ----

    def resolve(
        self,
        rows: list[int],
        seq_lens: list[int],
        positions: list[list[int]],
        *,
        num_real: int | None = None,
        layer: int = 0,
    ) -> list[list[int]]:
        """Resolves, compares everything with the oracle, and returns the slots."""
        state, num_requests = self.layers[layer], len(rows)
        num_real = num_requests if num_real is None else num_real
        inputs = [
            Twin("positions", ints(positions).view(num_requests, self.top_k), self.device),
            Twin("seq_lens", ints(seq_lens), self.device),
            Twin("req_pool_indices", ints(rows, torch.int64), self.device),
            Twin("num_real_reqs", ints([num_real]), self.device),
        ]
        for twin in (self.answer, *self.plan):
            twin.set(slice(None), torch.full_like(twin.expected, GARBAGE))
        real = list(zip(rows, seq_lens, positions, strict=True))[:num_real]
        message = self._complaint(real) if self.checked else None
        self.answer.expected[:num_requests] = -1
        if self.record_plan:
            self.plan[2].expected[:num_requests] = 0
        for index, request in enumerate(real):
            if message is None:
                self._expect(state, index, *request)
        arguments = self.arguments(layer)
        answer = None
        if message:
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                self.resolver.resolve(*(twin.actual for twin in inputs), **arguments)
        else:
            answer = self.resolver.resolve(*(twin.actual for twin in inputs), **arguments)
            assert answer.shape == (num_requests, self.top_k)
            assert not num_requests or answer.data_ptr() == self.answer.actual.data_ptr()
        if not self.record_plan:
            for twin in self.plan:
                twin.forgive()
        self.check(inputs)
        return self.answer.actual[:num_requests].tolist()

    def arguments(self, layer: int = 0) -> dict[str, object]:
        """A layer's own arguments of `resolve`."""
        state = self.layers[layer]
        same = state.num_slots == self.device_buffer_size
        return {
            "device_buffer_tokens": state.tokens.actual,
            "lru_slots": state.lru_slots.actual,
            "host_records": state.host.actual.view(self.dtype),
            "records": state.records.actual.view(self.dtype),
            "counters": state.counters.actual,
            "num_slots": None if same else state.num_slots,
        }

    def _complaint(self, requests: list[tuple[int, int, list[int]]]) -> str | None:
        """What a checked call must say; if it does, nobody's state changes."""
        for index, (_, seq_len, positions) in enumerate(requests):
            for position in positions:
                if not -1 <= position < seq_len:
                    return f"row {index}: position {position} is out of range: seq_len is {seq_len}"
        return None

    def _expect(
        self, state: Layer, index: int, row: int, seq_len: int, positions: list[int]
    ) -> None:
        """The oracle's work for one real row of the batch."""
        used = slice(state.num_slots)
        tokens = state.tokens.expected[row, used].tolist()
        lru_slots = state.lru_slots.expected[row, used].tolist()
        slots, plan = resolve_oracle(positions, seq_len, tokens, lru_slots)
        state.tokens.expected[row, used] = ints(tokens)
        state.lru_slots.expected[row, used] = ints(lru_slots, torch.int16)
        self.answer.expected[index] = ints(slots)
        host_rows = [self.host_row(row, fetch.position) for fetch in plan]
        filled = [fetch.slot for fetch in plan]
        if plan and not self.skip_io:
            state.records.expected[row, filled] = state.host.expected[host_rows]
        if self.record_plan:
            self.plan[0].expected[index, : len(plan)] = ints(host_rows)
            self.plan[1].expected[index, : len(plan)] = ints(filled)
            self.plan[2].expected[index] = len(plan)
        if self.counts:
            num_answers = sum(slot >= 0 for slot in slots)
            num_evicted = sum(fetch.evicted >= 0 for fetch in plan)
            state.counters.expected += ints([num_answers - len(plan), len(plan), num_evicted])

    def check(self, inputs: list[Twin] | None = None) -> None:
        for twin in [*self.twins, *(inputs or ())]:
            twin.check("after the call")
        assert not self.resolver._handover.any(), "handover words are not back to 0"

    # ---- requests that come and go ----

    def join(self, row: int, length: int) -> None:
        """A prefilled request on a free row, as a cache admits it."""
        assert row not in self.lens
        self.uids[row], self.num_uids = self.num_uids, self.num_uids + 1
        self.lens[row] = length
        pages = self.table.expected[row].tolist()
        self.free_pages += pages
        self.page_rng.shuffle(self.free_pages)
        self.table.set(row, [self.free_pages.pop() for _ in pages])
        self.poison_host(row)
        self.write_host(row, range(length))
        for i, layer in enumerate(self.layers):
            fits = length <= layer.num_slots
            held = [*range(length)] if fits else []
            self.set_state(row, held + [-1] * (layer.num_slots - len(held)), layer=i)

    def leave(self, row: int) -> None:
        """What the tables say of it stays until the next one joins."""
        del self.lens[row]
        self.decoding.discard(row)
        self.poison_host(row)

    def poison_host(self, row: int) -> None:
        pages = self.table.expected[row].tolist()
        host_rows = [page * self.page_size + i for page in pages for i in range(self.page_size)]
        for layer in self.layers:
            layer.host.set(host_rows, poison((len(host_rows), self.record_bytes)))

    def grow(self, rows: list[int]) -> None:
        """One new token for each row, written through: to the host, and to its slot."""
        self.decoding.update(rows)
        for row in rows:
            newest = self.lens[row]
            self.lens[row] += 1
            self.write_host(row, range(newest, newest + 1))
            for i, layer in enumerate(self.layers):
                slot = min(newest, layer.num_slots)
                layer.records.set((row, slot), self.content(i, row, ints(newest)))
                if newest < layer.num_slots:
                    layer.tokens.set((row, slot), newest)

    def check_integrity(self) -> None:
        """From the device's own tables: every slot holds the record that it says it holds."""
        for i, layer in enumerate(self.layers):
            all_tokens, all_records = layer.tokens.actual.cpu(), layer.records.actual.cpu()
            orders = layer.lru_slots.actual[:, : layer.num_slots].sort(dim=1).values.cpu()
            assert (orders == torch.arange(layer.num_slots)).all(), "lru_slots: no permutation"
            for row, length in self.lens.items():
                tokens = all_tokens[row, : layer.num_slots]
                held = (tokens >= 0).nonzero()[:, 0]
                slots, positions = held.tolist(), tokens[held].tolist()
                assert len(set(positions)) == len(positions), "a position in two slots"
                assert all(position < length for position in positions)
                if length > layer.num_slots and row in self.decoding:
                    assert length - 1 not in positions, "the newest position in two slots"
                    slots, positions = [*slots, layer.num_slots], [*positions, length - 1]
                right = self.content(i, row, ints(positions))
                assert torch.equal(all_records[row, slots], right), f"layer {i}, row {row}"


def random_walk(rig: KernelRig, num_steps: int) -> dict[str, int]:
    """Requests join, grow and leave, with everything compared after each step; what happened."""
    rng, num_layers = rig.rng, len(rig.layers)
    all_rows = range(len(rig.uids))
    seen = dict.fromkeys(("joined", "left", "padded", "resident", "calls"), 0)
    largest = max(layer.num_slots for layer in rig.layers)
    while seen["calls"] < num_steps * num_layers:
        free = [row for row in all_rows if row not in rig.lens]
        if free and (not rig.lens or rng.random() < 0.2):
            rig.join(rng.choice(free), rng.choice((1, rng.randrange(1, 2 * largest), largest)))
            seen["joined"] += 1
        for row in list(rig.lens):
            if rig.lens[row] == rig.max_len or rng.random() < 0.01:
                rig.leave(row)
                seen["left"] += 1
        if not rig.lens:
            continue
        rows = rng.sample(sorted(rig.lens), rng.randint(1, len(rig.lens)))
        rig.grow(rows)
        lens = [rig.lens[row] for row in rows]
        padding = rng.randint(0, len(all_rows) - len(rows))
        seen["padded"] += padding
        for i in range(num_layers):
            seen["resident"] += sum(length <= rig.layers[i].num_slots for length in lens)
            positions = [selection(rig, i, row) for row in rows]
            positions += [[GARBAGE] * rig.top_k] * padding
            rig.resolve(
                rows + [rng.choice(all_rows) for _ in range(padding)],
                lens + [rng.choice((0, rig.max_len))] * padding,
                positions,
                num_real=len(rows),
                layer=i,
            )
            seen["calls"] += 1
        rig.check_integrity()
    return seen


def selection(rig: KernelRig, layer: int, row: int) -> list[int]:
    """Up to K positions of a request; many near each other, so that there are hits and misses."""
    rng, length, top_k = rig.rng, rig.lens[row], rig.top_k
    near = rng.randrange(length)
    some = [min(max(near + rng.randint(-6, 6), 0), length - 1) for _ in range(top_k)]
    held = [position for position in rig.state(row, layer)[0] if 0 <= position < length]
    some = [rng.choice((position, rng.choice(held or [0]))) for position in some]
    if rng.random() < 0.5:
        some[-1] = length - 1
    if rng.random() < 0.7:
        some = sorted(set(some))
    some += [-1] * (top_k - len(some))
    if rng.random() < 0.3:
        rng.shuffle(some)
    return some


@contextmanager
def schedule(seed: int | None, resident_blocks: int | None = None):
    """Simulated threads and blocks take turns in this order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            simulator, "run", partial(simulator.run, seed=seed, resident_blocks=resident_blocks)
        )
        yield
