"""Guards: a kernel that differs from the oracle in any slot, table entry, copied byte or counter;
that writes beside its records, or to a padded row's state; that is right in one order of threads or
blocks only, for one block size, record size or page size; a switch that changes more than it says;
an argument that reaches a GPU and does not fit.

Every rung and every switch of the fused kernel goes through the same cases, compiled where there is
a GPU, else simulated (`kernel_rig.py` says what is compared). Sizes are small; the large ones are
in test_kernels_gpu.py.
"""

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_rig import CPU, GARBAGE, INT32_MAX, KernelRig, ints, random_walk, schedule

from minihisparse.host_store import free_host_bytes
from minihisparse.kernels import device as device_module
from minihisparse.kernels import simulator
from minihisparse.kernels.resolve import resolve_one_thread
from minihisparse.kernels.resolve_fused import fused_kernel
from minihisparse.kernels.resolve_one_block import resolve_one_block
from minihisparse.kernels.resolver import Resolver

VERSIONS = {
    "one_thread": {"rung": "one_thread"},
    "one_block": {"rung": "one_block"},
    "one_block_96": {"rung": "one_block", "swap_in_block_size": 96},
    "fused": {"blocks_per_request": 1},
    "fused_64": {"blocks_per_request": 1, "swap_in_block_size": 64},
    "fused_3_blocks": {"blocks_per_request": 3},
    "fused_by_the_batch": {"swap_in_block_size": None},
    "fused_plan": {"blocks_per_request": 1, "record_plan": True},
    "fused_checked": {"blocks_per_request": 1, "checked": True},
    "fused_skip_io": {"skip_io": True},
    "fused_everything": {"blocks_per_request": 2, "record_plan": True, "checked": True},
    "fused_skip_io_plan": {"skip_io": True, "record_plan": True, "checked": True},
}
every_version = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture(scope="module")
def device() -> torch.device:
    """Compiled where there is a GPU, else simulated."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def holding(device: torch.device, version: str, *tokens: int, top_k: int = 3, **sizes) -> KernelRig:
    """Request row 1 of 3 holds these positions, in LRU order 0, 1, 2, ..."""
    options = {"top_k": top_k, "num_slots": len(tokens)} | sizes | VERSIONS[version]
    rig = KernelRig(device, **options)
    rig.set_state(1, list(tokens))
    return rig


# -- worked by hand: vectors.md ---------------------------------------------------------------


@every_version
def test_vector_1_lru_order(device, version):
    """The newest position, 7, is in slot 4; hits 4 and 2 keep their old order."""
    rig = holding(device, version, 1, 4, 2, 5)
    assert rig.resolve([1], [8], [[4, 2, 7]]) == [[1, 2, 4]]
    assert rig.state(1) == ([1, 4, 2, 5], [0, 3, 1, 2])


@every_version
def test_vector_2_hits_rank_above_fetched(device, version):
    rig = holding(device, version, 0, 1, 2, 3)
    assert rig.resolve([1], [50], [[0, 7, 8]]) == [[0, 1, 2]]
    assert rig.state(1) == ([0, 7, 8, 3], [3, 1, 2, 0])


@every_version
def test_vector_3_padding_inside_a_row(device, version):
    rig = holding(device, version, 0, 1, 2, 3)
    assert rig.resolve([1], [50], [[1, -1, 6]]) == [[1, -1, 0]]
    assert rig.state(1) == ([6, 1, 2, 3], [2, 3, 0, 1])
    rig.set_state(1, [9, 4, -1, 2], [2, 0, 3, 1])
    assert rig.resolve([1], [50], [[-1, -1, -1]]) == [[-1, -1, -1]]
    assert rig.state(1) == ([9, 4, -1, 2], [2, 0, 3, 1])


@every_version
def test_vector_4_the_newest_token_is_in_no_slot_one_step_later(device, version):
    rig = holding(device, version, 0, 1, 2, 3, top_k=2)
    assert rig.resolve([1], [6], [[5, 0]]) == [[4, 0]]
    assert rig.resolve([1], [7], [[5, 6]]) == [[1, 4]]
    assert rig.state(1) == ([0, 5, 2, 3], [2, 3, 0, 1])
    assert rig.resolve([1], [8], [[5, 7]]) == [[1, 4]]
    assert rig.state(1) == ([0, 5, 2, 3], [2, 3, 0, 1])


@every_version
def test_vector_5_growth_across_the_buffer(device, version):
    """Up to S = B all positions are resident and nothing moves, not even the LRU order."""
    rig = holding(device, version, 0, 1, 2, 3, top_k=2)
    rig.set_state(1, [0, 1, 2, 3], [3, 1, 0, 2])
    assert rig.resolve([1], [4], [[3, 0]]) == [[3, 0]]
    assert rig.state(1) == ([0, 1, 2, 3], [3, 1, 0, 2])
    rig.set_state(1, [0, 1, 2, 3])
    assert rig.resolve([1], [5], [[4, 3]]) == [[4, 3]]
    assert rig.state(1) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert rig.resolve([1], [6], [[4, 5]]) == [[0, 4]]
    assert rig.state(1) == ([4, 1, 2, 3], [1, 2, 3, 0])


@every_version
def test_vector_6_padded_rows(device, version):
    """They answer -1 whatever they ask for, of any length, and even if the row is someone's."""
    rig = holding(device, version, 0, 1, 2, 3)
    rig.set_state(0, [4, 5, 6, 7], [3, 2, 1, 0])
    rig.set_state(2, [7, -1, 3, 0], [1, 0, 3, 2])
    before = rig.state(0), rig.state(2)
    padding = [[GARBAGE] * 3, [0, 9, -1]]
    slots = rig.resolve([1, 0, 2], [50, 40, 0], [[0, 7, 8], *padding], num_real=1)
    assert slots == [[0, 1, 2], [-1] * 3, [-1] * 3]
    assert (rig.state(0), rig.state(2)) == before
    assert rig.state(1) == ([0, 7, 8, 3], [3, 1, 2, 0])
    # As a captured graph may leave them: padding that repeats a real row.
    slots = rig.resolve([1, 1, 1], [51, 51, 51], [[9, 50, 0]] * 3, num_real=1)
    assert slots == [[3, 4, 0], [-1] * 3, [-1] * 3]
    assert rig.resolve([1, 0, 2], [0, 9, 50], [[1, 2, 3]] * 3, num_real=0) == [[-1] * 3] * 3
    # Nothing that a padded row says is used, not even its request row.
    slots = rig.resolve([1, -1, GARBAGE], [51, 40, 0], [[9, 50, 0], *padding], num_real=1)
    assert slots == [[3, 4, 0], [-1] * 3, [-1] * 3]


