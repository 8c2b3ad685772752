"""Guards: a plan replayed into the wrong slot, from the wrong host row, or of another request; a
stale entry beyond a plan's length; a padded row that copies; records left out where requests,
blocks or lists of records meet; plans of unequal length; records that are no multiple of 16 bytes;
offsets beyond 32 bits; a plan that a CUDA graph has frozen.

The reference is a loop over requests. Every byte of every tensor is compared, fences included.
"""

import random
import re
from types import SimpleNamespace

import pytest
import torch
from kernel_rig import GARBAGE, Twin, ints, poison, schedule
from test_kernels_compile import (
    PIP,
    SHARED_BYTES,
    machine_code,
    missing_wheel,
    number,
    spilled_bytes,
)

from minihisparse.kernels.replay import Replayer, replay_kernel
from minihisparse.kernels.resolver import MissPlan

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
SIZES = {  # bytes per record; by how much host records and slots miss an alignment of 16
    "smollm2": (768, 0, 0),
    "one_piece": (16, 0, 0),
    "one_word": (4, 0, 0),
    "odd": (20, 0, 0),
    "narrow_host": (96, 4, 0),
    "narrow_slots": (96, 0, 8),
    "many_rounds": (8192 + 16, 0, 0),
}
PLANS = {  # records of each real request
    "one": [1],
    "none": [0, 0, 0],
    "full": [6, 6],
    "holes": [0, 3, 0, 0, 6, 1, 0],
    "first": [6, 0, 0],
    "last": [0, 0, 5],
}


class Rig:
    """A plan, a batch and a layer between fences, and the reference beside them."""

    def __init__(
        self,
        device: str,
        counts: list[int],
        size: str = "odd",
        *,
        top_k: int = 6,
        num_slots: int = 9,
        padding: int = 2,
        max_requests: int | None = None,
        dtype: torch.dtype = torch.uint8,
        seed: int = 0,
        replay_blocks: int | None = None,
    ) -> None:
        """padding: batch rows that are not real. max_requests: rows of the plan's buffers."""
        self.rng, self.dtype = random.Random(seed), dtype
        self.record_bytes, host_offset, offset = SIZES[size]
        self.top_k, self.num_slots, self.num_requests = top_k, num_slots, len(counts) + padding
        max_requests = max_requests or self.num_requests + 1
        self.num_rows, num_host_rows = len(counts) + 2, 3 * sum(counts) + 5
        device = torch.device(device)

        def twin(name, values, **where):
            return Twin(name, values, device, **where)

        unwritten = torch.full((max_requests, top_k), GARBAGE, dtype=torch.int32)
        self.plan = [twin("plan.host_rows", unwritten), twin("plan.slots", unwritten)]
        self.plan.append(twin("plan.counts", unwritten[:, 0].contiguous()))
        # In padded rows, what must not be trusted.
        rows = torch.full((self.num_requests,), GARBAGE, dtype=torch.int64)
        self.rows = twin("req_pool_indices", rows)
        self.num_real = twin("num_real_reqs", ints([0]))
        generator = torch.Generator().manual_seed(seed)
        shape = (num_host_rows, self.record_bytes)
        content = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        self.host = twin("host_records", content, offset=host_offset, host=True)
        shape = (self.num_rows, num_slots + 1, self.record_bytes)
        self.slots = twin("records", poison(shape), offset=offset)
        self.twins = [*self.plan, self.rows, self.num_real, self.host, self.slots]
        self.replayer = Replayer(
            MissPlan(*(part.actual for part in self.plan)),
            device_buffer_size=num_slots,
            record_bytes=self.record_bytes,
            replay_blocks=replay_blocks,
        )
        self.set_plan(counts)

    def set_plan(self, counts: list[int]) -> None:
        """Request rows in any order; distinct slots, never slot B; any host rows."""
        order = self.rng.sample(range(self.num_rows), len(counts))
        for index, (row, count) in enumerate(zip(order, counts, strict=True)):
            host_rows = [self.rng.randrange(len(self.host.expected)) for _ in range(count)]
            self.plan[0].set((index, slice(count)), host_rows)
            self.plan[1].set((index, slice(count)), self.rng.sample(range(self.num_slots), count))
            self.plan[2].set(index, count)
            self.rows.set(index, row)
        self.num_real.set(0, len(counts))

    def replay(self) -> None:
        self.replayer.replay(
            self.rows.actual,
            self.num_real.actual,
            host_records=self.host.actual.view(self.dtype),
            records=self.slots.actual.view(self.dtype),
        )

    def expect(self) -> None:
        host_rows, slots, counts = (part.expected for part in self.plan)
        for index in range(int(self.num_real.expected)):
            row = int(self.rows.expected[index])
            for i in range(int(counts[index])):
                record = self.host.expected[int(host_rows[index, i])]
                self.slots.expected[row, int(slots[index, i])] = record

    def check(self, when: str = "") -> None:
        for twin in self.twins:
            twin.check(when)


