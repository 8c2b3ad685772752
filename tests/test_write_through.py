"""Guards: a record in the wrong slot, host row or table entry, or cut; bytes written beside it; a
padded row, an empty request or a missing page that changes something; rows that lie apart read as
if they were next to each other; records that are no multiple of 16 bytes; a slot that is lost where
a request outgrows its slots (S = B, B + 1); offsets beyond 32 bits.

The reference is a loop over requests. Every byte of every tensor is compared, fences included.
"""

import pytest
import torch
from kernel_rig import GARBAGE, Twin, ints, poison, schedule
from rig import assert_same_bits
from test_kernels_compile import PIP, SHARED_BYTES, missing_wheel, number, spilled_bytes

from minihisparse.kernels.write_through import (
    append,
    append_kernel,
    write_prompt,
    write_prompt_kernel,
    write_through,
    write_through_kernel,
)

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
MAX_REQUESTS, NUM_SLOTS, PAGE_SIZE, PAGES, HOST_PAGES = 6, 5, 3, 4, 30
BATCH = [  # request row, S: before, at and after the end of the slots, and what writes nothing
    (4, 1),
    (1, NUM_SLOTS),
    (5, NUM_SLOTS + 1),
    (0, 12),
    (3, 0),  # no token
    (-1, 4),  # no row
    (MAX_REQUESTS, 4),  # likewise
    (2, 8),  # its page is missing
    (4, 2),  # padding, like the rest
    (123456, 2_000_000_000),
]
NUM_REAL = 8
SIZES = {  # bytes per record and between two; by how much records and places miss 16 bytes
    "smollm2": (768, 64, 0, 0),
    "two_rounds": (8192 + 16, 64, 0, 0),
    "one_piece": (16, 0, 0, 0),
    "one_word": (4, 64, 0, 0),
    "odd": (20, 64, 0, 0),
    "narrow_stride": (96, 4, 12, 0),
    "narrow_source": (96, 64, 4, 0),
    "narrow_target": (96, 64, 0, 8),
    "narrow_rounds": (2100, 64, 0, 0),
}
DTYPES = [torch.uint8, torch.bfloat16, torch.float32]