@every_version
def test_vector_7_id_spaces(device, version):
    """Batch rows, request rows, host pages, slots and layers: no number is right in two of them."""
    rig = KernelRig(device, top_k=4, num_slots=[6, 9], num_rows=4, **VERSIONS[version])
    rows, lens = [3, 0, 2], [40, 23, 31]
    for layer in (0, 1):
        for row, seq_len in zip([*rows, 1], [*lens, 50], strict=True):
            rig.random_state(row, seq_len, layer)
    for step in range(3):
        for layer in (1, 0):
            positions = [rig.rng.sample(range(seq_len + step), 4) for seq_len in lens]
            rig.resolve(rows, [seq_len + step for seq_len in lens], positions, layer=layer)


@every_version
def test_vector_8_cold_start(device, version):
    """S > B and empty slots: all but the newest is a miss. S <= B: everything is there."""
    rig = holding(device, version, -1, -1, -1, -1, -1, top_k=4)
    assert rig.resolve([1], [30], [[7, -1, 29, 3]]) == [[0, -1, 5, 1]]
    assert rig.state(1) == ([7, 3, -1, -1, -1], [2, 3, 4, 0, 1])
    rig.join(0, 5)
    assert rig.resolve([0], [5], [[4, 0, -1, 2]]) == [[4, 0, -1, 2]]
    rig.check_integrity()


@every_version
def test_vector_9_the_next_request_on_a_row_gets_its_own_records(device, version):
    rig = KernelRig(device, num_slots=5, **VERSIONS[version])
    for _ in range(3):
        rig.join(1, 19)
        rig.grow([1])
        assert rig.resolve([1], [20], [[3, 8, 1]]) == [[0, 1, 2]]
        if not rig.skip_io:
            rig.check_integrity()
        rig.leave(1)


@every_version
def test_vector_10_first_write_through(device, version):
    """Host rows beyond the prompt hold NaN until their token is written; then it can be fetched."""
    rig = KernelRig(device, num_slots=4, **VERSIONS[version])
    rig.join(2, 6)
    rig.grow([2])
    assert rig.resolve([2], [7], [[6, 0, 5]]) == [[4, 0, 1]]
    rig.grow([2])
    assert rig.resolve([2], [8], [[6, 7, 0]]) == [[2, 4, 0]]
    if not rig.skip_io:
        rig.check_integrity()
        assert not (rig.layers[0].records.actual[2, [0, 1, 2, 4]] == 0xFF).all(dim=-1).any()


# -- the same kinds at other sizes ------------------------------------------------------------


@every_version
@pytest.mark.parametrize("bad", [-2, -INT32_MAX - 1, 9, 10, INT32_MAX])
@pytest.mark.parametrize("num_slots", [4, 12], ids=["evicting", "resident"])
def test_positions_out_of_range(device, version, bad, num_slots):
    """Padding, or an error in checked mode; no slot and no hit, even if a slot has the number."""
    rig = holding(device, version, 9, 10, *range(2, num_slots))
    before = rig.state(1)
    [slots] = rig.resolve([1], [9], [[3, bad, 8]])
    if rig.checked:
        assert slots == [-1, -1, -1] and rig.state(1) == before
    else:
        assert slots == [3, -1, 4 if num_slots == 4 else 8]


@every_version
def test_a_slot_that_claims_the_newest_position_is_no_hit(device, version):
    """It is in slot B and nowhere else, whatever a table says: nothing else would be written."""
    rig = holding(device, version, 8, 1, 2, 3)
    assert rig.resolve([1], [9], [[8, 1, 5]]) == [[4, 1, 0]]
    assert rig.state(1) == ([5, 1, 2, 3], [2, 3, 0, 1])


@every_version
def test_duplicates_share_a_slot_and_a_copy(device, version):
    """Of a miss, a hit, the newest position and padding alike."""
    rig = holding(device, version, *range(16), top_k=9)
    assert rig.resolve([1], [50], [[9, 9, 1, 49, 1, -1, 9, 49, -1]]) == [
        [9, 9, 1, 16, 1, -1, 9, 16, -1]
    ]
    assert rig.resolve([1], [50], [[30, 1, 30, 31, 30, 31, 32, 1, 49]]) == [
        [0, 1, 0, 2, 0, 2, 3, 1, 16]
    ]
    assert rig.state(1)[1] == [*range(4, 9), *range(10, 16), 9, 0, 2, 3, 1]


