"""Guards: a shared layer that differs in one bit from one with a Resolve of its own; a copy that is
read before it is there; a plan that is overwritten before its last copy; a newest record that the
copy overwrites; layers that fall out of step where a request outgrows its slots, is admitted or
released; a side stream that a capture does not join; a shared layer whose anchor was not started.

`Twins` runs two caches side by side on the same requests: in one every layer resolves, in the other
shared layers are prefetched. Whatever nobody wrote is NaN, a record's value says its request, layer
and position, and after each step every byte of both is compared.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from rig import assert_same_bits
from torch import Tensor

from minihisparse.anchors import check_shared
from minihisparse.batch import Batch
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.host_store import HostPool
from minihisparse.prefetcher import Prefetcher

ANCHOR_OF = (0, 0, 0, 3, 3, 5)  # groups of three, two and one
GARBAGE = 123456  # what padded rows ask for
BACKENDS = ["torch", "simulated", pytest.param("cuda", marks=pytest.mark.gpu)]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


@dataclass
class Request:
    uid: int  # never used again, unlike its row
    length: int
    room: int
    decoded: bool = False


def make_cache(backend: str, anchor_of=None, num_layers: int = 6, **options) -> HiSparseCache:
    """Four request rows of at most 40 tokens, host pages in random order, NaN everywhere."""
    device = torch.device("cuda", 0) if backend == "cuda" else torch.device("cpu")
    sizes = {"max_requests": 4, "top_k": 4, "device_buffer_size": 6} | options
    host = HostPool(
        num_layers=num_layers,
        record_width=6,
        num_pages=40,
        page_size=4,
        max_requests=sizes["max_requests"],
        max_pages_per_request=10,
        dtype=torch.float32,
        device=device,
    )
    random.Random(0).shuffle(host._free)
    host.records.fill_(torch.nan)
    kernels = backend != "torch"
    cache = HiSparseCache(host=host, device=device, kernels=kernels, anchor_of=anchor_of, **sizes)
    for records in cache.records:
        records.fill_(torch.nan)
    return cache


class Twins:
    """A cache whose layers all resolve, and one that prefetches."""

    def __init__(
        self, backend: str, anchor_of=ANCHOR_OF, *, delay: bool = False, seed: int = 0, **options
    ) -> None:
        """delay: each copy comes milliseconds late (on a GPU)."""
        self.anchor_of, self.rng = anchor_of, random.Random(seed)
        self.num_layers = len(anchor_of)
        self.alone = make_cache(backend, num_layers=self.num_layers, **options)
        self.sharing = make_cache(backend, anchor_of, self.num_layers, **options)
        self.prefetcher = Prefetcher(self.sharing)
        if delay and backend == "cuda":
            replay = self.sharing.replay
            self.sharing.replay = lambda *args: (torch.cuda._sleep(5_000_000), replay(*args))
        self.device, self.top_k = self.alone.device, self.alone.top_k
        self.requests: dict[int, Request] = {}
        self.num_admitted = 0

    @property
    def caches(self) -> tuple[HiSparseCache, HiSparseCache]:
        return self.alone, self.sharing

    def record(self, layer: int, uid: int, positions: Tensor) -> Tensor:
        """[T, 6] on the device: no two elements of any two records are equal."""
        number = (uid * self.num_layers + layer) * 40 + positions.double()
        return (number[:, None] * 6 + torch.arange(6)).float().to(self.device)

    def admit(self, length: int, room: int = 40) -> int:
        (row,) = {cache.admit(room) for cache in self.caches}
        self.requests[row] = Request(self.num_admitted, length, room)
        for layer in range(self.num_layers):
            records = self.record(layer, self.num_admitted, torch.arange(length))
            for cache in self.caches:
                cache.write_prompt(layer, row, records)
        self.num_admitted += 1
        return row

    def release(self, row: int) -> None:
        self.prefetcher.join()
        if self.device.type == "cuda":
            torch.cuda.synchronize()  # a prompt may still be on its way to the host pool
        for cache in self.caches:
            pages = list(cache.host._pages[row])
            cache.release(row)
            for page in pages:
                cache.host.records[:, 4 * page : 4 * page + 4] = torch.nan
            for records in cache.records:
                records[row] = torch.nan
        del self.requests[row]

    def inputs(self, rows: list[int], padding: int = 0) -> tuple[Tensor, Tensor, Batch]:
        """The next step of some requests: positions [L, R, K], newest records [L, R, W]."""
        size = len(rows) + padding
        positions = torch.full((self.num_layers, size, self.top_k), GARBAGE, dtype=torch.int32)
        records = torch.full((self.num_layers, size, 6), torch.nan, device=self.device)
        for index, row in enumerate(rows):
            request = self.requests[row]
            request.length, request.decoded = request.length + 1, True
            newest = torch.tensor([request.length - 1])
            for layer, anchor in enumerate(self.anchor_of):
                records[layer, index] = self.record(layer, request.uid, newest)[0]
                chosen = self.selection(request.length)
                positions[layer, index] = torch.tensor(chosen, dtype=torch.int32)
                positions[layer, index] = positions[anchor, index]
        lengths = [self.requests[row].length for row in rows]
        batch = Batch.make(rows, lengths, self.device, padding)
        return positions.to(self.device), records, batch

    def selection(self, length: int) -> list[int]:
        """Mostly recent positions, among them often the newest one; ascending, -1 at the end."""
        recent = [length - 1 - int(self.rng.expovariate(0.3)) for _ in range(self.top_k - 1)]
        anywhere = self.rng.randrange(length)
        chosen = sorted({max(position, 0) for position in [*recent, anywhere]})
        return chosen + [-1] * (self.top_k - len(chosen))

    def alone_step(self, positions: Tensor, records: Tensor, batch: Batch) -> Tensor:
        """What each layer reads [L, R, K, W], with a Resolve in each."""
        read = []
        for layer in range(self.num_layers):
            self.alone.write_through(layer, records[layer], batch)
            slots = self.alone.resolve(layer, positions[layer], batch)
            read.append(gather(self.alone, layer, slots, batch))
        return torch.stack(read)

    def sharing_step(self, positions: Tensor, records: Tensor, batch: Batch) -> Tensor:
        """The same, prefetched. Positions of shared layers are not looked at."""
        cache, prefetcher, read = self.sharing, self.prefetcher, []
        for layer, anchor in enumerate(self.anchor_of):
            cache.write_through(layer, records[layer], batch)
            if anchor == layer:
                slots = cache.resolve(layer, positions[layer], batch)
                prefetcher.start(layer, batch)
            else:
                prefetcher.wait(layer)
                slots = prefetcher.slots(layer)
            read.append(gather(cache, layer, slots, batch))
        prefetcher.join()
        return torch.stack(read)

    def decode(self, rows: list[int], padding: int = 0) -> None:
        step = self.inputs(rows, padding)
        self.compare(self.sharing_step(*step), self.alone_step(*step))

    def compare(self, read: Tensor, right: Tensor) -> None:
        """Every byte of both caches, and what the layers of one step have read."""
        assert_same_bits(read.cpu(), right.cpu(), "records that were read")
        assert not read.isnan().any()
        requests = [self.requests.get(row) for row in range(self.alone.max_requests)]
        lengths = [r.length if r and r.decoded else 0 for r in requests]
        self.sharing.check_integrity(lengths)
        for name in ("device_buffer_tokens", "lru_slots", "counters"):
            found, expected = (getattr(cache, name).cpu() for cache in (self.sharing, self.alone))
            assert_same_bits(found, expected, name)
        assert_same_bits(self.sharing.host.records, self.alone.host.records, "the host pool")
        for layer, (found, expected) in enumerate(
            zip(self.sharing.records, self.alone.records, strict=True)
        ):
            assert_same_bits(found.cpu(), expected.cpu(), f"records of layer {layer}")


def gather(cache: HiSparseCache, layer: int, slots: Tensor, batch: Batch) -> Tensor:
    """What attention reads: the records [R, K, W] at the slots, 0 where there is none."""
    index = cache.first_slots(layer)[batch.req_pool_indices][:, None] + slots.clamp(min=0)
    found = cache.slot_records(layer)[index.flatten()].view(*slots.shape, -1)
    return torch.where((slots >= 0)[..., None], found, 0)


def walk(twins: Twins, num_steps: int, decode) -> dict[str, int]:
    """Requests come, grow across B and leave; `decode(rows)` is called `num_steps` times."""
    rng, size = twins.rng, twins.alone.device_buffer_size
    seen = dict.fromkeys(("admitted", "released", "crossed", "steps"), 0)
    while seen["steps"] < num_steps:
        if len(twins.requests) < 4 and (not twins.requests or rng.random() < 0.3):
            twins.admit(rng.choice((1, size - 1, size, size + 1, rng.randint(1, 30))))
            seen["admitted"] += 1
        for row, request in list(twins.requests.items()):
            if request.length == request.room or rng.random() < 0.06:
                twins.release(row)
                seen["released"] += 1
        if not twins.requests:
            continue
        rows = rng.sample(sorted(twins.requests), rng.randint(1, len(twins.requests)))
        seen["crossed"] += sum(twins.requests[row].length == size for row in rows)
        decode(rows)
        seen["steps"] += 1
    misses = twins.sharing.counters[:, 1]
    assert min(seen.values()) > 0 and int(misses.min()) >= num_steps, (seen, misses)
    return seen


# ---- prefetch on and off --------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize("anchor_of", [ANCHOR_OF, (0, 0, 0, 0), (0, 1, 2)], ids=str)
def test_random_walk(backend, anchor_of):
    """Bit for bit: records, tables, counters and host pool, after every step."""
    num_steps = {"torch": 200, "simulated": 15, "cuda": 200}[backend]
    twins = Twins(backend, anchor_of)
    rng = twins.rng

    def decode(rows: list[int]) -> None:
        twins.decode(rows, padding=rng.randint(0, 4 - len(rows)))

    walk(twins, num_steps, decode)


SIZES_OF_GROUPS = (6, 6, 6, 9, 9, 4)


@every_backend
def test_random_walk_with_a_size_per_group(backend):
    """Each group crosses its own B, and its plans have its own slots."""
    num_steps = {"torch": 100, "simulated": 15, "cuda": 200}[backend]
    twins = Twins(backend, device_buffer_size=SIZES_OF_GROUPS)
    walk(twins, num_steps, lambda rows: twins.decode(rows, padding=4 - len(rows)))


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 16])
def test_random_walk_with_a_late_side_stream(blocks):
    """Milliseconds behind: whoever does not wait reads old records, or overwrites the plan."""
    twins = Twins("cuda", delay=True, replay_blocks=blocks)
    walk(twins, 50, twins.decode)


@pytest.mark.gpu
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("size", [6, SIZES_OF_GROUPS], ids=str)
def test_random_walk_in_cuda_graphs(delay, size):
    """A graph per batch size, captured with one prefetcher, replayed with whatever comes."""
    twins = Twins("cuda", delay=delay, device_buffer_size=size)
    graphs = {}
    for size in (4, 2):
        positions = torch.zeros(6, size, 4, dtype=torch.int32, device="cuda")
        records = torch.zeros(6, size, 6, device="cuda")
        batch = Batch.make([], [], "cuda", padding=size)  # nobody is real: nothing changes
        inputs = positions, records, batch
        twins.sharing_step(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            read = twins.sharing_step(*inputs)
        graphs[size] = graph, inputs, read

    def decode(rows: list[int]) -> None:
        size = 2 if len(rows) <= 2 else 4
        step = twins.inputs(rows, size - len(rows))
        graph, (positions, records, batch), read = graphs[size]
        positions.copy_(step[0])
        records.copy_(step[1])
        for into, come in zip(batch.tensors, step[2].tensors, strict=True):
            into.copy_(come)
        graph.replay()
        twins.compare(read, twins.alone_step(*step))

    walk(twins, 200 if not delay else 30, decode)


@every_backend
def test_growth_across_the_buffer(backend):
    """S = B - 1, B, B + 1, B + 2, ...: no plan, then slot B for the newest, then misses."""
    twins = Twins(backend)
    row = twins.admit(4)
    misses = []
    for _ in range(6):
        twins.decode([row])
        misses.append(int(twins.sharing.counters[1, 1]))
    assert misses[2] == 0 < misses[5]  # S = 7 = B + 1, S = 10
    assert twins.sharing.counters[:3].tolist() == [twins.sharing.counters[0].tolist()] * 3


@every_backend
def test_a_step_without_requests(backend):
    twins = Twins(backend)
    twins.decode([twins.admit(9), twins.admit(12)])
    twins.decode([], padding=3)  # the plan of the step before is not replayed again


# ---- when things happen ---------------------------------------------------------------------


def in_the_middle(twins: Twins, positions: Tensor, records: Tensor, batch: Batch) -> None:
    """A step up to the start of the first group."""
    twins.sharing.write_through(0, records[0], batch)
    twins.sharing.resolve(0, positions[0], batch)
    twins.prefetcher.start(0, batch)


@pytest.mark.gpu
def test_the_main_stream_goes_on_until_it_waits():
    """While the copy is late, the main stream has not waited: it still reads what was there."""
    twins = Twins("cuda", delay=True)
    twins.decode([twins.admit(9)])  # loads what there is to load
    positions, records, batch = twins.inputs([twins.admit(20)])
    torch.cuda.synchronize()
    with torch.cuda.stream(twins.prefetcher._stream):
        torch.cuda._sleep(200_000_000)
    in_the_middle(twins, positions, records, batch)
    early = gather(twins.sharing, 1, twins.prefetcher.slots(1), batch)
    twins.prefetcher.wait(1)
    late = gather(twins.sharing, 1, twins.prefetcher.slots(1), batch)
    torch.cuda.synchronize()
    assert early.isnan().any()
    position = positions[0, 0, 0].cpu()[None]
    assert_same_bits(late[0, 0].cpu(), twins.record(1, 1, position)[0].cpu())


@pytest.mark.parametrize("backend", ["torch", "simulated"])
def test_without_streams_a_copy_is_as_late_as_it_may_be(backend):
    """So that a layer that forgets to wait is found on a CPU."""
    twins = Twins(backend)
    positions, records, batch = twins.inputs([twins.admit(20)])
    in_the_middle(twins, positions, records, batch)
    twins.sharing.write_through(1, records[1], batch)
    assert twins.sharing.records[1][0, :4].isnan().all()
    twins.prefetcher.wait(1)
    slots = twins.prefetcher.slots(1)
    found = gather(twins.sharing, 1, slots, batch)
    assert_same_bits(found[0, 0], twins.record(1, 0, positions[0, 0, :1])[0])
    assert twins.sharing.records[2][0].isnan().all()  # each layer waits for its own copy only


@every_backend
def test_an_abort_while_copies_are_under_way(backend):
    """The step is broken off and a request leaves; its row's next one has its own records."""
    twins = Twins(backend, delay=True)
    row, other = twins.admit(20), twins.admit(15)
    in_the_middle(twins, *twins.inputs([row, other]))
    twins.requests[other].length -= 1
    twins.release(row)  # joins
    assert twins.admit(18) == row
    step = twins.inputs([other, row])  # the other one makes its step again
    read, right = twins.sharing_step(*step), twins.alone_step(*step)
    assert_same_bits(read.cpu(), right.cpu())
    twins.sharing.check_integrity([twins.requests[r].length if r < 2 else 0 for r in range(4)])