@every_device
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("plan", PLANS)
def test_replay(device, plan, size):
    rig = Rig(device, PLANS[plan], size)
    rig.replay()
    rig.expect()
    rig.check()


@every_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_records_of_any_dtype(device, dtype):
    rig = Rig(device, PLANS["holes"], "smollm2", dtype=dtype)
    rig.replay()
    rig.expect()
    rig.check()


@every_device
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 40])
def test_every_block_has_its_share(device, blocks):
    """112 records and lists of 32 or 64: several lists per block, or blocks without a record."""
    counts = [40, 1, 0, 23, 40, 8]
    for size in ("one_word", "odd"):
        sizes = {"top_k": 40, "num_slots": 41, "seed": blocks, "replay_blocks": blocks}
        rig = Rig(device, counts, size, **sizes)
        if size == "one_word":
            rig.replayer.num_threads = 32
        rig.replay()
        rig.expect()
        rig.check()


@every_device
def test_more_requests_than_threads(device):
    """Their counts and sums are more than one for each thread."""
    counts = [(0, 1, 0, 0, 2)[i % 5] for i in range(270)]
    rig = Rig(device, counts, "one_word", top_k=2, num_slots=3, max_requests=300)
    assert rig.replayer.num_threads == 32
    rig.replay()
    rig.expect()
    rig.check()


@every_device
def test_a_batch_without_real_requests(device):
    rig = Rig(device, PLANS["full"])
    rig.num_real.set(0, 0)
    rig.replay()
    rig.check()
    rig.rows = SimpleNamespace(actual=rig.rows.actual[:0])
    rig.num_real.set(0, 1)
    rig.replay()
    rig.check()


@every_device
def test_a_batch_of_fewer_rows_than_are_real(device):
    """Rows of the plan that the batch does not have are not replayed."""
    rig = Rig(device, [6, 1, 6, 6])
    rig.replayer.replay(
        rig.rows.actual[:2],
        rig.num_real.actual,
        host_records=rig.host.actual,
        records=rig.slots.actual,
    )
    rig.num_real.expected[0] = 2
    rig.expect()
    rig.num_real.expected[0] = 4
    rig.check()


@every_device
def test_the_plan_of_the_step_before_is_forgotten(device):
    """Shorter plans in the same buffers: their tails are the last step's."""
    rig = Rig(device, [6, 6, 6, 6])
    for counts in ([6, 5, 4, 3], [2, 0, 1, 0], [0, 0, 0, 0], [0, 4]):
        rig.set_plan(counts)
        rig.slots.set(slice(None), poison(rig.slots.expected.shape))
        rig.replay()
        rig.expect()
        rig.check(str(counts))


@every_device
@pytest.mark.parametrize("size", ["odd", "one_piece"])
def test_a_layer_of_fewer_slots(device, size):
    """One replayer for layers of different B: where a request's slots begin is the layer's own."""
    rig = Rig(device, PLANS["holes"], size)
    rig.replayer.device_buffer_size = 12
    batch = rig.rows.actual, rig.num_real.actual
    layer = {"host_records": rig.host.actual, "records": rig.slots.actual}
    with pytest.raises(ValueError, match=r"expected \[rows, 13, W\]"):
        rig.replayer.replay(*batch, **layer)
    rig.check()
    rig.replayer.replay(*batch, **layer, num_slots=9)
    rig.expect()
    rig.check()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_order_of_threads_does_not_matter(seed):
    """Not within a list of records, nor from one list to the next."""
    sizes = {"top_k": 40, "num_slots": 41, "replay_blocks": 3}
    rig = Rig("cpu", [40, 1, 0, 23, 40, 8], "odd", **sizes)
    rig.replayer.num_threads = 32
    with schedule(seed, resident_blocks=2):
        rig.replay()
    rig.expect()
    rig.check()


@pytest.mark.gpu
@pytest.mark.parametrize("blocks", [1, 16, 132])
def test_a_large_batch(blocks):
    """128 requests with 0 to 256 misses each: far from equal."""
    rng = random.Random(blocks)
    counts = [rng.choice((0, 1, 25, 200, 256)) for _ in range(128)]
    sizes = {"top_k": 256, "num_slots": 512, "max_requests": 160, "replay_blocks": blocks}
    rig = Rig("cuda", counts, "smollm2", **sizes)
    rig.replay()
    rig.expect()
    rig.check()


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """6 GiB of slots."""
    width, slots_per_row = 1024, 2**15
    records = torch.zeros(192, slots_per_row, width, dtype=torch.uint8, device="cuda")
    host = torch.randint(1, 256, (8, width), dtype=torch.uint8).pin_memory()
    plan = MissPlan(ints([[5]]).cuda(), ints([[slots_per_row - 3]]).cuda(), ints([1]).cuda())
    replayer = Replayer(plan, device_buffer_size=slots_per_row - 1, record_bytes=width)
    rows, num_real = ints([190], torch.int64).cuda(), ints([1]).cuda()
    replayer.replay(rows, num_real, host_records=host, records=records)
    assert torch.equal(records[190, slots_per_row - 3].cpu(), host[5])
    records[190, slots_per_row - 3] = 0
    assert int(records.max()) == 0