@every_version
@pytest.mark.parametrize("num_slots", [1, 2, 32, 33, 97])
def test_all_hits_then_all_misses_at_k_equal_b(device, version, num_slots):
    rig = KernelRig(device, top_k=num_slots, num_slots=num_slots, max_len=300, **VERSIONS[version])
    order = rig.rng.sample(range(num_slots), num_slots)
    tokens = rig.rng.sample(range(100, 100 + num_slots), num_slots)
    rig.set_state(1, tokens, order)
    positions = [*range(100, 100 + num_slots)]
    assert rig.resolve([1], [250], [positions]) == [[tokens.index(p) for p in positions]]
    assert rig.state(1) == (tokens, order)
    assert rig.resolve([1], [250], [[p - 100 for p in positions]]) == [order]
    assert rig.state(1)[1] == order


@every_version
def test_seq_len_below_at_and_above_b(device, version):
    rig = holding(device, version, *range(8), top_k=8)
    for seq_len in (1, 7, 8, 9, 10):
        positions = [*range(seq_len - 1, -1, -1)][:8]
        positions += [-1] * (8 - len(positions))
        [slots] = rig.resolve([1], [seq_len], [positions])
        if seq_len < 10:
            assert slots == positions
    rig.resolve([], [], [])


@pytest.mark.parametrize("rung", ["one_block", "fused"])
@pytest.mark.parametrize("num_threads", [32, 64, 224, 256, 1024])
@pytest.mark.parametrize("top_k, num_slots", [(1, 1), (3, 40), (33, 65), (100, 100), (130, 257)])
def test_block_sizes_larger_and_smaller_than_k_and_b(device, rung, num_threads, top_k, num_slots):
    rig = KernelRig(
        device,
        rung=rung,
        top_k=top_k,
        num_slots=num_slots,
        num_rows=2,
        max_len=num_slots * 2 + 9,
        swap_in_block_size=num_threads,
        record_bytes=16,
        blocks_per_request=1,
        seed=top_k,
    )
    rig.random_state(0, rig.max_len - 2)
    for seq_len in (rig.max_len - 2, rig.max_len):
        held = [position for position in rig.state(0)[0] if position >= 0] or [0]
        positions = [
            rig.rng.choice((rig.rng.randrange(seq_len), rig.rng.choice(held), -1, seq_len - 1))
            for _ in range(top_k)
        ]
        rig.resolve([0], [seq_len], [positions])


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("record_bytes", [4, 12, 16, 20, 128, 656, 1152, 2064])
@pytest.mark.parametrize("offsets", [(0, 0), (4, 0), (0, 8), (12, 4)], ids=str)
def test_record_sizes_and_alignments(device, blocks, record_bytes, offsets):
    """One piece and many, of 16 bytes and of 4; pieces fewer and more than threads at once."""
    rig = KernelRig(
        device,
        top_k=5,
        num_slots=7,
        num_rows=2,
        max_len=24,
        record_bytes=record_bytes,
        record_offset=offsets[0],
        host_offset=offsets[1],
        blocks_per_request=blocks,
    )
    rig.set_state(1, [3, -1, 9, 20, 4, -1, 11])
    rig.resolve([1], [23], [[5, 9, 22, 1, 17]])
    rig.resolve([1], [24], [[8, 22, 2, 6, 0]])


@every_version
@pytest.mark.parametrize("record_bytes, offset", [(1152, 0), (1152, 4), (20, 0)])
def test_each_byte_of_a_miss_crosses_the_bus_once(monkeypatch, version, record_bytes, offset):
    """Always simulated, and every access is noted: however many threads and blocks copy."""
    rig = holding(CPU, version, 5, -1, 9, -1, record_bytes=record_bytes, record_offset=offset)
    width = 16 if rig.counts and (record_bytes, offset) == (1152, 0) else 4
    seen = {"read": [], "written": []}

    def noted(twin: Callable, way: str, size: int) -> Callable:
        def access(addressed, address, *values):
            seen[way].append((address, size))
            return twin(addressed, address, *values)

        return access

    for name, way, size in (
        ("ld16_host", "read", 16),
        ("ld4_host", "read", 4),
        ("st16", "written", 16),
        ("st4", "written", 4),
    ):
        word = getattr(device_module, name)
        monkeypatch.setitem(simulator.TWINS, word, noted(simulator.TWINS[word], way, size))
    assert rig.resolve([1], [50], [[7, 9, 40]]) == [[0, 2, 1]]
    host, records = rig.layers[0].host.actual, rig.layers[0].records.actual
    rows = [host[rig.host_row(1, 7)], host[rig.host_row(1, 40)]], [records[1, 0], records[1, 1]]
    for way, some in zip(("read", "written"), rows, strict=True):
        offsets = [] if rig.skip_io else range(0, record_bytes, width)
        expected = [(row.data_ptr() + at, width) for row in some for at in offsets]
        assert sorted(seen[way]) == sorted(expected), way


@pytest.mark.parametrize("rung", ["one_thread", "one_block", "fused"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_records_of_any_dtype(device, rung, dtype):
    """The copy moves bytes: NaN, infinities and zeros of both signs arrive as they were."""
    rig = KernelRig(device, rung=rung, dtype=dtype, record_bytes=48)
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3.0])
    patterns = special.repeat(rig.layers[0].host.expected.shape[0], 6)[:, :48].to(dtype)
    bits = patterns.view(torch.uint8)[:, :48].clone()
    rig.layers[0].host.set(slice(None), bits)
    rig.resolve([1], [50], [[7, 30, 49]])