@every_backend
def test_nothing_is_replayed_without_io(backend):
    """The no-IO oracle decides everything and copies nothing; its records stay 0."""
    twins = Twins(backend, skip_io=True)
    for cache in twins.caches:
        for records in cache.records:
            records.zero_()
    assert twins.prefetcher._stream is None
    rows = [twins.admit(20), twins.admit(9)]
    for _ in range(3):
        step = twins.inputs(rows)
        read, right = twins.sharing_step(*step), twins.alone_step(*step)
        assert_same_bits(read.cpu(), right.cpu())
        for name in ("device_buffer_tokens", "lru_slots", "counters"):
            assert torch.equal(getattr(twins.sharing, name), getattr(twins.alone, name))
    assert not any(bool(records[:, :6].any()) for records in twins.sharing.records)
    assert int(twins.sharing.counters[:, 1].min()) > 0


# ---- what is refused ------------------------------------------------------------------------


def test_each_call_in_its_turn():
    """Vector 12: a shared layer before its anchor, twice, or left out, is an error."""
    twins = Twins("torch")
    prefetcher, cache = twins.prefetcher, twins.sharing
    positions, records, batch = twins.inputs([twins.admit(9)])
    with pytest.raises(RuntimeError, match="nothing is under way for layer 1: .* layer 0, before"):
        prefetcher.wait(1)
    with pytest.raises(RuntimeError, match="layer 1: its anchor, layer 0, was not started last"):
        prefetcher.slots(1)
    with pytest.raises(ValueError, match="layer 1 is no anchor"):
        prefetcher.start(1, batch)
    with pytest.raises(ValueError, match="layer 1 shares the selection of layer 0: it has no Res"):
        cache.resolve(1, positions[1], batch)
    message = "layer 1, whose anchor is 0, cannot replay what layer None has resolved"
    with pytest.raises(ValueError, match=message):
        cache.replay(1, batch)

    in_the_middle(twins, positions, records, batch)
    with pytest.raises(ValueError, match="layer 0, whose anchor is 0, cannot replay"):
        cache.replay(0, batch)
    with pytest.raises(ValueError, match="layer 4, whose anchor is 3, cannot replay what layer 0"):
        cache.replay(4, batch)
    prefetcher.wait(1)
    with pytest.raises(RuntimeError, match="nothing is under way for layer 1"):
        prefetcher.wait(1)
    with pytest.raises(RuntimeError, match="nothing is under way for layer 4"):
        prefetcher.wait(4)
    with pytest.raises(RuntimeError, match="layer 4: its anchor, layer 3, was not started last"):
        prefetcher.slots(4)
    with pytest.raises(RuntimeError, match=r"waited for the records of layers \[2\].* of layer 3"):
        prefetcher.start(3, batch)
    prefetcher.join()
    prefetcher.join()  # nothing is left
    with pytest.raises(RuntimeError, match="layer 1: its anchor, layer 0, was not started last"):
        prefetcher.slots(1)