@pytest.mark.gpu
def test_graph_replay():
    """Captured once after `load` alone, replayed with other plans and numbers of requests."""
    rig = Rig("cuda", [6, 6, 6, 6, 6], "smollm2")
    rig.replayer.load()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.replay()
    rig.check("after the capture")
    for step in range(20):
        counts = [rig.rng.choice((0, 1, 6)) for _ in range(rig.rng.randint(0, 5))]
        rig.set_plan(counts)
        rig.slots.set(slice(None), poison(rig.slots.expected.shape))
        graph.replay()
        torch.cuda.synchronize()
        rig.expect()
        rig.check(f"step {step}")


# ---- what is refused ------------------------------------------------------------------------


def test_wrong_arguments():
    """Each error names what was found and what was expected; nothing has been written."""
    rig = Rig("cpu", PLANS["full"])
    right = {
        "req_pool_indices": rig.rows.actual,
        "num_real_reqs": rig.num_real.actual,
        "host_records": rig.host.actual,
        "records": rig.slots.actual,
    }

    def refused(message, error=ValueError, **wrong):
        with pytest.raises(error, match=message):
            rig.replayer.replay(**right | wrong)
        rig.check()

    rows = rig.rows.actual
    refused("req_pool_indices has 6 rows, the plan 5", req_pool_indices=rows.repeat(2)[:6])
    refused("req_pool_indices must be torch.int64", TypeError, req_pool_indices=rows.int())
    refused(r"num_real_reqs is \(2,\), expected \(1,\)", num_real_reqs=ints([1, 2]))
    refused(r"records is \(4, 9, 20\), expected \[rows, 10, W\]", records=right["records"][:, :9])
    refused("records: 16 bytes per record, expected 20", records=right["records"][:, :, :16])
    refused("host_records: 16 bytes per record", host_records=right["host_records"][:, :16])
    apart = torch.zeros(4, 10, 40, dtype=torch.uint8)[:, :, :20]
    refused("records must be contiguous", records=apart)
    shifted = rig.host.actual_bytes[1 : 1 + 20 * 8].view(8, 20)
    refused("host_records starts at .*, no multiple of 4", host_records=shifted)
    huge = torch.zeros(1, dtype=torch.uint8).expand(2**28, 10, 20)
    refused("more slots than int32 can number", records=huge)

    plan = MissPlan(*(part.actual for part in rig.plan))
    for wrong, message in [
        ({"replay_blocks": 0}, "replay_blocks=0: must be in 1..1024"),
        ({"replay_blocks": 1025}, "replay_blocks=1025"),
        ({"record_bytes": 18}, "records of 18 bytes: must be a multiple of 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            Replayer(plan, **{"device_buffer_size": 9, "record_bytes": 20} | wrong)
    long = MissPlan(plan.host_rows.new_zeros(4097, 1), plan.slots.new_zeros(4097, 1), rows[:1])
    with pytest.raises(ValueError, match="max_requests=4097: a replay can have 4096"):
        Replayer(long, device_buffer_size=9, record_bytes=20)


# ---- machine code ---------------------------------------------------------------------------


CODE = [(cc, 512, 256, wide) for cc in SHARED_BYTES for wide in (True, False)]
CODE += [((9, 0), 512, 4096, True), ((9, 0), 32, 256, True)]


@pytest.mark.parametrize("cc, num_threads, max_requests, wide", CODE)
def test_machine_code(cc, num_threads, max_requests, wide, tmp_path):
    """No spill, no local memory, no float64; pieces of 16 bytes, three asked for before a wait."""
    kernel = replay_kernel(
        num_threads=num_threads, max_requests=max_requests, record_bytes_are_16s=wide
    )
    try:
        code = kernel.compile(cc)
    except Exception as error:
        if missing_wheel(error):
            pytest.skip(f"{type(error).__name__}: {error}; {PIP}")
        raise
    registers = number(r"Used (\d+) registers", code.log)
    shared = 8 * (max_requests + num_threads)
    print(f"\nsm_{cc[0]}{cc[1]}: {registers} registers, {shared} bytes shared", end="")
    assert registers <= 64  # two blocks of 512 threads fit beside each other
    assert shared <= 48 * 1024
    assert spilled_bytes(code) == 0
    assert number(r"(\d+) bytes stack frame", code.log) == 0
    assert ".f64" not in code.ptx and ".local" not in code.ptx
    kind = "v4.u32" if wide else "u32"
    assert code.ptx.count(f"ld.global.nc.L1::no_allocate.{kind}") == 3
    assert code.ptx.count(f"st.global.{kind}") == 3
    sass = machine_code(code.cubin, tmp_path)
    accesses = re.findall(r"LDG\.E\.NA|STG\.E", sass)
    assert accesses.index("STG.E") >= 2, "each read waits for the one before"
