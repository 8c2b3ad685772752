"""Guards: a slot that holds another position's, layer's or request's record; state that survives a
release; padding that writes; a first step that reads what nobody wrote; tables that drift from the
oracle in a long run; a layer with another layer's B; an integrity check that finds nothing.

Every test drives both caches through `CacheRig`: a record's value says its request, layer and
position, whatever nobody wrote is NaN, and host pages come in random order, so that no slot, row or
page is right by accident. After each event everything is compared with the sequential oracle.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from rig import assert_same_bits
from torch import Tensor

from minihisparse.batch import Batch
from minihisparse.full_cache import FullCache
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.host_store import HostPool
from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.kv_cache import KVCache

CPU = torch.device("cpu")
DEVICE = CPU  # of the caches; `backend` changes it
KERNELS: bool | None = None  # what caches are made with; `backend` changes it
GARBAGE = 123456  # what padded rows ask for


@pytest.fixture(
    params=["torch", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True
)
def backend(request, monkeypatch) -> str:
    """Who works: torch operations on a CPU, the kernels simulated there, or on a GPU."""
    if request.param == "simulated":
        monkeypatch.setitem(globals(), "KERNELS", True)
    if request.param == "cuda":
        monkeypatch.setitem(globals(), "DEVICE", torch.device("cuda", 0))
    return request.param


@dataclass
class Request:
    uid: int  # never used again, unlike its row
    length: int
    room: int
    decoded: bool = False


class CacheRig:
    """FullCache, HiSparseCache and the oracle's state per request and layer, side by side."""

    def __init__(
        self,
        *,
        num_layers: int = 3,
        record_width: int = 4,
        max_requests: int = 4,
        top_k: int = 3,
        device_buffer_size: int | list[int] = 4,
        page_size: int = 2,
        max_model_len: int = 32,
        num_pages: int | None = None,
        checked: bool = True,
        seed: int = 0,
    ) -> None:
        self.num_layers, self.max_requests, self.top_k = num_layers, max_requests, top_k
        one = isinstance(device_buffer_size, int)
        self.sizes = [device_buffer_size] * num_layers if one else device_buffer_size
        self.num_slots, self.max_model_len = max(self.sizes), max_model_len
        self.rng = random.Random(seed)
        max_pages = -(-max_model_len // page_size)
        self.host = HostPool(
            num_layers=num_layers,
            record_width=record_width,
            num_pages=max_pages * max_requests if num_pages is None else num_pages,
            page_size=page_size,
            max_requests=max_requests,
            max_pages_per_request=max_pages,
            dtype=torch.float32,
            device=DEVICE,
        )
        self.rng.shuffle(self.host._free)
        self.host.records.fill_(torch.nan)
        self.expected_host = self.host.records.clone()
        self.sparse = HiSparseCache(
            host=self.host,
            max_requests=max_requests,
            top_k=top_k,
            device_buffer_size=device_buffer_size,
            device=DEVICE,
            checked=checked,
            kernels=KERNELS,
        )
        self.full = FullCache(
            num_layers=num_layers,
            record_width=record_width,
            max_requests=max_requests,
            max_model_len=max_model_len,
            # So many that a free range is always long enough, however the taken ones lie.
            num_slots=2 * max_requests * max_model_len,
            dtype=torch.float32,
            device=DEVICE,
            checked=checked,
            kernels=KERNELS,
        )
        for records in [*self.sparse.records, *self.full.records]:
            records.fill_(torch.nan)
        self.expected_full = [records.cpu().clone() for records in self.full.records]
        self.requests: dict[int, Request] = {}
        self.num_admitted = 0
        self.tokens = [[[-1] * size for _ in range(max_requests)] for size in self.sizes]
        self.lru = [[list(range(size)) for _ in range(max_requests)] for size in self.sizes]
        self.counts = [[0, 0, 0] for _ in range(num_layers)]  # hits, misses, evictions
        self._element = torch.arange(record_width)
        self.check()

    @property
    def caches(self) -> tuple[KVCache, KVCache]:
        return self.full, self.sparse

    def record(self, layer: int, uid: Tensor, position: Tensor) -> Tensor:
        """f(layer, position, request) [..., W]: no two elements of any two records are equal."""
        number = (uid * self.num_layers + layer) * self.max_model_len + position
        number = number[..., None] * len(self._element) + self._element
        assert number.numel() == 0 or number.max() < 2**24  # exact in float32
        return number.float()

    def admit(self, prompt_len: int, room: int | None = None) -> int:
        """A request with a prompt of `prompt_len` tokens, prefilled in all layers."""
        room = self.max_model_len if room is None else room
        row = self.sparse.admit(room)
        assert self.full.admit(room) == row and row not in self.requests
        uid, self.num_admitted = self.num_admitted, self.num_admitted + 1
        self.requests[row] = Request(uid, prompt_len, room)
        positions = torch.arange(prompt_len)
        for layer in range(self.num_layers):
            records = self.record(layer, torch.tensor(uid), positions)
            for cache in self.caches:
                cache.write_prompt(layer, row, records.to(DEVICE))
            for position in range(prompt_len):
                self._expect(layer, row, position, records[position])
                if prompt_len <= self.sizes[layer]:
                    self.tokens[layer][row][position] = position
        self.check()
        return row

    def decode(
        self,
        rows: list[int],
        selections: list[list[int]] | Callable[[int], list[list[int]]],
        padding: int = 0,
        padding_repeats: bool = False,
    ) -> list[list[int]]:
        """One step. `selections`: a list of positions for each row, or a function of the layer.

        Padded rows have length 0 and ask for garbage, or repeat the last real row and its length
        (as a captured graph may leave them). Returns the slots of the real rows in the last layer.
        """
        for row in rows:
            self.requests[row].length += 1
            self.requests[row].decoded = True
        lengths = [self.requests[row].length for row in rows]
        uids = torch.tensor([self.requests[row].uid for row in rows], dtype=torch.int64)
        batch = Batch.make(rows, lengths, DEVICE, padding)
        if padding_repeats:
            batch.req_pool_indices[len(rows) :] = rows[-1]
            batch.seq_lens[len(rows) :] = lengths[-1]
        newest = torch.tensor(lengths, dtype=torch.int64) - 1
        for layer in range(self.num_layers):
            chosen = selections(layer) if callable(selections) else selections
            table = torch.full((len(rows) + padding, self.top_k), GARBAGE, dtype=torch.int32)
            for index, listed in enumerate(chosen):
                listed = listed + [-1] * (self.top_k - len(listed))
                table[index] = torch.tensor(listed, dtype=torch.int32)
            if padding_repeats:
                table[len(rows) :] = torch.arange(self.top_k)
            records = torch.full((len(table), len(self._element)), torch.nan)
            records[: len(rows)] = self.record(layer, uids, newest)

            answers = []
            for cache in self.caches:
                asked, written = (x.clone().to(DEVICE) for x in (table, records))
                cache.write_through(layer, written, batch)
                answers.append(cache.resolve(layer, asked, batch).cpu())
                assert torch.equal(asked.cpu(), table)
                assert torch.equal(written[: len(rows)].cpu(), records[: len(rows)])
            of_full, of_sparse = answers
            expected = torch.full(table.shape, -1, dtype=torch.int32)
            for index, row in enumerate(rows):
                self._expect(layer, row, lengths[index] - 1, records[index])
                expected[index] = torch.tensor(
                    self._resolve(layer, row, lengths[index], table[index].tolist())
                )
            assert_same_bits(of_sparse, expected, f"layer {layer}, slots")
            positions = torch.where(expected >= 0, table, -1)
            # With kernels FullCache trusts the selector and hands its list on.
            trusted = KERNELS or DEVICE != CPU
            assert_same_bits(
                of_full, table if trusted else positions, f"layer {layer}, slots of FullCache"
            )

            real, used = slice(len(rows)), (expected >= 0)[: len(rows)]
            right = self.record(layer, uids[:, None], positions[real])[used]
            first_rows = batch.req_pool_indices[real, None]
            for cache, slots in zip(self.caches, answers, strict=True):
                index = (cache.first_slots(layer)[first_rows].cpu() + slots[real])[used]
                found = cache.slot_records(layer).cpu()[index]
                assert_same_bits(found, right, f"layer {layer}, records at the slots")
        self.check()
        return of_sparse[: len(rows)].tolist()

    def _resolve(self, layer: int, row: int, seq_len: int, positions: list[int]) -> list[int]:
        """The oracle's step: write-through's part of the table, then Resolve."""
        tokens, lru_slots = self.tokens[layer][row], self.lru[layer][row]
        if seq_len <= self.sizes[layer]:
            tokens[seq_len - 1] = seq_len - 1
        slots, plan = resolve_oracle(positions, seq_len, tokens, lru_slots)
        num_answers = sum(slot >= 0 for slot in slots)
        evictions = sum(fetch.evicted >= 0 for fetch in plan)
        for i, count in enumerate((num_answers - len(plan), len(plan), evictions)):
            self.counts[layer][i] += count
        return slots

    def release(self, row: int) -> None:
        """The request leaves; what it leaves behind turns into NaN, free pages are shuffled."""
        pages = list(self.host._pages[row])
        start, end = self.full.slots.extent_of(row)
        for cache in self.caches:
            cache.release(row)
        for layer in range(self.num_layers):
            self.sparse.records[layer][row] = torch.nan
            self.full.records[layer][start:end] = self.expected_full[layer][start:end] = torch.nan
        del self.requests[row]
        for page in pages:
            rows = slice(page * self.host.page_size, (page + 1) * self.host.page_size)
            self.host.records[:, rows] = self.expected_host[:, rows] = torch.nan
        self.rng.shuffle(self.host._free)
        for layer, size in enumerate(self.sizes):
            self.tokens[layer][row], self.lru[layer][row] = [-1] * size, list(range(size))
        self.check()

    def _expect(self, layer: int, row: int, position: int, record: Tensor) -> None:
        """In the host pool, and in FullCache."""
        page = self.host._pages[row][position // self.host.page_size]
        host_row = page * self.host.page_size + position % self.host.page_size
        self.expected_host[layer, host_row] = record
        self.expected_full[layer][self.full.slots.extent_of(row)[0] + position] = record

    @property
    def seq_lens(self) -> list[int]:
        """By request row, as `check_integrity` wants them."""
        requests = [self.requests.get(row) for row in range(self.max_requests)]
        return [r.length if r and r.decoded else 0 for r in requests]

    def check(self) -> None:
        """Every state tensor, of the requests in the last batch and of all others."""
        self.sparse.check_integrity(self.seq_lens)
        self.full.check_integrity()
        width = self.num_slots  # beyond its own slots a layer's tables are as in the beginning
        tokens = [[row + [-1] * (width - len(row)) for row in rows] for rows in self.tokens]
        lru_slots = [[row + [*range(len(row), width)] for row in rows] for rows in self.lru]
        tokens = torch.tensor(tokens, dtype=torch.int32)
        lru_slots = torch.tensor(lru_slots, dtype=torch.int16)
        assert_same_bits(self.sparse.device_buffer_tokens.cpu(), tokens, "device_buffer_tokens")
        assert_same_bits(self.sparse.lru_slots.cpu(), lru_slots, "lru_slots")
        assert_same_bits(self.host.records, self.expected_host, "the host pool")
        for records, expected in zip(self.full.records, self.expected_full, strict=True):
            assert_same_bits(records.cpu(), expected, "all records of FullCache")
        assert self.sparse.counters.tolist() == self.counts
        assert self.full.counters is None  # there is nothing to count
        assert self.sparse.rows == self.full.rows == set(self.requests)
        owned = sum(-(-r.room // self.host.page_size) for r in self.requests.values())
        assert self.host.num_free_tokens == (self.host.num_pages - owned) * self.host.page_size


# -- worked by hand ---------------------------------------------------------------------------


def test_growth_across_the_buffer():
    """Vector 5: nothing is lost when the sequence outgrows the slots."""
    rig = CacheRig()
    row = rig.admit(3)
    assert rig.decode([row], [[3, 0]]) == [[3, 0, -1]]  # S = 4 = B
    assert rig.decode([row], [[4, 3]]) == [[4, 3, -1]]  # S = 5: 3 is a hit
    assert rig.counts == [[4, 0, 0]] * 3
    assert rig.lru[0][row] == [0, 1, 2, 3]
    assert rig.decode([row], [[4, 5]]) == [[0, 4, -1]]  # S = 6: 4 is in no slot any more
    assert rig.counts == [[5, 1, 1]] * 3
    assert rig.lru[0][row] == [1, 2, 3, 0]


def test_the_newest_token_one_step_later():
    """Vector 4: a miss one step after it was the newest, a hit from then on."""
    rig = CacheRig()
    row = rig.admit(4)
    rig.decode([row], [[3]])
    assert rig.decode([row], [[5, 0]]) == [[4, 0, -1]]
    assert rig.decode([row], [[5, 6]]) == [[1, 4, -1]]
    assert rig.decode([row], [[5, 7]]) == [[1, 4, -1]]
    assert rig.counts == [[6, 1, 1]] * 3


def test_cold_start():
    """Vector 8: a prompt longer than the slots starts with empty ones; the newest is never one."""
    rig = CacheRig()
    row = rig.admit(10)
    assert rig.decode([row], [[0, 5, 10]]) == [[0, 1, 4]]
    assert rig.counts == [[1, 2, 0]] * 3  # into empty slots: no eviction
    assert rig.decode([row], [[-1, -1, -1]]) == [[-1, -1, -1]]
    assert rig.decode([row], [[9, 11, 0]]) == [[2, 3, 0]]
    assert rig.decode([row], [[1, 2, 3]]) == [[1, 2, 3]]
    assert rig.counts == [[2, 7, 3]] * 3


def test_a_short_prompt_is_preloaded():
    """Vector 8: with S <= B each position is in its slot from the start, and nothing misses."""
    rig = CacheRig()
    row = rig.admit(2)
    assert rig.tokens[2][row] == [0, 1, -1, -1]
    assert rig.decode([row], [[0, 1, 2]]) == [[0, 1, 2]]
    assert rig.decode([row], [[3, 2, 0]]) == [[3, 2, 0]]
    assert rig.counts == [[6, 0, 0]] * 3


def test_first_write_through():
    """Vector 10: position n, the first that decode wrote, comes from a host row that held NaN."""
    for prompt_len in (1, 3, 4, 5, 9):
        rig = CacheRig()
        row = rig.admit(prompt_len)
        rig.decode([row], [[0]])
        rig.decode([row], [[prompt_len, 0]])
        rig.decode([row], [[prompt_len + 1, prompt_len]])


@pytest.mark.parametrize("page_size", [1, 2, 3, 8])
@pytest.mark.parametrize("top_k, device_buffer_size", [(1, 1), (1, 3), (3, 3), (3, 4), (2, 7)])
def test_every_prompt_length_around_the_buffer(page_size, top_k, device_buffer_size):
    """One request per prompt length from 1 to B + 2, together, until all have outgrown B."""
    lengths = range(1, device_buffer_size + 3)
    rig = CacheRig(
        max_requests=len(lengths) + 1,  # a batch, padding included, has no more rows
        top_k=top_k,
        device_buffer_size=device_buffer_size,
        page_size=page_size,
    )
    rows = [rig.admit(length) for length in lengths]
    for _ in range(device_buffer_size + 3):
        rig.rng.shuffle(rows)
        rig.decode(rows, lambda layer: [selection(rig, row) for row in rows], padding=1)


def selection(rig: CacheRig, row: int, beyond: int = 0) -> list[int]:
    """K positions: mostly recent ones, some padding, duplicates, the newest; `beyond` the end."""
    rng, newest = rig.rng, rig.requests[row].length - 1
    choices = []
    for _ in range(rig.top_k):
        kind = rng.random()
        if kind < 0.1:
            choices.append(-1)
        elif kind < 0.2 or newest == 0:
            choices.append(newest)
        elif kind < 0.6:
            choices.append(max(newest - int(rng.expovariate(0.3)), 0))
        else:
            choices.append(rng.randrange(-beyond if beyond else 0, newest + 1 + beyond))
    return choices


# -- a B per layer ----------------------------------------------------------------------------


def test_each_layer_crosses_its_own_buffer():
    """S = 6: where B is 4, position 4 was the newest and is in no slot; else it is in slot 4."""
    rig = CacheRig(device_buffer_size=[4, 6, 5])
    assert [len(rig.sparse.tables(layer)[0][0]) for layer in range(3)] == [4, 6, 5]
    assert [rig.sparse.first_slots(layer).tolist() for layer in range(3)] == [
        [0, 5, 10, 15], [0, 7, 14, 21], [0, 6, 12, 18]
    ]  # fmt: skip
    row = rig.admit(3)
    for position in (3, 4):
        rig.decode([row], [[position, position - 1]])
    assert rig.tokens == [[[0, 1, 2, 3], *[[-1] * 4] * 3],
                          [[0, 1, 2, 3, 4, -1], *[[-1] * 6] * 3],
                          [[0, 1, 2, 3, 4], *[[-1] * 5] * 3]]  # fmt: skip
    assert rig.decode([row], [[5, 4]]) == [[5, 4, -1]]  # layer 2: slot B = 5
    assert rig.counts == [[5, 1, 1], [6, 0, 0], [6, 0, 0]]
    rig.decode([row], [[6, 5, 4]])
    assert rig.counts == [[7, 2, 2], [9, 0, 0], [8, 1, 1]]  # 5 is in slot 5 of layer 1 alone


@pytest.mark.parametrize("prompt_len", range(1, 9))
def test_a_prompt_fits_some_layers(prompt_len):
    """Preloaded where T <= B of the layer; three steps, until it has outgrown more of them."""
    rig = CacheRig(device_buffer_size=[3, 7, 4], num_pages=60)
    row, other = rig.admit(prompt_len), rig.admit(5)
    assert [rig.tokens[layer][row][0] for layer in range(3)] == [
        0 if prompt_len <= size else -1 for size in (3, 7, 4)
    ]
    for _ in range(3):
        rig.decode([other, row], lambda layer: [selection(rig, r) for r in (other, row)], padding=1)
    rig.release(row)
    assert rig.admit(prompt_len) == row
    rig.decode([row, other], [[0, prompt_len], [0, 1]])


def test_layers_of_one_size_each_are_as_with_one_for_all():
    """The same tensors, whichever way it is said."""
    caches = [CacheRig(device_buffer_size=sizes).sparse for sizes in (4, [4, 4, 4])]
    assert caches[0].metadata_bytes == caches[1].metadata_bytes
    assert caches[0].device_buffer_sizes == caches[1].device_buffer_sizes == (4, 4, 4)
    assert caches[1].first_slots(0) is caches[1].first_slots(2)


def test_bytes_with_a_size_per_layer():
    """Records of each layer's own B; tables as wide as the largest; where rows begin, per size."""
    rig = CacheRig(device_buffer_size=[4, 6, 4])
    uniform = CacheRig(device_buffer_size=6).sparse
    assert rig.sparse.device_kv_bytes == 4 * (5 + 7 + 5) * 4 * 4
    assert rig.sparse.metadata_bytes == uniform.metadata_bytes + 4 * 8
    assert rig.sparse.device_buffer_size == 6


def test_not_as_many_sizes_as_layers():
    with pytest.raises(
        ValueError, match="--device-buffer-size: got 2 sizes for 3 layers; give one"
    ):
        CacheRig(device_buffer_size=[4, 4])


# -- requests come and go ---------------------------------------------------------------------


def test_a_reused_row_gets_its_own_records():
    """Vector 9: the next request on the row selects what the last one had in its slots."""
    for old, new in [(10, 10), (4, 10), (10, 3), (3, 4), (12, 5)]:
        rig = CacheRig()
        row, other = rig.admit(old), rig.admit(9)
        rig.decode([row, other], [[0, 1, old], [0, 1, 9]])
        rig.release(row)
        assert rig.admit(new) == row
        rig.decode([other, row], [[0, 1, 9], [0, 1, new]])
        rig.decode([row], [[0, 1, new]])


def test_abort_twice_and_never_admitted():
    """An error each time, nothing changes, and the pool ends as it began."""
    rig = CacheRig()
    first, second = rig.admit(10), rig.admit(3)
    rig.decode([second, first], [[1], [2]])
    rig.release(first)
    for row in (first, 3, 99, -1):
        for cache in rig.caches:
            with pytest.raises(ValueError, match=f"request row {row} is not admitted"):
                cache.release(row)
        rig.check()
    rig.decode([second], [[0, 3]])
    rig.release(second)
    assert rig.host.num_free_tokens == rig.host.num_pages * rig.host.page_size
    assert rig.host.bytes_used == 0


def test_an_abort_between_layers():
    """Layer 0 has taken its step, the others have not: the row is clean for the next request."""
    rig = CacheRig()
    row, other = rig.admit(10), rig.admit(10)
    batch = Batch.make([row], [11], DEVICE)
    rig.sparse.write_through(0, torch.full((1, 4), 7.0, device=DEVICE), batch)
    positions = torch.tensor([[0, 5, 10]], dtype=torch.int32, device=DEVICE)
    rig.sparse.resolve(0, positions, batch)
    rig.counts[0] = [1, 2, 0]
    rig.full.write_through(0, torch.full((1, 4), 7.0, device=DEVICE), batch)
    rig.full.resolve(0, positions, batch)
    rig.release(row)
    assert rig.admit(10) == row
    rig.decode([other, row], [[0, 5, 10], [0, 5, 10]])


@pytest.mark.parametrize(
    "num_tokens, changes, message",
    [
        (1, {"max_requests": 2}, "all 2 request rows are taken; raise --max-running-requests"),
        (9, {"num_pages": 20}, "8 tokens free of 40, 9 are needed; raise --host-to-device-ratio"),
        (33, {}, "33 tokens are more than a request may have, 32"),
    ],
    ids=["rows", "host rows", "length"],
)
def test_a_refused_request_changes_nothing(num_tokens, changes, message):
    """The message has both numbers and the flag that helps; the requests there go on."""
    rig = CacheRig(**changes)
    rows = [rig.admit(5, room=16), rig.admit(4, room=16)]
    with pytest.raises(ValueError, match=message):
        rig.sparse.admit(num_tokens)
    rig.check()
    if "num_pages" not in changes:  # FullCache has no host pool
        with pytest.raises(ValueError, match=message):
            rig.full.admit(num_tokens)
    rig.check()
    rig.decode(rows, [[0, 5], [1, 4]])
    rig.release(rows[0])
    assert rig.admit(3, room=8) == rows[0]


# -- batches ----------------------------------------------------------------------------------


def test_rows_in_any_order():
    """Batch rows are not request rows: two of four requests, of different lengths, 3 before 1."""
    rig = CacheRig()
    rows = [rig.admit(length) for length in (6, 9, 2, 12)]
    assert rows == [0, 1, 2, 3]
    assert rig.decode([3, 1], [[0, 12, 7], [9, 8, 1]]) == [[0, 4, 1], [4, 0, 1]]
    assert rig.decode([1, 3], [[1, 8, 0], [12, 7, 0]]) == [[1, 0, 2], [2, 1, 0]]
    assert rig.decode([2, 0, 3], [[2, 0], [5, 6], [7]]) == [[2, 0, -1], [0, 4, -1], [1, -1, -1]]


def test_positions_of_padded_rows_can_be_looked_up():
    """In RoPE's table, say: 0 and not -1."""
    batch = Batch.make([3, 1], [7, 1], DEVICE, padding=2)
    assert batch.req_pool_indices.tolist() == [3, 1, 0, 0]
    assert batch.seq_lens.tolist() == [7, 1, 0, 0]
    assert batch.positions.tolist() == [6, 0, 0, 0]
    assert (batch.max_seq_len, batch.num_real_reqs) == (7, 2)


@pytest.mark.parametrize("padding", [1, 3])
def test_padded_rows(padding):
    """Vector 6: they answer -1 and change nobody, though they point at row 0 and ask for 123456."""
    rig = CacheRig(max_requests=6)
    for length in (3, 9, 5):
        rig.admit(length)
    rig.decode([2, 1], [[0, 5], [8, 0, 9]], padding)
    rig.decode([0], [[0, 1, 3]], padding)
    rig.decode([1, 0, 2], [[8, 0, 10], [4, 0], [6, 5]], padding)
    rig.decode([], [], padding)
    rig.decode([1, 0], [[8, 0, 11], [5, 0]], padding, padding_repeats=True)
    rig.decode([0, 2], [[5, 0, 6], [6, 5]], padding, padding_repeats=True)


def test_a_batch_without_padding_but_with_everyone():
    rig = CacheRig(max_requests=7, top_k=2, device_buffer_size=2)
    rows = [rig.admit(length) for length in (1, 2, 3, 4, 5, 9, 9)]
    for _ in range(4):
        rig.decode(rows[::-1], lambda layer: [selection(rig, row) for row in rows[::-1]])


@pytest.mark.parametrize("padding", [0, 2])
def test_checked_mode_names_row_and_position(padding):
    """In both caches, for real rows only; nothing has changed afterwards."""
    rig = CacheRig(checked=True)
    rows = [rig.admit(9), rig.admit(3)]
    batch = Batch.make(rows, [9, 3], DEVICE, padding)
    table = torch.tensor([[0, 8, -1], [0, 3, 1]] + [[GARBAGE] * 3] * padding, dtype=torch.int32)
    for cache in rig.caches:
        with pytest.raises(ValueError, match=r"^row 1: position 3 is out of range: seq_len is 3$"):
            cache.resolve(2, table.to(DEVICE), batch)
    rig.check()


def test_unchecked_out_of_range_is_padding():
    rig = CacheRig(checked=False)
    long, short = rig.admit(9), rig.admit(2)
    slots = rig.decode([short, long], [[3, 2, -2], [10, -5, 9]])
    assert slots == [[-1, 2, -1], [-1, -1, 4]]


# -- the long run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 3, "device_buffer_size": 4, "page_size": 2},
        {"top_k": 3, "device_buffer_size": 3, "page_size": 3},
        {"top_k": 2, "device_buffer_size": 6, "page_size": 1},
        {"top_k": 3, "device_buffer_size": [7, 4], "page_size": 2},
    ],
    ids=["K=3 B=4", "K=3 B=3", "K=2 B=6", "K=3 B=7,4"],
)
def test_random_walk(options, backend):
    """Vector 14: 10,000 events in all; each ends in `CacheRig.check`."""
    num_events = {"torch": 2500, "simulated": 100, "cuda": 500}[backend]
    rig = CacheRig(
        num_layers=2,
        record_width=2,
        max_requests=4,
        max_model_len=40,
        num_pages=72 // options["page_size"],
        checked=False,
        **options,
    )
    rng = rig.rng
    events = dict.fromkeys(("admit", "refuse", "release", "decode"), 0)
    for _ in range(num_events):
        active = [row for row, request in rig.requests.items() if request.length < request.room]
        kind = rng.random()
        if kind < 0.04 or not rig.requests:
            room = rng.randint(8, rig.max_model_len)
            try:
                rig.admit(rng.randint(1, room - 1), room)
                events["admit"] += 1
            except ValueError:
                events["refuse"] += 1
                rig.check()
        elif kind < 0.06 or not active:
            rig.release(rng.choice(list(rig.requests)))
            events["release"] += 1
        else:
            rows = rng.sample(active, rng.randint(1, len(active)))
            rig.decode(
                rows,
                lambda layer, rows=rows: [selection(rig, row, beyond=2) for row in rows],
                padding=min(rng.choice([0, 0, 0, 1, 2]), rig.max_requests - len(rows)),
            )
            events["decode"] += 1
    assert min(events.values()) >= num_events // 150, events  # nothing was left out
    assert min(map(min, rig.counts)) >= num_events // 7, rig.counts


# -- what the caches promise ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_both_caches_give_the_same_bits(dtype):
    """Random bit patterns, NaN payloads among them, for a prompt and then token by token."""
    generator = torch.Generator().manual_seed(0)
    width, num_tokens, prompt_len = 8, 30, 11

    def random_records(*shape):
        raw = torch.randint(0, 256, (*shape, width * dtype.itemsize), generator=generator)
        return raw.to(torch.uint8).view(dtype)

    host = HostPool(
        num_layers=2,
        record_width=width,
        num_pages=8,
        page_size=4,
        max_requests=1,
        max_pages_per_request=8,
        dtype=dtype,
        device=DEVICE,
    )
    random.Random(0).shuffle(host._free)
    sizes = {"max_requests": 1, "top_k": 5, "device_buffer_size": 6}
    sparse = HiSparseCache(host=host, **sizes, device=DEVICE, kernels=KERNELS)
    full = FullCache(
        num_layers=2,
        record_width=width,
        max_requests=1,
        max_model_len=num_tokens,
        dtype=dtype,
        device=DEVICE,
        kernels=KERNELS,
    )
    history = random_records(2, num_tokens)
    assert history.isnan().any()
    for cache in (sparse, full):
        assert cache.admit(num_tokens) == 0
        for layer in range(2):
            cache.write_prompt(layer, 0, history[layer, :prompt_len].to(DEVICE))
    for seq_len in range(prompt_len + 1, num_tokens + 1):
        batch = Batch.make([0], [seq_len], DEVICE)
        positions = torch.randperm(seq_len, generator=generator)[:5].sort().values[None].int()
        for layer in range(2):
            gathered = []
            for cache in (full, sparse):
                cache.write_through(layer, history[layer, seq_len - 1 : seq_len].to(DEVICE), batch)
                slots = cache.resolve(layer, positions.to(DEVICE), batch)
                gathered.append(cache.slot_records(layer)[slots[0]].cpu())  # row 0 is first
            assert_same_bits(gathered[1], gathered[0], f"layer {layer}, S = {seq_len}")
            assert_same_bits(gathered[0], history[layer, positions[0].long()])
    sparse.check_integrity()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_device_bytes_do_not_depend_on_length(dtype):
    """HiSparse: (B + 1) records per request and layer, 6 bytes of tables per slot, a page table,
    and some that do not grow with anything: counters, where rows begin, the first LRU order.
    """
    sizes = []
    for max_model_len in (64, 1024):
        host = HostPool(
            num_layers=3,
            record_width=10,
            num_pages=max_model_len // 8 * 2,
            page_size=8,
            max_requests=2,
            max_pages_per_request=max_model_len // 8,
            dtype=dtype,
            device=DEVICE,
        )
        options = {"max_requests": 2, "top_k": 8, "device_buffer_size": 16}
        sparse = HiSparseCache(host=host, **options, device=DEVICE, kernels=KERNELS)
        full = FullCache(
            num_layers=3,
            record_width=10,
            max_requests=2,
            max_model_len=max_model_len,
            dtype=dtype,
            device=DEVICE,
            kernels=KERNELS,
        )
        tables = 3 * 2 * 16 * 6 + 2 * max_model_len // 8 * 4
        others = 3 * 3 * 8 + 2 * 8 + 16 * 2
        with_kernels = KERNELS or DEVICE != CPU
        kernel_bytes = 2 * 8 * 12 + 2 * 4 + 8 + 3 * 2 * 4 if with_kernels else 0
        assert sparse.metadata_bytes == tables + others + kernel_bytes
        assert full.metadata_bytes == 2 * 8
        assert sparse.record_bytes == full.record_bytes == 10 * dtype.itemsize
        assert full.device_kv_bytes == 3 * 2 * max_model_len * 10 * dtype.itemsize
        before = sparse.device_kv_bytes
        prompt = torch.ones(max_model_len, 10, dtype=dtype, device=DEVICE)
        sparse.write_prompt(0, sparse.admit(max_model_len), prompt)
        assert sparse.device_kv_bytes == before
        sizes.append(before)
    assert sizes == [3 * 2 * 17 * 10 * dtype.itemsize] * 2


def test_a_request_of_full_kv_waits_for_slots():
    """FullCache gives out slots of one pool: a request whose range does not fit is refused."""
    full = FullCache(
        num_layers=1,
        record_width=4,
        max_requests=4,
        max_model_len=32,
        num_slots=40,
        dtype=torch.float32,
        device=DEVICE,
        kernels=KERNELS,
    )
    assert full.longest_request == (32, "the device", "--hbm-budget-gib")
    assert [full.admit(16), full.admit(8)] == [0, 1]
    before = full.first_slot.clone()
    message = "the device has 16 of 40 slots free, 17 in one piece are needed; .*--hbm-budget-gib"
    with pytest.raises(ValueError, match=message):
        full.admit(17)
    full.check_integrity()
    assert full.rows == {0, 1} and torch.equal(full.first_slot, before)
    full.release(0)  # 32 slots are free, in two ranges of 16
    with pytest.raises(ValueError, match="32 of 40 slots free, 17 in one piece are needed"):
        full.admit(17)
    assert full.admit(16) == 0 and full.first_slot.tolist() == [0, 16, 0, 0]
    full.release(1)
    assert full.admit(24) == 1 and full.first_slot.tolist() == [0, 16, 0, 0]
    full.check_integrity()


# -- layers that share a selection; what is copied when is in test_prefetcher.py ---------------


def shared_cache(anchor_of: list[int] | None, num_layers: int = 5, **options) -> HiSparseCache:
    host = HostPool(
        num_layers=num_layers,
        record_width=4,
        num_pages=20,
        page_size=4,
        max_requests=2,
        max_pages_per_request=10,
        dtype=torch.float32,
        device=DEVICE,
    )
    sizes = {"max_requests": 2, "top_k": 3, "device_buffer_size": 4} | options
    return HiSparseCache(host=host, device=DEVICE, kernels=KERNELS, anchor_of=anchor_of, **sizes)


def decode_shared(cache: HiSparseCache, rows: list[int], seq_len: int, chosen: list[int]) -> None:
    """A step of requests of one length: the first group selects in this order, the others reversed,
    so that groups have unlike tables.
    """
    batch = Batch.make(rows, [seq_len] * len(rows), DEVICE)
    forward = torch.tensor([chosen] * len(rows), dtype=torch.int32, device=DEVICE)
    for layer, anchor in enumerate(cache.anchor_of):
        records = torch.full((len(rows), 4), 100.0 * layer + seq_len, device=DEVICE)
        cache.write_through(layer, records, batch)
        if anchor == layer:
            positions = forward.flip(1) if anchor else forward
            cache.resolve(layer, positions.contiguous(), batch)
        else:
            cache.replay(layer, batch)


def prompt(cache: HiSparseCache, num_tokens: int) -> int:
    row = cache.admit(40)
    for layer in range(cache.num_layers):
        records = torch.arange(num_tokens * 4.0).view(num_tokens, 4) + 1000 * layer
        cache.write_prompt(layer, row, records.to(DEVICE))
    return row


def test_a_group_has_one_set_of_tables():
    """The same memory, whoever of the group is asked; another group has its own."""
    cache = shared_cache([0, 0, 2, 2, 2])
    assert cache.anchor_of == (0, 0, 2, 2, 2) and cache.has_shared_layers
    short, long = prompt(cache, 3), prompt(cache, 9)
    assert cache.device_buffer_tokens.tolist() == [[[0, 1, 2, -1], [-1] * 4]] * 5
    decode_shared(cache, [long], 10, [0, 5, 9])
    cache.check_integrity([0, 10])
    tokens = cache.device_buffer_tokens[:, long].tolist()
    assert tokens == [[0, 5, -1, -1]] * 2 + [[5, 0, -1, -1]] * 3
    assert cache.lru_slots[:, long].tolist() == [[2, 3, 0, 1]] * 5
    for layer, anchor in enumerate(cache.anchor_of):
        for table, first in zip(cache.tables(layer), cache.tables(anchor), strict=True):
            assert table.data_ptr() == first.data_ptr()
    assert cache.tables(1)[0].data_ptr() != cache.tables(2)[0].data_ptr()
    for seq_len in (4, 5, 6):  # B = 4
        decode_shared(cache, [short], seq_len, [0, seq_len - 2, seq_len - 1])
        cache.check_integrity([seq_len, 10])
    assert cache.device_buffer_tokens[:, short].tolist() == [[0, 4, 2, 3]] * 5
    cache.release(short)
    assert (cache.device_buffer_tokens[:, short] == -1).all()
    assert cache.lru_slots[:, short].tolist() == [[0, 1, 2, 3]] * 5
    cache.check_integrity([0, 10])


def test_shared_layers_count_as_their_anchor():
    cache = shared_cache([0, 0, 2, 2, 2])
    decode_shared(cache, [prompt(cache, 9), prompt(cache, 9)], 10, [0, 5, 9])
    assert cache.counters.tolist() == [[2, 4, 0]] * 5
    cache.reset_counters()
    assert not cache.counters.any()


def test_tables_cost_once_per_group():
    alone, shared = shared_cache(None), shared_cache([0, 0, 2, 2, 2])
    saved = 3 * (2 * 4 * 6 + 3 * 8)  # layers times tables of two requests, and counters
    assert alone.metadata_bytes - shared.metadata_bytes == saved
    assert alone.device_kv_bytes == shared.device_kv_bytes


def test_all_anchors_are_no_groups():
    cache = shared_cache([0, 1, 2, 3, 4])
    assert not cache.has_shared_layers
    assert cache.device_buffer_tokens.data_ptr() == cache.tables(0)[0].data_ptr()
    assert cache.metadata_bytes == shared_cache(None).metadata_bytes


def test_a_shared_layer_is_checked_against_its_own_host_rows():
    """The anchor's tables, its own records: one bit off in the last layer is found."""
    cache = shared_cache([0, 0, 2, 2, 2])
    row = prompt(cache, 9)
    decode_shared(cache, [row], 10, [0, 5, 9])
    cache.check_integrity([10, 0])
    cache.records[4][row, 1, 3] += 1
    with pytest.raises(AssertionError, match="layer 4, request row 0: a slot differs from its ho"):
        cache.check_integrity([10, 0])


@pytest.mark.parametrize(
    "anchor_of, message",
    [
        ([0, 0, 2, 2], "anchor_of has 4 entries for 5 layers"),
        ([1, 1, 1, 1, 1], "layer 0 cannot share the selection of layer 1: .* come before it"),
        ([0, 2, 2, 2, 2], "layer 1 cannot share the selection of layer 2: .* come before it"),
        ([0, 0, -1, 2, 2], "layer 2 cannot share the selection of layer -1"),
        ([0, 0, 1, 1, 1], "layer 2: layer 1 is no anchor, it shares the selection of layer 0"),
        ([0, 0, 2, 0, 2], "layer 3 cannot share the selection of layer 0: layer 2, .* between"),
    ],
    ids=str,
)
def test_wrong_groups_are_refused(anchor_of, message):
    with pytest.raises(ValueError, match=message):
        shared_cache(anchor_of)


@pytest.mark.parametrize("sizes", [[4, 4, 6, 6, 6], [6, 6, 3, 3, 3]], ids=str)
def test_groups_of_different_sizes(sizes):
    """Each group at its own B: what a layer alone would hold, records included."""
    shared, alone = (
        shared_cache(anchor_of, device_buffer_size=sizes) for anchor_of in ([0, 0, 2, 2, 2], None)
    )
    for cache in (shared, alone):
        for num_tokens in (3, 9):
            prompt(cache, num_tokens)
    for step in range(6):
        for row, seq_len in ((0, 4 + step), (1, 10 + step)):
            chosen = [seq_len - 1, seq_len - 2, 3 * step % (seq_len - 2)]
            batch = Batch.make([row], [seq_len], DEVICE)
            for cache in (shared, alone):
                for layer, anchor in enumerate(cache.anchor_of):
                    records = torch.full((1, 4), 100.0 * layer + seq_len, device=DEVICE)
                    cache.write_through(layer, records, batch)
                    positions = chosen if layer < 2 else chosen[::-1]
                    if anchor == layer:
                        table = torch.tensor([positions], dtype=torch.int32, device=DEVICE)
                        cache.resolve(layer, table, batch)
                    else:
                        cache.replay(layer, batch)
        shared.check_integrity([4 + step, 10 + step])
    for name in ("device_buffer_tokens", "lru_slots", "counters"):
        assert_same_bits(getattr(shared, name).cpu(), getattr(alone, name).cpu(), name)
    assert shared.counters[:, 1].min() > 0


def test_a_group_of_different_sizes_is_refused():
    """Prefetched in lockstep; each layer on its own may have whatever it wants."""
    message = (
        "layer 1 has 5 slots and its anchor, layer 0, 4, but they are prefetched in lockstep: "
        "make them equal in --device-buffer-size, or pass --no-enable-layer-prefetch"
    )
    sizes = [4, 5, 4, 4, 4]
    with pytest.raises(ValueError, match=message):
        shared_cache([0, 0, 2, 2, 2], device_buffer_size=sizes)
    assert shared_cache(None, device_buffer_size=sizes).device_buffer_sizes == (4, 5, 4, 4, 4)


# -- the integrity check ----------------------------------------------------------------------


def corrupt_a_slot(rig: CacheRig) -> None:
    rig.sparse.records[1][2, 0, 3] += 1


def corrupt_a_host_record(rig: CacheRig) -> None:
    position = rig.sparse.device_buffer_tokens[2, 0, 1]
    request = torch.tensor([0], device=DEVICE)
    row = rig.host.host_rows_of(request, position[None, None])[0, 0]
    rig.host.records[2, int(row), 0] = torch.nan


def swap_two_slots(rig: CacheRig) -> None:
    rig.sparse.records[0][2, [0, 1]] = rig.sparse.records[0][2, [1, 0]]


def swap_two_layers(rig: CacheRig) -> None:
    rig.sparse.records[0], rig.sparse.records[1] = rig.sparse.records[1], rig.sparse.records[0]


def corrupt_the_newest_slot(rig: CacheRig) -> None:
    rig.sparse.records[1][2, rig.num_slots, 0] += 1


def corrupt_the_newest_slot_of_layer_1(rig: CacheRig) -> None:
    rig.sparse.records[1][2, rig.sizes[1], 0] += 1


def claim_the_newest_position(rig: CacheRig) -> None:
    """The newest position is in slot B and in no other."""
    rig.sparse.records[0][2, 0] = rig.sparse.records[0][2, rig.num_slots]
    rig.sparse.device_buffer_tokens[0, 2, 0] = rig.requests[2].length - 1


def repeat_a_position(rig: CacheRig) -> None:
    """With its right record, so that only the repetition is wrong."""
    rig.sparse.records[1][0, 3] = rig.sparse.records[1][0, 0]
    rig.sparse.device_buffer_tokens[1, 0, 3] = rig.sparse.device_buffer_tokens[1, 0, 0]


def claim_another_position(rig: CacheRig) -> None:
    rig.sparse.device_buffer_tokens[0, 2, 0] = 3


def claim_a_position_without_a_page(rig: CacheRig) -> None:
    rig.sparse.device_buffer_tokens[0, 2, 0] = rig.requests[2].room + 3


def claim_a_position_beyond_the_table(rig: CacheRig) -> None:
    rig.sparse.device_buffer_tokens[0, 2, 0] = 10_000


def repeat_an_lru_slot(rig: CacheRig) -> None:
    rig.sparse.lru_slots[2, 0, 0] = rig.sparse.lru_slots[2, 0, 1]


def empty_the_lru_order(rig: CacheRig) -> None:
    """Of a free row: its next request would start with it."""
    rig.sparse.lru_slots[0, 3] = -1


def claim_a_slot_that_the_layer_lacks(rig: CacheRig) -> None:
    rig.sparse.device_buffer_tokens[1, 2, 4] = 3


def reorder_slots_that_the_layer_lacks(rig: CacheRig) -> None:
    rig.sparse.lru_slots[1, 0, [4, 5]] = rig.sparse.lru_slots[1, 0, [5, 4]]


def order_a_slot_that_the_layer_lacks(rig: CacheRig) -> None:
    """A permutation still, but of the whole table."""
    rig.sparse.lru_slots[1, 0, [0, 5]] = rig.sparse.lru_slots[1, 0, [5, 0]]


def stale_page(rig: CacheRig) -> None:
    """The table still has the page that the request had before."""
    rig.host.req_to_host_pool[2, 0] = rig.host._free[0]


def swap_pages_of_two_requests(rig: CacheRig) -> None:
    """Owners and table agree; only the records tell."""
    pages = rig.host._pages
    pages[0][1], pages[2][1] = pages[2][1], pages[0][1]
    for row in (0, 2):
        rig.host.req_to_host_pool[row, 1] = pages[row][1]


def lose_a_page(rig: CacheRig) -> None:
    rig.host._free.pop()


def fill_a_free_row(rig: CacheRig) -> None:
    rig.sparse.device_buffer_tokens[1, 1, 2] = 0


def forget_a_request(rig: CacheRig) -> None:
    rig.sparse.rows.remove(2)


def invent_a_request(rig: CacheRig) -> None:
    rig.sparse.rows.add(3)


@pytest.mark.parametrize(
    "corrupt, message",
    [
        (corrupt_a_slot, "layer 1, request row 2: a slot differs from its host row"),
        (corrupt_a_host_record, "layer 2, request row 0: a slot differs"),
        (swap_two_slots, "layer 0, request row 2: a slot differs"),
        (swap_two_layers, "layer 0, request row 0: a slot differs"),
        (corrupt_the_newest_slot, "layer 1, request row 2: a slot differs"),
        (claim_the_newest_position, "layer 0, request row 2: a position in two slots"),
        (repeat_a_position, "layer 1, request row 0: a position in two slots"),
        (claim_another_position, "layer 0, request row 2: a slot differs"),
        (claim_a_position_without_a_page, "layer 0, request row 2: a slot's position is in none"),
        (claim_a_position_beyond_the_table, "layer 0, request row 2: a slot's position is in"),
        (repeat_an_lru_slot, "lru_slots is not a permutation"),
        (empty_the_lru_order, "lru_slots is not a permutation"),
        (stale_page, r"req_to_host_pool\[2\] is not what request owns"),
        (swap_pages_of_two_requests, "request row 0: a slot differs"),
        (lose_a_page, "lost or owned twice"),
        (fill_a_free_row, "layer 1, request row 1: free, but its slots are not"),
        (forget_a_request, "request rows and owners of host pages differ"),
        (invent_a_request, "request rows and owners of host pages differ"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_corruption_is_found(corrupt, message):
    """Rows 0 and 2 hold requests with all slots full; row 1 was released, 3 never used."""
    rig = CacheRig()
    for _ in range(3):
        rig.admit(9, room=16)
    rig.decode([2, 0], [[0, 1, 2], [4, 1, 2]])
    rig.decode([2, 0], [[6, 7, 5], [6, 7, 5]])
    rig.release(1)
    corrupt(rig)
    with pytest.raises(AssertionError, match=message):
        rig.sparse.check_integrity(rig.seq_lens)


def forget_a_full_request(full: FullCache) -> None:
    full.rows.remove(1)


def invent_a_full_request(full: FullCache) -> None:
    full.rows.add(2)


def move_a_full_request(full: FullCache) -> None:
    full.first_slot[1] += 1


def share_a_slot(full: FullCache) -> None:
    full.slots._owned[1] = (31, 64)
    full.first_slot[1] = 31


@pytest.mark.parametrize(
    "corrupt, message",
    [
        (corrupt_the_newest_slot_of_layer_1, "layer 1, request row 2: a slot differs"),
        (claim_a_slot_that_the_layer_lacks, "layer 1: its tables have changed beyond its 4 slots"),
        (reorder_slots_that_the_layer_lacks, "layer 1: its tables have changed beyond its 4 slots"),
        (order_a_slot_that_the_layer_lacks, "layer 1: lru_slots is not a permutation"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_corruption_of_a_smaller_layer_is_found(corrupt, message):
    rig = CacheRig(device_buffer_size=[6, 4, 6])
    for _ in range(3):
        rig.admit(9, room=16)
    for chosen in ([0, 1, 2], [6, 7, 5]):
        rig.decode([2, 0], [chosen, chosen])
    corrupt(rig)
    with pytest.raises(AssertionError, match=message):
        rig.sparse.check_integrity(rig.seq_lens)


@pytest.mark.parametrize(
    "corrupt, message",
    [
        (forget_a_full_request, "request rows and owners of slots differ"),
        (invent_a_full_request, "request rows and owners of slots differ"),
        (move_a_full_request, "first is"),
        (share_a_slot, "lost or owned twice"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_corruption_of_full_kv_is_found(corrupt, message):
    rig = CacheRig()
    for _ in range(2):
        rig.admit(9)
    corrupt(rig.full)
    with pytest.raises(AssertionError, match=message):
        rig.full.check_integrity()