class Rig:
    """A layer's cache, its host pool and a batch, with fences and a reference."""

    def __init__(self, device, size, dtype=torch.uint8, num_real=NUM_REAL):
        self.device, self.num_real = torch.device(device), num_real
        record_bytes, self.gap, self.offset, target_offset = SIZES[size]
        self.record_bytes, self.dtype = record_bytes, dtype
        generator = torch.Generator().manual_seed(record_bytes)
        pages = torch.randperm(HOST_PAGES, generator=generator)[: MAX_REQUESTS * PAGES]
        pages = pages.view(MAX_REQUESTS, PAGES).int()
        pages[2, 7 // PAGE_SIZE] = -1
        shape = (MAX_REQUESTS, NUM_SLOTS + 1, record_bytes)
        self.slots = self.twin("slots_of_layer", poison(shape), offset=target_offset)
        self.host = self.twin(
            "host_records",
            poison((HOST_PAGES * PAGE_SIZE, record_bytes)),
            offset=target_offset,
            host=True,
        )
        unwritten = torch.full((MAX_REQUESTS, NUM_SLOTS + 1), GARBAGE, dtype=torch.int32)
        self.tokens = self.twin("device_buffer_tokens", unwritten)  # one column more than slots
        self.table = self.twin("req_to_host_pool", pages)
        self.rows = self.twin("req_pool_indices", ints([row for row, _ in BATCH], torch.int64))
        self.lens = self.twin("seq_lens", ints([seq_len for _, seq_len in BATCH]))
        self.num = self.twin("num_real_reqs", ints([num_real]))
        self.records = self.new_records(len(BATCH), seed=1)

    def twin(self, *args, **options):
        return Twin(*args, self.device, **options)

    def new_records(self, count, seed):
        """Random bytes, in rows that lie apart, as k and v do behind q."""
        generator = torch.Generator().manual_seed(seed)
        shape = (count, self.gap + self.record_bytes)
        values = torch.randint(256, shape, dtype=torch.uint8, generator=generator)
        return self.twin("records", values, offset=self.offset)

    def typed(self, twin):
        """What a kernel is given, in the dtype of the model."""
        tensor = twin.actual[:, self.gap :] if twin is self.records else twin.actual
        return tensor.view(self.dtype) if self.record_bytes % self.dtype.itemsize == 0 else tensor

    def record(self, index):
        return self.records.expected[index, self.gap :]

    def host_row(self, row, position):
        page = int(self.table.expected[row, position // PAGE_SIZE])
        return -1 if page < 0 else page * PAGE_SIZE + position % PAGE_SIZE

    def check(self, when=""):
        for twin in vars(self).values():
            if isinstance(twin, Twin):
                twin.check(when)

    def real_requests(self):
        """Index, row and newest position of the requests that write something."""
        batch = zip(self.rows.expected.tolist(), self.lens.expected.tolist(), strict=True)
        for index, (row, seq_len) in enumerate(batch):
            if index < int(self.num.expected) and 0 <= row < MAX_REQUESTS and seq_len >= 1:
                yield index, row, seq_len - 1

    def write_through(self):
        write_through(
            self.typed(self.records),
            self.lens.actual,
            self.rows.actual,
            self.num.actual,
            self.tokens.actual,
            self.typed(self.slots),
            NUM_SLOTS,
            self.table.actual,
            PAGE_SIZE,
            self.typed(self.host),
        )

    def expect_write_through(self):
        for index, row, position in self.real_requests():
            host_row = self.host_row(row, position)
            if host_row < 0:
                continue
            self.host.expected[host_row] = self.record(index)
            self.slots.expected[row, min(position, NUM_SLOTS)] = self.record(index)
            if position < NUM_SLOTS:
                self.tokens.expected[row, position] = position


# ---- each step ------------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_newest_records(device, size, dtype):
    rig = Rig(device, size, dtype)
    rig.write_through()
    rig.expect_write_through()
    rig.check()
    assert (rig.tokens.expected != GARBAGE).sum() == 2  # the batch has two that grow


@every_device
@pytest.mark.parametrize("num_real", [0, 1, len(BATCH) - 2])
def test_padding_writes_nothing(device, num_real):
    rig = Rig(device, "odd", num_real=num_real)
    rig.write_through()
    rig.expect_write_through()
    rig.check()


@every_device
def test_a_position_without_a_page(device):
    """Beyond the page table's last column: neither read nor written."""
    rig = Rig(device, "smollm2")
    rig.lens.set(slice(None), PAGES * PAGE_SIZE + 1)
    rig.write_through()
    rig.check()


@every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_append(device, size, dtype):
    rig = Rig(device, size, dtype)
    first_slot = [40, 0, 20, 60, 30, 55]  # row 5 ends where the records end, row 2 is not full
    first = rig.first_slot = rig.twin("first_slot", ints(first_slot, torch.int64))
    place = rig.place = rig.twin(
        "device_records", poison((61, rig.record_bytes)), offset=SIZES[size][3]
    )
    append(
        rig.typed(rig.records),
        rig.lens.actual,
        rig.rows.actual,
        rig.num.actual,
        first.actual,
        rig.typed(place),
    )
    for index, row, position in rig.real_requests():
        place.expected[first_slot[row] + position] = rig.record(index)
    rig.check()


@every_device
def test_append_outside_of_the_records(device):
    """A row without slots, and a request that is longer than the records."""
    rig = Rig(device, "odd")
    first = rig.twin("first_slot", ints([-1, -1, 60, -5, -2, 55], torch.int64))
    rig.lens.set(2, 7)  # row 5: 55 + 6 is 61
    place = rig.place = rig.twin("device_records", poison((61, rig.record_bytes)))
    batch = rig.lens.actual, rig.rows.actual, rig.num.actual
    append(rig.typed(rig.records), *batch, first.actual, place.actual)
    rig.check()


# ---- a prompt -------------------------------------------------------------------------------


@every_device
@pytest.mark.parametrize("num_tokens", [1, PAGE_SIZE, 11])
@pytest.mark.parametrize("size", SIZES)
def test_write_prompt(device, size, num_tokens):
    """Row 2 has no page for positions 6 to 8."""
    rig = Rig(device, size, torch.bfloat16)
    rig.records = rig.new_records(num_tokens, seed=2)
    write_prompt(rig.typed(rig.records), rig.table.actual[2], PAGE_SIZE, rig.typed(rig.host))
    for position in range(num_tokens):
        host_row = rig.host_row(2, position)
        if host_row >= 0:
            rig.host.expected[host_row] = rig.record(position)
    rig.check()


@pytest.mark.gpu
def test_a_long_prompt():
    """8,192 records of 768 bytes in scattered pages of 16."""
    generator = torch.Generator().manual_seed(0)
    records = torch.randint(256, (8192, 1000), dtype=torch.uint8, generator=generator)
    pages = torch.randperm(600, generator=generator)[:512].int()
    host = torch.zeros(600, 16, 768, dtype=torch.uint8, pin_memory=True)
    write_prompt(records.cuda()[:, 232:], pages.cuda(), 16, host.view(-1, 768))
    torch.cuda.synchronize()
    assert_same_bits(host[pages.long()].view(8192, 768), records[:, 232:])
    assert not host[torch.tensor(sorted({*range(600)} - {*pages.tolist()}))].any()


# ---- any order of threads, in a CUDA graph --------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_does_not_matter(seed):
    rig = Rig("cpu", "two_rounds")
    with schedule(seed, resident_blocks=2):
        rig.write_through()
    rig.expect_write_through()
    rig.check()


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """6 GiB of slots, then as records that all are on the device."""
    num_slots, width = 2**20 - 1, 1024
    slots = torch.zeros(6, num_slots + 1, width, dtype=torch.uint8, device="cuda")
    tokens = torch.full((6, num_slots), -1, dtype=torch.int32, device="cuda")
    host = torch.zeros(8, width, dtype=torch.uint8, pin_memory=True)
    table = torch.zeros(6, num_slots // 8 + 2, dtype=torch.int32, device="cuda")
    records = torch.randint(1, 256, (1, width), dtype=torch.uint8, device="cuda")
    position = num_slots - 3
    batch = ints([position + 1]).cuda(), ints([5], torch.int64).cuda(), ints([1]).cuda()

    def check(where):
        assert torch.equal(where, records[0])
        where.zero_()
        assert int(slots.min()) == int(slots.max()) == 0

    write_through(records, *batch, tokens, slots, num_slots, table, 8, host)
    check(slots[5, position])
    assert torch.equal(host[position % 8], records[0].cpu())
    assert int(tokens[5, position]) == position and int((tokens >= 0).sum()) == 1
    flat, first = slots.view(-1, width), ints([0] * 5 + [5 * num_slots], torch.int64).cuda()
    append(records, *batch, first, flat)
    check(flat[5 * num_slots + position])


@pytest.mark.gpu
def test_graph_replay():
    """Captured once, replayed with other records, lengths, rows and numbers of requests."""
    rig = Rig("cuda", "smollm2", num_real=0)
    rig.write_through()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rig.write_through()
    for step in range(5):
        rows = torch.randperm(MAX_REQUESTS)
        rig.rows.set(slice(0, MAX_REQUESTS), rows)
        rig.lens.set(slice(None), torch.randint(0, 13, (len(BATCH),), dtype=torch.int32))
        rig.num.set(0, step + 2)
        rig.records.set(slice(None), rig.new_records(len(BATCH), seed=step).expected)
        graph.replay()
        torch.cuda.synchronize()
        rig.expect_write_through()
        rig.check(f"step {step}")


# ---- what is refused ------------------------------------------------------------------------


def test_nothing_to_write():
    rig = Rig("cpu", "odd")
    batch = [rig.lens.actual[:0], rig.rows.actual[:0], rig.num.actual]
    none = rig.typed(rig.records)[:0]
    slots, host = rig.slots.actual, rig.host.actual
    write_through(
        none, *batch, rig.tokens.actual, slots, NUM_SLOTS, rig.table.actual, PAGE_SIZE, host
    )
    append(none, *batch, ints([0], torch.int64), slots.view(-1, 20))
    write_prompt(none, rig.table.actual[0], PAGE_SIZE, host)
    rig.check()


def test_wrong_arguments():
    rig = Rig("cpu", "odd")
    right = {
        "records": rig.typed(rig.records),
        "seq_lens": rig.lens.actual,
        "req_pool_indices": rig.rows.actual,
        "num_real_reqs": rig.num.actual,
        "device_buffer_tokens": rig.tokens.actual,
        "slots_of_layer": rig.slots.actual,
        "num_slots": NUM_SLOTS,
        "req_to_host_pool": rig.table.actual,
        "page_size": PAGE_SIZE,
        "host_records": rig.host.actual,
    }

    def refused(message, error=ValueError, **wrong):
        with pytest.raises(error, match=message):
            write_through(**right | wrong)
        rig.check()

    records = right["records"]
    refused(r"records is \(10, 20, 1\), expected two dimensions", records=records[..., None])
    refused("records of 18 bytes: must be a multiple of 4", records=records[:, :18])
    refused(
        r"slots_of_layer is torch.uint8 .*, expected torch.int8", records=records.view(torch.int8)
    )
    refused(r"seq_lens is \(8,\), expected \(10,\)", seq_lens=rig.lens.actual[:8])
    refused("seq_lens must be a tensor, got list", TypeError, seq_lens=[1] * 10)
    refused("seq_lens must be torch.int32", TypeError, seq_lens=rig.lens.actual.long())
    refused(r"num_real_reqs is \(2,\)", num_real_reqs=ints([1, 2]))
    refused("page_size=0 is less than 1", page_size=0)
    refused(r"slots_of_layer is \(6, 6, 20\), expected \(6, 5, 20\)", num_slots=4)
    refused(r"device_buffer_tokens is \(6, 4\)", device_buffer_tokens=rig.tokens.actual[:, :4])
    refused(
        r"host_records .* expected torch.uint8 with rows of 20",
        host_records=rig.host.actual[:, :16],
    )
    apart = rig.host.actual.view(-1, 100)[:, :20]
    refused("host_records must be contiguous", host_records=apart)
    with pytest.raises(ValueError, match="no multiple of 4 bytes"):
        append(
            records[:, 1:17],
            *[right[n] for n in ("seq_lens", "req_pool_indices", "num_real_reqs")],
            ints([0], torch.int64),
            poison((9, 16)),
        )
    with pytest.raises(ValueError, match="records has 10 rows, pages has room for 6"):
        write_prompt(records, rig.table.actual[0, :2], PAGE_SIZE, rig.host.actual)


# ---- machine code ---------------------------------------------------------------------------

KERNELS = {"write_through": write_through_kernel, "append": append_kernel}
KERNELS |= {"write_prompt": write_prompt_kernel}
WIDTHS = {"smollm2": (768, True), "8b": (4096, True), "long": (9216, True), "narrow": (1156, False)}


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("cc", SHARED_BYTES, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
def test_machine_code(cc, name, width):
    record_bytes, wide = WIDTHS[width]
    kernel = KERNELS[name](record_bytes, wide)
    try:
        code = kernel.compile(cc)
    except Exception as error:
        if missing_wheel(error):
            pytest.skip(f"{type(error).__name__}: {error}; {PIP}")
        raise
    registers = number(r"Used (\d+) registers", code.log)
    print(f"\nsm_{cc[0]}{cc[1]} {name} {width}: {registers} registers", end="")
    assert spilled_bytes(code) == 0
    assert number(r"(\d+) bytes stack frame", code.log) == 0
    assert ".f64" not in code.ptx and ".local" not in code.ptx
    times = -(-record_bytes // (16 if wide else 4) // kernel.max_threads) if wide else 0
    assert code.ptx.count("ld.global.v4.u32") == times
    assert code.ptx.count("st.global.v4.u32") == times * (2 if name == "write_through" else 1)
