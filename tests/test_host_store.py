"""Guards: a page that is lost, or freed while somebody uses it, a refusal that leaves something
behind, a pool that is allocated before anyone asks whether it fits, and records that come back with
other bits.
"""

import random
from types import SimpleNamespace

import pytest
import torch
from rig import assert_same_bits

from minihisparse import host_store
from minihisparse.host_store import HostPool, check_host_memory, free_host_bytes
from minihisparse.prefix import Prefix

CPU = torch.device("cpu")


def make_pool(**changes) -> HostPool:
    """Three layers, six pages of four rows, three requests of at most four pages each."""
    options = {
        "num_layers": 3,
        "record_width": 5,
        "num_pages": 6,
        "page_size": 4,
        "max_requests": 3,
        "max_pages_per_request": 4,
        "dtype": torch.float32,
        "device": CPU,
    }
    return HostPool(**options | changes)


def snapshot(pool: HostPool) -> tuple:
    pages = {request: list(owned) for request, owned in pool._pages.items()}
    counts = list(pool._num_users), dict(pool._num_shared), pool.num_shared_pages
    return list(pool._free), pages, counts, pool.req_to_host_pool.tolist()


def host_rows(pool: HostPool, request: int, positions: list[int]) -> torch.Tensor:
    return pool.host_rows_of(torch.tensor([request]), torch.tensor([positions]))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_pages", [1, 6, 257])
def test_records_start_at_a_page(dtype, num_pages):
    """A bus line of 128 bytes must not hold the end of one record and the start of the next."""
    pool = make_pool(dtype=dtype, num_pages=num_pages)
    assert pool.records.data_ptr() % 4096 == 0
    assert pool.records.shape == (3, num_pages * 4, 5) and pool.records.is_contiguous()
    assert pool.records.dtype == dtype


# -- who owns which page ----------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens, num_pages", [(0, 0), (1, 1), (4, 1), (5, 2), (16, 4)])
def test_allocation_takes_whole_pages(num_tokens, num_pages):
    pool = make_pool()
    pool.allocate(1, num_tokens)
    assert pool.num_free_tokens == (6 - num_pages) * 4
    assert pool.bytes_used == num_pages * 4 * 3 * 5 * 4  # rows, layers, W, bytes of float32
    pages = pool.req_to_host_pool[1].tolist()
    assert len(set(pages[:num_pages])) == num_pages and min(pages[:num_pages], default=0) >= 0
    assert pages[num_pages:] == [-1] * (4 - num_pages)
    assert pool.req_to_host_pool[[0, 2]].eq(-1).all()
    pool.check_integrity()


def test_release_gives_everything_back():
    pool = make_pool()
    pool.allocate(0, 9)
    pool.allocate(2, 12)
    pool.release(0)
    assert pool.num_free_tokens == 12 and pool.req_to_host_pool[0].eq(-1).all()
    assert (pool.req_to_host_pool[2] >= 0).sum() == 3
    pool.check_integrity()
    pool.release(2)
    assert pool.num_free_tokens == 24 and pool.bytes_used == 0
    pool.check_integrity()


@pytest.mark.parametrize("never", [0, 1])
def test_release_of_what_is_not_owned(never):
    """Twice, or never allocated: an error, and the pages of the others stay where they are."""
    pool = make_pool()
    pool.allocate(0, 4)
    pool.release(0)
    pool.allocate(2, 8)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=f"request row {never} owns no host pages"):
        pool.release(never)
    assert snapshot(pool) == before


@pytest.mark.parametrize(
    "request_row, num_tokens, message",
    [
        (0, 1, "request row 0 owns host pages already; release it first"),
        (1, 13, "12 tokens free of 24, 13 are needed; raise --host-to-device-ratio"),
        (1, 17, "12 tokens free of 24, 17 are needed"),
    ],
)
def test_a_refusal_changes_nothing(request_row, num_tokens, message):
    pool = make_pool()
    pool.allocate(0, 12)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=message):
        pool.allocate(request_row, num_tokens)
    assert snapshot(pool) == before
    pool.check_integrity()
    pool.allocate(1, 12)  # what is really free can still be had


def test_a_request_longer_than_its_table_is_refused():
    pool = make_pool()
    before = snapshot(pool)
    with pytest.raises(ValueError, match="17 tokens are more than a request may have, 16"):
        pool.allocate(1, 17)
    assert snapshot(pool) == before