def test_a_refused_resolve_leaves_nothing_to_replay():
    """Checked mode: the plan before it is not replayed in its place."""
    cache = make_cache("torch", ANCHOR_OF, checked=True)
    cache.admit(9)
    batch = Batch.make([0], [9], "cpu")
    cache.resolve(0, torch.tensor([[0, 1, 2, 8]], dtype=torch.int32), batch)
    with pytest.raises(ValueError, match="position 9 is out of range"):
        cache.resolve(0, torch.tensor([[0, 1, 2, 9]], dtype=torch.int32), batch)
    with pytest.raises(ValueError, match="cannot replay what layer None has resolved"):
        cache.replay(1, batch)


@every_backend
def test_another_selection_names_layer_request_and_position(backend):
    """Checked mode: what a shared layer would have selected is compared with its anchor's."""
    twins = Twins(backend)
    positions, _, _ = twins.inputs([twins.admit(9), twins.admit(20)])
    check_shared(4, 3, positions[4], positions[3])
    own, of_anchor = positions[4].clone(), positions[3].clone()
    own[1, 1:] = torch.tensor([17, 18, 19])
    of_anchor[1, 1:] = torch.tensor([16, 18, -1])
    message = "layer 4, row 1: position 17 is selected at index 1, where .*, layer 3, has 16"
    with pytest.raises(ValueError, match=message):
        check_shared(4, 3, own, of_anchor)


@every_backend
def test_without_shared_layers_there_is_nothing_to_do(backend):
    """No stream, no plan; every layer resolves."""
    cache = make_cache(backend, [0, 1, 2], 3)
    prefetcher = Prefetcher(cache)
    assert prefetcher._stream is None and cache._replayer is None
    assert not cache.has_shared_layers
    batch = Batch.make([], [], cache.device, padding=1)
    for layer in range(3):
        prefetcher.start(layer, batch)
    prefetcher.join()