@pytest.mark.parametrize("version", ["one_thread", "one_block", "fused", "fused_3_blocks"])
def test_the_largest_positions(device, version):
    """int32 up to the end of its range: in hashes, page numbers and comparisons."""
    rig = KernelRig(device, record_bytes=4, page_size=2**20, max_len=2**20, **VERSIONS[version])
    table = rig.table.expected[:, :1].repeat(1, 2048)
    rig.resolver.req_to_host_pool = table.to(device)
    rig.host_row = lambda row, position: int(table[row, 0]) * 2**20 + position % 2**20
    top = INT32_MAX - 1
    rig.set_state(1, [top - 1, 5, -1, top - 2])
    assert rig.resolve([1], [INT32_MAX], [[top, top - 1, top - 9]]) == [[4, 0, 1]]
    assert rig.resolve([1], [INT32_MAX], [[top - 9, 2**30, 2**30 + 2**20]]) == [[1, 2, 3]]


@pytest.mark.parametrize("version", ["one_thread", "fused", "fused_3_blocks"])
def test_every_slot_that_int16_can_name(device, version):
    num_slots = 32_767
    options = {"num_rows": 1, "max_len": 33_000, "record_bytes": 4, "top_k": 3}
    rig = KernelRig(
        device, num_slots=num_slots, **options | VERSIONS[version] | {"swap_in_block_size": 1024}
    )
    rig.set_state(0, [*range(num_slots)])
    assert rig.resolve([0], [33_000], [[num_slots - 1, 32_999, 32_900]]) == [
        [num_slots - 1, num_slots, 0]
    ]
    assert rig.state(0)[1] == [*range(1, num_slots - 1), 0, num_slots - 1]