def test_random_walk_of_requests():
    """Pages are never lost: after any history, the counts are those of the requests alive."""
    pool, rng, alive = make_pool(num_pages=9, max_requests=4), random.Random(0), {}
    for _ in range(2000):
        request = rng.randrange(4)
        num_tokens = rng.randrange(20)
        num_pages = -(-num_tokens // 4)
        fits = num_pages <= 4 and num_pages <= 9 - sum(alive.values())
        if request in alive:
            pool.release(request)
            del alive[request]
        elif fits:
            pool.allocate(request, num_tokens)
            alive[request] = num_pages
        else:
            with pytest.raises(ValueError):
                pool.allocate(request, num_tokens)
        assert pool.num_free_tokens == 4 * (9 - sum(alive.values()))
        pool.check_integrity()


# -- pages with several users -----------------------------------------------------------------


def own_records(pool: HostPool, request: int, num_tokens: int) -> torch.Tensor:
    """[L, T, W]: the records of a request's first tokens."""
    records = torch.empty(len(pool.records), num_tokens, pool.records.shape[2])
    for layer in range(len(records)):
        pool.read_first(layer, request, records[layer])
    return records


@pytest.mark.parametrize("length", [0, 3, 4, 7, 8, 9])
def test_a_common_prefix(length):
    """Whole pages are the same, a part of one is a copy, the rest is the request's own."""
    pool = make_pool(num_pages=8)
    pool.records.copy_(torch.randn_like(pool.records))
    pool.allocate(0, 11)
    before = pool.records.clone()
    pool.allocate(2, 15, Prefix(0, length))
    pages = pool.req_to_host_pool[[0, 2]].tolist()
    shared = length // 4
    assert pages[0][:shared] == pages[1][:shared]
    assert not set(pages[0][shared:3]) & set(pages[1][shared:])
    assert pool.num_free_tokens == (8 - 3 - 4 + shared) * 4
    assert pool.num_shared_pages == shared and pool.num_shared_tokens_of(2) == shared * 4
    assert pool.num_shared_tokens_of(0) == pool.num_shared_tokens_of(1) == 0
    assert pool.peak_pages == 7 - shared and pool.bytes_used == pool.page_bytes * (7 - shared)
    assert pool.peak_saved_pages == shared
    assert_same_bits(own_records(pool, 2, length), own_records(pool, 0, length))
    changed = (pool.records != before).any(dim=(0, 2)).nonzero()[:, 0].tolist()
    assert changed == [pages[1][shared] * 4 + i for i in range(length % 4)]
    pool.check_integrity()


@pytest.mark.parametrize("first, second", [(0, 2), (2, 0)])
def test_the_last_user_frees_a_page(first, second):
    pool = make_pool()
    pool.allocate(0, 8)
    pool.allocate(2, 12, Prefix(0, 8))
    assert pool.num_free_tokens == 12
    pool.release(first)
    assert pool.num_free_tokens == (12 if first == 0 else 16)
    assert (pool.req_to_host_pool[second] >= 0).sum() == (3 if second == 2 else 2)
    pool.check_integrity()
    pool.allocate(first, 12)
    pool.check_integrity()
    assert not set(pool._pages[first]) & set(pool._pages[second])
    pool.release(second)
    pool.release(first)
    assert pool.num_free_tokens == 24 and pool.peak_pages == 6 - (first == 2)
    assert pool.peak_saved_pages == 2
    pool.reset_counters()
    assert pool.peak_pages == pool.peak_saved_pages == pool.num_shared_pages == 0
    pool.check_integrity()


@pytest.mark.parametrize(
    "num_tokens, prefix, message",
    [
        (8, Prefix(0, 9), "9 tokens cannot be shared: request row 0 has room for 12, the new one"),
        (16, Prefix(0, 13), "13 tokens cannot be shared: request row 0 has room for 12"),
        (8, Prefix(1, 4), "4 tokens cannot be shared: request row 1 has room for 0"),
        (8, Prefix(2, 4), "4 tokens cannot be shared: request row 2 has room for 0"),
        (20, Prefix(0, 12), "20 tokens are more than a request may have, 16"),
    ],
)
def test_a_prefix_that_cannot_be(num_tokens, prefix, message):
    pool = make_pool()
    pool.allocate(0, 11)
    before = snapshot(pool)
    with pytest.raises(ValueError, match=message):
        pool.allocate(1, num_tokens, prefix)
    assert snapshot(pool) == before


def test_a_copy_that_breaks_off_changes_nothing(monkeypatch):
    pool = make_pool()
    pool.allocate(0, 11)
    before = snapshot(pool)

    def interrupt(*args) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "_copy_rows", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(1, 12, Prefix(0, 10))
    assert snapshot(pool) == before
    pool.allocate(1, 12, Prefix(0, 8))  # nothing to copy
    pool.check_integrity()


def test_a_refusal_tells_what_is_not_shared():
    pool = make_pool(num_pages=4)
    pool.allocate(0, 12)
    before = snapshot(pool)
    with pytest.raises(ValueError, match="4 tokens free of 16, 8 are needed"):
        pool.allocate(1, 16, Prefix(0, 8))
    assert snapshot(pool) == before
    pool.allocate(1, 16, Prefix(0, 12))
    pool.check_integrity()


def test_storm_of_common_prefixes():
    """Each request writes its own positions, once; nobody ever finds another's record there, and
    when all have left every page is free.
    """
    pool, rng, stamp = make_pool(num_pages=9, max_requests=5, record_width=1), random.Random(0), 0
    pool.records.fill_(torch.nan)
    written: dict[int, torch.Tensor] = {}  # [L, T, 1] of each request
    num_refused = num_sharing = 0
    for _ in range(2000):
        request = rng.randrange(5)
        if request in written:
            pool.release(request)
            del written[request]
        else:
            num_tokens, prefix = rng.randint(1, 16), None
            if written and rng.random() < 0.7:
                row = rng.choice(sorted(written))
                prefix = Prefix(row, rng.randint(0, min(num_tokens, written[row].shape[1])))
            start = prefix.num_tokens if prefix else 0
            own = -(-num_tokens // 4) - start // 4
            if own * 4 > pool.num_free_tokens:
                with pytest.raises(ValueError, match="are needed"):
                    pool.allocate(request, num_tokens, prefix)
                num_refused += 1
            else:
                pool.allocate(request, num_tokens, prefix)
                num_sharing += start >= 4
                stamp += 1
                new = torch.full((3, num_tokens - start, 1), float(stamp))
                rows = host_rows(pool, request, list(range(start, num_tokens)))
                for layer in range(3):
                    pool.write(layer, rows, new[layer])
                old = written[prefix.row][:, :start] if prefix else new[:, :0]
                written[request] = torch.cat([old, new], dim=1)
        pool.check_integrity()
        for row, records in written.items():
            assert_same_bits(own_records(pool, row, records.shape[1]), records, f"row {row}")
    assert min(num_refused, num_sharing) > 100
    for request in written:
        pool.release(request)
    assert sorted(pool._free) == list(range(9)) and not any(pool._num_users)


def test_the_first_records_in_few_copies(monkeypatch):
    """Pages that lie side by side are one copy; the last page may be read in part."""
    pool = make_pool(num_pages=8)
    pool.records.copy_(torch.randn_like(pool.records))
    pool._free.extend([pool._free.popleft() for _ in range(2)])  # 2..7, 0, 1
    pool.allocate(1, 4)
    pool.allocate(0, 8)
    pool.release(1)
    pool._free.rotate(1)
    pool.allocate(1, 16)
    assert pool._pages[1] == [2, 5, 6, 7]
    rows, sizes = host_rows(pool, 1, list(range(16))), []
    right = torch.Tensor.copy_

    def copy_(target, source, **options):
        sizes.append(len(source))
        return right(target, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", copy_)
    for length in (1, 4, 5, 15, 16):
        records = torch.full((length, 5), torch.nan)
        pool.read_first(2, 1, records)
        assert_same_bits(records, pool.records[2, rows[:length]])
    assert sizes == [1, 4, 4, 1, 4, 11, 4, 12]


# -- where a position's record is -------------------------------------------------------------


def test_rows_of_follows_the_table():
    """By the definition, with pages that are in no order, and several requests at once."""
    pool = make_pool()
    random.Random(1).shuffle(pool._free)
    pool.allocate(2, 16)
    pool.allocate(0, 7)
    table = pool.req_to_host_pool.tolist()
    assert table[2] != sorted(table[2])
    positions = [[15, 0, 4, 7], [6, 6, 3, 1]]
    rows = pool.host_rows_of(torch.tensor([[2], [0]]), torch.tensor(positions, dtype=torch.int32))
    assert rows.dtype == torch.int64
    assert rows.tolist() == [
        [table[request][p // 4] * 4 + p % 4 for p in line]
        for request, line in zip([2, 0], positions, strict=True)
    ]


def test_no_two_positions_share_a_row():
    pool = make_pool(page_size=3, num_pages=12)
    for request in range(3):
        pool.allocate(request, 12)
    rows = pool.host_rows_of(torch.arange(3)[:, None], torch.arange(12).repeat(3, 1))
    assert sorted(rows.flatten().tolist()) == list(range(36))


def test_read_returns_what_was_written():
    """In any order, with repeats, layer by layer; no other row or layer is touched."""
    pool = make_pool()
    pool.records.fill_(torch.nan)
    pool.allocate(1, 10)
    rows = host_rows(pool, 1, [9, 0, 5])
    records = torch.arange(15.0).view(3, 5)
    pool.write(1, rows, records)
    assert_same_bits(pool.read(1, rows), records)
    assert_same_bits(pool.read(1, rows[[2, 2, 0]]), records[[2, 2, 0]])
    written = torch.zeros(3, 24, dtype=torch.bool)
    written[1, rows] = True
    assert torch.equal(~pool.records.isnan().any(-1), written)
    pool.write(1, rows[:0], records[:0])
    assert pool.read(1, rows[:0]).shape == (0, 5)


def test_a_read_is_a_copy():
    """What was fetched must not change when its host row is written again."""
    pool = make_pool()
    pool.allocate(0, 2)
    rows = host_rows(pool, 0, [0, 1])
    pool.write(0, rows, torch.ones(2, 5))
    fetched = pool.read(0, rows)
    pool.write(0, rows, torch.zeros(2, 5))
    assert fetched.eq(1).all()


@pytest.mark.parametrize(
    "dtype, integers",
    [
        (torch.float32, torch.int32),
        (torch.float16, torch.int16),
        (torch.bfloat16, torch.int16),
    ],
    ids=str,
)
def test_every_bit_survives(dtype, integers):
    """All 65,536 patterns of a 16-bit type, and as many of fp32: NaN payloads, signed zeros."""
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    if integers == torch.int32:
        special = torch.tensor([0x7F80_0001, 0x7FC0_1234, 0x7F80_0000, 1], dtype=torch.int32)
        patterns = torch.cat([patterns * 65537, special, special | -(2**31)]).repeat(2)
    records = patterns.to(integers).view(dtype).view(-1, 16)
    assert records.isnan().any()
    num_pages = -(-len(records) // 4)
    pool = make_pool(
        record_width=16, num_pages=num_pages, max_pages_per_request=num_pages, dtype=dtype
    )
    random.Random(2).shuffle(pool._free)
    pool.allocate(1, len(records))
    rows = host_rows(pool, 1, list(range(len(records))))
    pool.write(2, rows, records)
    assert_same_bits(pool.read(2, rows), records)


# -- the integrity check ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "corrupt, message",
    [
        (lambda pool: pool._free.pop(), "lost or owned twice"),
        (lambda pool: pool._free.append(pool._free[0]), "lost or owned twice"),
        (lambda pool: pool._free.append(pool._pages[0][0]), "lost or owned twice"),
        (lambda pool: pool._pages[0].append(pool._pages[2][0]), "lost or owned twice"),
        (lambda pool: pool._pages.pop(2), "lost or owned twice"),
        (lambda pool: pool._pages[0].reverse(), r"req_to_host_pool\[0\]"),
        (lambda pool: pool.req_to_host_pool[0].fill_(-1), r"req_to_host_pool\[0\]"),
        (lambda pool: pool.req_to_host_pool[1, 3].fill_(0), r"req_to_host_pool\[1\]"),
        (lambda pool: pool.req_to_host_pool[2, 1].fill_(-1), r"req_to_host_pool\[2\]"),
        (lambda pool: pool._num_users.__setitem__(pool._pages[1][0], 1), "lost or owned twice"),
        (lambda pool: pool._num_users.__setitem__(pool._free[0], 1), "lost or owned twice"),
        (lambda pool: pool._pages[1].append(pool._pages[1][1]), "lost or owned twice"),
        (lambda pool: pool._free.append(pool._pages[1][0]), "lost or owned twice"),
    ],
    ids=range(13),
)
def test_integrity_failures_are_found(corrupt, message):
    pool = make_pool()
    pool.allocate(0, 7)
    pool.allocate(2, 8)
    pool.allocate(1, 6, Prefix(0, 4))
    pool.check_integrity()
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


# -- memory -----------------------------------------------------------------------------------


@pytest.fixture
def no_tensors(monkeypatch):
    """Every allocation of this module's is an error."""

    def refuse(*args, **kwargs):
        raise AssertionError("allocated before the check")

    monkeypatch.setattr(host_store, "torch", SimpleNamespace(empty=refuse, full=refuse))


def test_too_little_memory_is_an_error_before_any_allocation(monkeypatch, no_tensors):
    """2 layers x 2^20 pages x 16 rows x 32 elements x 2 bytes = 2 GiB, of which 1.5 are free."""
    monkeypatch.setattr(host_store, "free_host_bytes", lambda: 3 * 2**29)
    with pytest.raises(MemoryError) as error:
        make_pool(
            num_layers=2, num_pages=2**20, page_size=16, record_width=32, dtype=torch.bfloat16
        )
    message = str(error.value)
    assert "needs 2.00 GiB" in message and "1.50 GiB" in message
    for flag in ("--max-model-len", "--max-running-requests", "--host-to-device-ratio"):
        assert flag in message


def test_memory_that_just_suffices(monkeypatch):
    """Equal is enough; one byte less is not; a platform that does not tell is trusted."""
    need = make_pool().records.nbytes
    for free, fits in [(need, True), (need - 1, False), (None, True), (0, False)]:
        monkeypatch.setattr(host_store, "free_host_bytes", lambda free=free: free)
        if fits:
            assert make_pool().records.nbytes == need
        else:
            with pytest.raises(MemoryError):
                make_pool()
            with pytest.raises(MemoryError):
                check_host_memory(need)


MEMINFO = (
    "MemTotal:       16384 kB\nMemFree:         100 kB\nMemAvailable:   8192 kB\nHugePages: 0\n"
)


CGROUP = {"meminfo": MEMINFO, "memory.max": "5000\n", "memory.current": "3000\n"}


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"meminfo": MEMINFO}, 8192 * 1024),
        (
            {"meminfo": MEMINFO, "memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""},
            8192 * 1024,
        ),
        (CGROUP | {"memory.stat": "anon 2500\n"}, 2000),
        (CGROUP | {"memory.stat": "anon 5\nactive_file 70\ninactive_file 600\n"}, 2600),
        (CGROUP | {"memory.max": f"{2**60}\n", "memory.stat": ""}, 8192 * 1024),
        ({"meminfo": MEMINFO, "memory.max": "5000\n"}, 8192 * 1024),
    ],
    ids=["machine", "no limit", "limit", "file cache", "limit above the machine", "half a cgroup"],
)
def test_free_memory_is_the_machines_or_the_cgroups(monkeypatch, tmp_path, files, expected):
    """Whichever is less, from files as Linux writes them."""
    fake_files(monkeypatch, tmp_path, files)
    assert free_host_bytes() == expected


def test_free_memory_without_proc(monkeypatch, tmp_path):
    """Not Linux: what sysconf says, else None (and then nothing is refused)."""
    for files in ({}, {"meminfo": "MemTotal: 5 kB\n"}):
        fake_files(monkeypatch, tmp_path, files)
        pages = {"SC_AVPHYS_PAGES": 7, "SC_PAGE_SIZE": 4096}
        monkeypatch.setattr(host_store.os, "sysconf", pages.__getitem__, raising=False)
        assert free_host_bytes() == 7 * 4096
        monkeypatch.delattr(host_store.os, "sysconf")
        assert free_host_bytes() is None


def fake_files(monkeypatch, folder, files: dict[str, str]) -> None:
    """Serves /proc/meminfo and /sys/fs/cgroup/* from a folder."""
    for name, text in files.items():
        (folder / name).write_text(text)
    places = {"/proc/meminfo": folder / "meminfo", "/sys/fs/cgroup": folder}
    monkeypatch.setattr(host_store, "Path", places.__getitem__)


def test_free_memory_of_this_machine_is_plausible():
    free = free_host_bytes()
    assert free is None or 0 < free < 2**50