def test_vector_13_addresses_beyond_32_bits(device):
    """Host bytes beyond 4 GiB and device bytes beyond 2 GiB, for each rung.

    Only the rows in use are written; on a CPU the others are never touched, so they cost nothing.
    A simulated kernel's ints cannot overflow: there, this shows that the test is right.
    """
    record_bytes, num_slots, num_rows, far = 1152, 3, 500_000, 4_000_000
    free = free_host_bytes()
    if free is not None and free < 10 << 30:
        pytest.skip(f"needs 10 GiB of host memory, {free / 2**30:.1f} are free")
    host = torch.empty(far + 2, record_bytes, dtype=torch.uint8)
    if device.type == "cuda":
        from minihisparse.host_store import pin_in_place

        pin_in_place(host)
    records = torch.empty(num_rows, num_slots + 1, record_bytes, dtype=torch.uint8)
    records = torch.empty_like(records, device=device)
    row = num_rows - 1
    assert far * record_bytes > 2**32 and (row * (num_slots + 1)) * record_bytes > 2**31
    near = [far * record_bytes % 2**32 // record_bytes, far * record_bytes % 2**31 // record_bytes]
    for host_row in (*near, near[0] + 1, near[1] + 1):  # where a wrapped address would point
        host[host_row] = 0xEE
    host[far], host[far + 1] = 11, 22
    table = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
    table[row] = ints([far // 2, 0]).to(device)
    for rung in ("one_thread", "one_block", "fused"):
        for blocks in (1, 2) if rung == "fused" else (None,):
            resolver = Resolver(
                max_requests=1,
                top_k=2,
                device_buffer_size=num_slots,
                record_bytes=record_bytes,
                req_to_host_pool=table,
                page_size=2,
                rung=rung,
                swap_in_block_size=32,
                blocks_per_request=blocks,
            )
            tokens = torch.full((num_rows, num_slots), -1, dtype=torch.int32, device=device)
            order = torch.arange(num_slots, dtype=torch.int16, device=device)
            records[row] = 0xFF
            slots = resolver.resolve(
                ints([[1, 0]]).to(device),
                ints([9]).to(device),
                ints([row], torch.int64).to(device),
                ints([1]).to(device),
                device_buffer_tokens=tokens,
                lru_slots=order.repeat(num_rows, 1),
                host_records=host,
                records=records,
                counters=torch.zeros(3, dtype=torch.int64, device=device),
            )
            assert slots.tolist() == [[0, 1]], rung
            assert records[row, :, 0].tolist() == [22, 11, 0xFF, 0xFF], rung
            assert (records[row] == records[row, :, :1]).all(), rung


@every_version
def test_layers_of_different_sizes_in_tables_wider_than_both(device, version):
    """One resolver for all of a cache's layers; beyond a layer's B, tables are not even read."""
    sizes = [5, 12, 9]
    rig = KernelRig(
        device, top_k=4, num_slots=sizes, device_buffer_size=14, width=15, **VERSIONS[version]
    )
    for layer in (1, 0, 2, 1):
        for seq_len in (sizes[layer], sizes[layer] + 1, 40):
            for row in (0, 2):
                rig.random_state(row, seq_len, layer)
            beyond = [min(position, seq_len - 2) for position in (13, 14, 0)]
            positions = [[*beyond, seq_len - 1], [0, seq_len // 2, 1, -1]]
            rig.resolve([2, 0], [seq_len, seq_len], positions, layer=layer)


# -- any state, any selection, any order of threads -------------------------------------------


@st.composite
def cases(draw, rung: str):
    """A rig's sizes and switches, and for each of its calls who asks for what."""
    num_slots = draw(st.one_of(st.integers(1, 12), st.sampled_from([31, 32, 33, 40])))
    top_k = draw(st.one_of(st.just(num_slots), st.integers(1, num_slots)))
    num_real, padding = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    num_layers = draw(st.integers(1, 2))
    sizes = {
        "rung": rung,
        "top_k": top_k,
        "num_slots": [draw(st.integers(top_k, num_slots)) for _ in range(num_layers)],
        "device_buffer_size": num_slots + draw(st.sampled_from([0, 0, 1, 30])),
        "width": num_slots + draw(st.integers(0, 2)),
        "record_bytes": draw(st.sampled_from([4, 8, 12, 16, 20, 32, 36, 128, 656])),
        "record_offset": draw(st.sampled_from([0, 0, 4, 8])),
        "host_offset": draw(st.sampled_from([0, 0, 12])),
        "num_rows": num_real + draw(st.integers(0, 2)),
        "max_requests": num_real + padding + draw(st.integers(0, 1)),
        "page_size": draw(st.sampled_from([1, 2, 3, 5, 7, 8])),
        "max_len": 3 * num_slots + 6,
        "swap_in_block_size": draw(st.sampled_from([32, 32, 32, 64, 96])),
        "seed": draw(st.integers(0, 99)),
    }
    if rung == "fused":
        sizes["blocks_per_request"] = draw(st.sampled_from([1, 2, 3, 4, 5, None]))
        for switch in ("skip_io", "record_plan", "checked"):
            sizes[switch] = draw(st.booleans())
    all_rows = list(draw(st.permutations(range(sizes["num_rows"]))))
    rows, calls = all_rows[:num_real], []
    lens = [draw(st.integers(1, 3 * num_slots + 2)) for _ in rows]
    for step in range(draw(st.integers(1, 3))):
        layer = draw(st.integers(0, num_layers - 1))
        positions = []
        for seq_len in lens:
            one = st.one_of(
                st.integers(0, seq_len - 1),
                st.integers(0, min(2 * num_slots, seq_len - 1)),
                st.sampled_from([-1, seq_len - 1, 0]),
            )
            if draw(st.integers(0, 9)) == 0:
                one = st.one_of(one, st.integers(-3, seq_len + 3), st.just(GARBAGE))
            positions.append(draw(st.lists(one, min_size=top_k, max_size=top_k)))
        garbage = st.sampled_from([-1, 0, -7, GARBAGE])
        for _ in range(padding):
            positions.append(draw(st.lists(garbage, min_size=top_k, max_size=top_k)))
        padded_rows = [draw(st.sampled_from(all_rows)) for _ in range(padding)]
        padded_lens = [draw(st.sampled_from([0, 1, 3 * num_slots])) for _ in range(padding)]
        calls.append((layer, rows + padded_rows, lens + padded_lens, positions))
        lens = [seq_len + step % 2 for seq_len in lens]
    order = draw(st.sampled_from([None, *range(12)])), draw(st.sampled_from([None, 1, 2]))
    return sizes, num_real, calls, order


def replay(device: torch.device, drawn: tuple) -> None:
    sizes, num_real, calls, order = drawn
    rig = KernelRig(device, **sizes)
    _, rows, lens, _ = calls[0]
    for layer in range(len(rig.layers)):
        for row, seq_len in zip(rows[:num_real], lens, strict=False):
            rig.random_state(row, seq_len, layer)
    with schedule(*order):
        for layer, rows, lens, positions in calls:
            rig.resolve(rows, lens, positions, num_real=num_real, layer=layer)


def property_test(max_examples: int):
    return settings(derandomize=True, deadline=None, database=None, max_examples=max_examples)


ON_GPU = torch.cuda.is_available()  # there, nearly every example compiles a kernel of its own


@property_test(60)
@given(drawn=cases("one_thread"))
def test_one_thread_equals_the_oracle(device, drawn):
    replay(device, drawn)


@property_test(120)
@given(drawn=cases("one_block"))
def test_one_block_equals_the_oracle(device, drawn):
    replay(device, drawn)


@property_test(40 if ON_GPU else 220)
@given(drawn=cases("fused"))
def test_fused_equals_the_oracle(device, drawn):
    replay(device, drawn)


@pytest.mark.parametrize(
    "seed, blocks, resident_blocks",
    [(seed, 1, None) for seed in range(12)]
    + [(seed, 3, resident) for seed in range(12) for resident in (None, 1, 2)],
)
def test_any_order_of_threads_and_blocks(seed, blocks, resident_blocks):
    """Always simulated. A race, or a block that waits for one that has not started, shows here.

    Two warps, one or three blocks per request, two requests and a padded row; hits, misses,
    repeated ones, empty slots, and a resident request.
    """
    rig = KernelRig(
        CPU,
        top_k=40,
        num_slots=48,
        num_rows=3,
        max_len=200,
        swap_in_block_size=64,
        blocks_per_request=blocks,
        record_plan=seed % 3 == 0,
        seed=seed,
    )
    positions = random.Random(seed).sample(range(150), 40)
    positions[5], positions[39], positions[17] = positions[33], positions[2], 199
    with schedule(seed, resident_blocks):
        rig.random_state(0, 200)
        rig.resolve([0, 2, 1], [200, 45, 9], [positions, [*range(40)], [1] * 40], num_real=2)
        rig.resolve([2], [48], [[*range(47, 7, -1)]])
        rig.resolve([0], [200], [positions[::-1]])


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_threads_in_one_block(seed):
    rig = KernelRig(
        CPU, rung="one_block", top_k=40, num_slots=48, max_len=200, swap_in_block_size=64, seed=seed
    )
    positions = random.Random(seed).sample(range(150), 40)
    positions[5], positions[39], positions[17] = positions[33], positions[2], 199
    with schedule(seed):
        rig.random_state(0, 200)
        rig.resolve([0, 2, 1], [200, 45, 9], [positions, [*range(40)], [1] * 40], num_real=2)
        rig.resolve([0], [200], [positions[::-1]])


def test_vector_14_random_walk():
    """300 steps, simulated, in a random order of threads and blocks."""
    rig = KernelRig(
        CPU,
        top_k=6,
        num_slots=10,
        num_rows=4,
        max_len=40,
        record_bytes=20,
        seed=3,
        page_size=3,
        blocks_per_request=2,
    )
    with schedule(seed=1, resident_blocks=3):
        seen = random_walk(rig, 300)
    assert min(seen.values()) > 20, seen
    assert (rig.layers[0].counters.actual > 100).all(), "hits, misses and evictions"


# -- switches ---------------------------------------------------------------------------------


def test_skip_io_decides_the_same_and_fetches_nothing(device):
    rigs = [
        KernelRig(device, top_k=5, num_slots=9, skip_io=skip_io, seed=4)
        for skip_io in (False, True)
    ]
    for rig in rigs:
        before = rig.layers[0].records.actual.clone()
        rig.random_state(1, 50)
        before[1] = rig.layers[0].records.actual[1]
        rig.resolve([1], [50], [[3, 49, 17, 8, 30]])
        changed = not torch.equal(rig.layers[0].records.actual, before)
        assert changed == (not rig.skip_io)
    with_io, without = rigs
    assert with_io.state(1) == without.state(1)
    assert torch.equal(with_io.answer.actual, without.answer.actual)
    assert torch.equal(with_io.layers[0].counters.actual, without.layers[0].counters.actual)


@pytest.mark.parametrize("skip_io", [False, True])
@pytest.mark.parametrize("blocks", [1, 3])
def test_record_plan(device, skip_io, blocks):
    """Host rows and slots in miss order, of a real, a resident and a padded request."""
    rig = KernelRig(
        device, num_slots=4, record_plan=True, skip_io=skip_io, blocks_per_request=blocks
    )
    rig.set_state(2, [0, 1, 2, 3], [2, 0, 1, 3])
    rig.resolve([2, 1, 0], [50, 3, 9], [[9, 2, 7], [1, 0, 2], [5, 6, 7]], num_real=2)
    plan = rig.resolver.miss_plan
    assert plan.counts.tolist() == [2, 0, 0]
    assert plan.host_rows[0, :2].tolist() == [rig.host_row(2, 9), rig.host_row(2, 7)]
    assert plan.slots[0].tolist() == [0, 1, GARBAGE]
    assert plan.slots[1:].eq(GARBAGE).all() and plan.host_rows[1:].eq(GARBAGE).all()


@pytest.mark.parametrize("blocks", [1, 3])
def test_checked_names_the_first_bad_entry_and_changes_nobody(device, blocks):
    """The first one in row-major order. The next call works again."""
    rig = KernelRig(device, num_slots=4, num_rows=4, checked=True, blocks_per_request=blocks)
    for row in range(4):
        rig.set_state(row, [0, 1, 2, 3])
    rows, lens = [0, 1, 2, 3], [50, 50, 4, 50]
    positions = [[0, 7, 8], [9, 60, 50], [-2, 4, 5], [5, 49, -1]]
    before = [rig.state(row) for row in rows]
    assert rig.resolve(rows, lens, positions) == [[-1] * 3] * 4  # and the rig sees the error
    assert [rig.state(row) for row in rows] == before
    assert rig.resolve(rows[2:], lens[2:], positions[2:]) == [[-1] * 3] * 2
    with pytest.raises(ValueError, match=r"^row 0: position 50 is out of range: seq_len is 50$"):
        inputs = ints([[1, 1, 50]]), ints([50]), ints([1], torch.int64), ints([1])
        rig.resolver.resolve(*(tensor.to(device) for tensor in inputs), **rig.arguments())
    assert rig.resolve([1, 0], [50, 50], [[9, -1, 49], [0, 7, 8]]) == [[0, -1, 4], [0, 1, 2]]


def test_checked_accepts_padding(device):
    """-1 anywhere, and anything at all in a padded row, of any length."""
    rig = KernelRig(device, num_slots=4, checked=True)
    garbage = [[GARBAGE, -1, INT32_MAX], [-2, -INT32_MAX - 1, 60]]
    rig.resolve([1, 0, 2], [50, 0, 0], [[-1, 4, -1], *garbage], num_real=1)
    rig.resolve([1, 0, 2], [50, 50, 9], [[-1, 4, -1], *garbage], num_real=1)
    rig.resolve([1, 0, 2], [3, 50, 9], [[-1, 2, -1], *garbage], num_real=1)


def test_unchecked_calls_leave_no_error_behind(device):
    rig = KernelRig(device, num_slots=4)
    rig.resolve([1], [50], [[60, -2, 4]])
    assert rig.resolver._error.tolist() == [2**63 - 1]


# -- what is refused before a launch ----------------------------------------------------------

SIZES = {"max_requests": 2, "top_k": 3, "device_buffer_size": 4, "record_bytes": 16, "page_size": 2}


def make_resolver(**changes) -> Resolver:
    table = torch.zeros(2, 8, dtype=torch.int32)
    return Resolver(**{"req_to_host_pool": table} | SIZES | changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"record_bytes": 18}, "records of 18 bytes: must be a multiple of 4 bytes"),
        ({"record_bytes": 0}, "records of 0 bytes: must be a multiple of 4 bytes"),
        ({"top_k": 5}, "top_k=5, device_buffer_size=4: must be 1 <= top_k <= device_buffer_size"),
        ({"top_k": 0}, "top_k=0, device_buffer_size=4: must be 1 <= top_k"),
        ({"device_buffer_size": 32_768}, "device_buffer_size=32768: must be .*lru_slots is int16"),
        ({"swap_in_block_size": 0}, r"swap_in_block_size=0: must be a multiple of 32 in 32..1024"),
        ({"swap_in_block_size": 33}, "swap_in_block_size=33: must be a multiple of 32"),
        ({"swap_in_block_size": 2048}, "swap_in_block_size=2048: must be a multiple of 32"),
        (
            {"top_k": 2049, "device_buffer_size": 4096, "swap_in_block_size": 32},
            "swap_in_block_size=32: a thread can have 64 positions, so top_k=2049 needs more th",
        ),
        ({"swap_in_block_size": -32}, "swap_in_block_size=-32: must be a multiple of 32"),
        ({"blocks_per_request": 0}, "blocks_per_request=0: must be in 1..1024"),
        ({"blocks_per_request": 1025}, "blocks_per_request=1025: must be in 1..1024"),
        ({"page_size": 0}, "page_size=0 is less than 1"),
        ({"rung": "warp"}, "rung 'warp' is not one of: one_thread, one_block, fused"),
        (
            {"rung": "one_block", "skip_io": True},
            "rung 'one_block' has no skip_io, .*; use 'fused'",
        ),
        ({"rung": "one_thread", "record_plan": True}, "rung 'one_thread' has no skip_io"),
        ({"rung": "one_block", "checked": True}, "rung 'one_block' has no skip_io"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_sizes_and_switches_that_no_kernel_has(changes, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make_resolver(**changes)


def arguments(**changes) -> dict:
    """Of a call that works: two requests."""
    right = {
        "positions": ints([[9, 1, -1], [8, 49, 0]]),
        "seq_lens": ints([12, 50]),
        "req_pool_indices": ints([1, 0], torch.int64),
        "num_real_reqs": ints([2]),
        "device_buffer_tokens": torch.full((2, 5), -1, dtype=torch.int32),
        "lru_slots": torch.arange(5, dtype=torch.int16).repeat(2, 1),
        "host_records": torch.zeros(64, 4),
        "records": torch.zeros(2, 5, 4),
        "counters": torch.zeros(3, dtype=torch.int64),
    }
    return right | changes


@pytest.mark.parametrize("rung", ["one_thread", "one_block", "fused"])
@pytest.mark.parametrize(
    "changes, error, message",
    [
        (
            {"positions": torch.zeros(3, 3).int()},
            ValueError,
            "positions has 3 rows, more than max_requests=2",
        ),
        ({"positions": torch.zeros(2, 4).int()}, ValueError, r"positions is \(2, 4\), expected"),
        ({"positions": ints([1, 2])}, ValueError, r"positions is \(2,\), expected \(2, 3\)"),
        ({"positions": torch.zeros(2, 3).long()}, TypeError, r"positions must be .*int32 .*int64"),
        ({"positions": torch.zeros(3, 2).int().T}, ValueError, r"positions must be contiguous"),
        ({"seq_lens": ints([5])}, ValueError, r"seq_lens is \(1,\), expected \(2,\)"),
        ({"seq_lens": ints([5, 5], torch.int64)}, TypeError, "seq_lens must be torch.int32"),
        ({"req_pool_indices": ints([0, 1])}, TypeError, "req_pool_indices must be torch.int64"),
        ({"num_real_reqs": ints(2)}, ValueError, r"num_real_reqs is \(\), expected \(1,\)"),
        (
            {"device_buffer_tokens": torch.zeros(2, 3).int()},
            ValueError,
            r"device_buffer_tokens is \(2, 3\), expected \(2, 4\)",
        ),
        (
            {"device_buffer_tokens": torch.zeros(3, 5).int()},
            ValueError,
            r"device_buffer_tokens is \(3, 5\), expected \(2, 5\)",
        ),
        ({"lru_slots": torch.zeros(2, 4).short()}, ValueError, r"lru_slots is \(2, 4\), expected"),
        ({"lru_slots": torch.zeros(2, 5).int()}, TypeError, "lru_slots must be torch.int16"),
        ({"counters": torch.zeros(2).long()}, ValueError, r"counters is \(2,\), expected \(3,\)"),
        ({"records": torch.zeros(2, 4, 4)}, ValueError, r"records is \(2, 4, 4\), expected"),
        (
            {"records": torch.zeros(2, 5, 3), "host_records": torch.zeros(64, 3)},
            ValueError,
            "records: 12 bytes per record, expected 16",
        ),
        ({"records": torch.zeros(2, 5, 8)[:, :, ::2]}, ValueError, "records must be contiguous"),
        ({"records": torch.zeros(2, 5, 3)}, ValueError, "^records: 12 bytes per record, expected"),
        ({"host_records": torch.zeros(64, 2)}, ValueError, "^host_records: 8 bytes per record"),
        ({"num_real_reqs": 2}, TypeError, "num_real_reqs must be a tensor, got int"),
        (
            {"host_records": torch.zeros(64, 4).half()},
            ValueError,
            "host_records: 8 bytes per record, expected 16",
        ),
        ({"host_records": torch.zeros(128, 4)[::2]}, ValueError, "host_records must be contiguous"),
        ({"num_slots": 2}, ValueError, r"num_slots=2 is not in 3..4, from top_k to device_buffer"),
        ({"num_slots": 5}, ValueError, r"num_slots=5 is not in 3..4"),
        ({"seq_lens": ints([12, 50]).to("meta")}, ValueError, "seq_lens is on meta"),
        ({"records": torch.zeros(2, 5, 4).to("meta")}, ValueError, "records is on meta"),
        (
            {"host_records": torch.zeros(64, 4).to("meta")},
            ValueError,
            "host_records must be in host memory, got device meta",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit(rung, changes, error, message):
    """Nothing is changed; in `records`, only bytes per record count, whatever the dtype."""
    resolver = make_resolver(rung=rung)
    given = arguments(**changes)
    copies = {name: tensor.clone() for name, tensor in arguments().items()}
    if rung != "fused" and "counters" in changes and error is TypeError:
        pytest.skip("only the fused rung counts")
    with pytest.raises(error, match=message):
        resolver.resolve(**given)
    for name, tensor in copies.items():
        if name not in changes:
            assert torch.equal(given[name], tensor), name
    assert resolver.resolve(**arguments()).tolist() == [[0, 1, -1], [0, 4, 1]]


@pytest.mark.parametrize("rung", ["one_thread", "one_block", "fused"])
def test_records_at_an_odd_address_are_refused(rung):
    """A GPU cannot read 4 bytes from an address that is no multiple of 4: it stops for good."""
    shifted = torch.zeros(2 * 5 * 16 + 1, dtype=torch.uint8)[1:].view(2, 5, 16)
    given = arguments(host_records=torch.zeros(64, 16, dtype=torch.uint8), records=shifted)
    with pytest.raises(ValueError, match="records"):
        make_resolver(rung=rung).resolve(**given)
    shifted = torch.zeros(64 * 16 + 1, dtype=torch.uint8)[1:].view(64, 16)
    given = arguments(host_records=shifted, records=torch.zeros(2, 5, 16, dtype=torch.uint8))
    with pytest.raises(ValueError, match="host_records"):
        make_resolver(rung=rung).resolve(**given)


def test_the_fused_rung_counts_and_the_others_do_not():
    for rung in ("one_thread", "one_block", "fused"):
        given = arguments(counters=ints([100, 200, 300], torch.int64))
        make_resolver(rung=rung).resolve(**given)
        expected = [101, 204, 300] if rung == "fused" else [100, 200, 300]
        assert given["counters"].tolist() == expected


def test_the_answer_is_one_buffer_and_a_call_of_no_requests_answers_nothing():
    resolver = make_resolver()
    first = resolver.resolve(**arguments())
    none = arguments(
        positions=torch.zeros(0, 3).int(),
        seq_lens=torch.zeros(0).int(),
        req_pool_indices=torch.zeros(0).long(),
        num_real_reqs=ints([0]),
    )
    assert resolver.resolve(**none).shape == (0, 3)
    second = resolver.resolve(**arguments())
    assert first.data_ptr() == second.data_ptr() == resolver.top_k_device_locs.data_ptr()


@pytest.mark.parametrize("num_requests, blocks", [(1, 8), (2, 4), (3, 1), (9, 1)])
def test_few_requests_get_more_blocks_each(monkeypatch, num_requests, blocks):
    """By default; what is asked for is taken, and without a copy one block is enough."""
    grids = []

    def launch(kernel, grid, block, *args, **options):
        grids.append((grid, block))

    monkeypatch.setattr("minihisparse.kernels.device.Kernel.launch", launch)
    table = torch.zeros(9, 8, dtype=torch.int32)
    given = arguments(
        positions=torch.zeros(num_requests, 3).int(),
        seq_lens=torch.zeros(num_requests).int(),
        req_pool_indices=torch.zeros(num_requests).long(),
        device_buffer_tokens=torch.zeros(9, 4).int(),
        lru_slots=torch.zeros(9, 4).short(),
        records=torch.zeros(9, 5, 4),
    )
    for options in ({}, {"blocks_per_request": 3}, {"skip_io": True}):
        make_resolver(req_to_host_pool=table, max_requests=9, **options).resolve(**given)
    assert grids == [(num_requests * each, 32) for each in (blocks, 3, 1)]


def test_the_default_block_size_is_one_thread_per_slot():
    for size, threads in ((4, 32), (33, 64), (512, 512), (1000, 1024), (4096, 1024)):
        assert make_resolver(device_buffer_size=size).num_threads == threads


def test_a_batch_may_have_more_rows_than_there_are_request_rows(device):
    """Of which all but one are padding; and fewer, of course."""
    rig = KernelRig(device, num_rows=1, max_requests=5)
    assert rig.resolve([0] * 5, [50] * 5, [[7, 49, 3]] * 5, num_real=1)[0] == [0, 4, 1]
    rig = KernelRig(device, num_rows=5, max_requests=1)
    assert rig.resolve([4], [50], [[7, 49, 3]]) == [[0, 4, 1]]
    with pytest.raises(ValueError, match="positions has 2 rows, more than max_requests=1"):
        rig.resolver.resolve(
            torch.zeros(2, 3).int(),
            torch.zeros(2).int(),
            torch.zeros(2).long(),
            ints([2]),
            **rig.arguments(),
        )


def test_kernels_say_what_they_are_handed():
    """Wrong numbers of arguments to a launch; nothing runs. test_device.py has the rest."""
    fused = fused_kernel(
        num_threads=32, top_k=3, num_slots=4, record_bytes_are_16s=True, several_blocks=False
    )
    for kernel in (resolve_one_thread, resolve_one_block, fused.kernel):
        takes = rf"^{kernel.name} takes {len(kernel.parameters)} arguments, got "
        for count in (1, len(kernel.parameters) - 1, len(kernel.parameters) + 1):
            with pytest.raises(TypeError, match=f"{takes}{count}$"):
                kernel.launch(1, 32, *[ints([[1]])] * count)


@pytest.mark.parametrize("rung", ["one_thread", "one_block", "fused"])
def test_loading_before_the_first_call(device, rung):
    """Simulated, there is nothing to load; on a GPU, a graph can then be captured at once."""
    rig = KernelRig(device, rung=rung)
    rig.resolver.load()
    rig.random_state(1, 50)
    rig.resolve([1], [50], [[3, 49, 17]])
