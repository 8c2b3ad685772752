"""`bench resolve`: tables with exactly so many misses, a check that misses nothing, honest times.

Guards: a miss rate other than the one in the row; selections without real overlap; a wrong kernel
that is timed; times that hold what restoring tables and launching graphs costs, or the first, slow
replays; a limit in the wrong unit; flags that are ignored, and values that end in a traceback after
minutes of measuring.
"""

import argparse
import json
import math
from collections.abc import Callable

import pytest
import torch
from rig import assert_same_bits

from minihisparse import bench_resolve, cli
from minihisparse.bench_resolve import Point, checked, figures, line, make_row
from minihisparse.kernels.resolve_torch import resolve_torch
from minihisparse.kernels.resolver import RUNGS, Resolver
from minihisparse.resolve_case import PAGE_SIZE, UNTOUCHED, Case, make_pool, make_tables

CPU = torch.device("cpu")
SMALL = Point(batch=2, misses=3, record_bytes=16, top_k=8, device_buffer_size=16)


def parse(*argv: str) -> argparse.Namespace:
    return cli.build_parser().parse_args(["bench", "resolve", "--disable-tqdm", *argv])


def make_case(point: Point = SMALL, seed: int = 0) -> Case:
    num_bytes = 40 * PAGE_SIZE * point.record_bytes
    pool = make_pool(point.record_bytes, num_bytes, seed, CPU)
    return Case(point, pool, seed, CPU, num_layers=2)


# ---- tables ----


@pytest.mark.parametrize(
    "top_k, slots, misses",
    [(1, 1, 0), (1, 1, 1), (8, 8, 0), (8, 8, 3), (8, 8, 8)]
    + [(8, 16, 0), (8, 16, 8), (8, 64, 5), (48, 200, 1), (48, 200, 47), (48, 49, 48)],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_exactly_so_many_misses(batch, top_k, slots, misses):
    point = Point(batch, misses, 16, top_k, slots)
    tables = make_tables(point, 3, torch.Generator().manual_seed(5))
    assert [t.dtype for t in tables] == [torch.int32, torch.int32, torch.int16]
    assert [t.shape[2] for t in tables] == [top_k, slots, slots]
    assert point.seq_len > slots  # not the fast path
    seq_lens = torch.full((batch,), point.seq_len, dtype=torch.int32)
    for positions, tokens, lru_slots in zip(*tables, strict=True):
        done = resolve_torch(positions, seq_lens, tokens, lru_slots, checked=True)
        assert done.fetch.sum(1).tolist() == [misses] * batch
        assert (positions.diff(dim=1) > 0).all() and (positions >= 0).all()
        assert (positions < point.seq_len - 1).all()  # the newest would be a hit of no slot
        assert (tokens.sort(dim=1).values.diff(dim=1) > 0).all()  # all full, none twice
        assert (tokens >= 0).all() and (tokens < point.seq_len - 1).all()
        assert torch.equal(
            lru_slots.sort(dim=1).values.long(), torch.arange(slots).expand_as(tokens)
        )


def test_tables_are_random_and_repeatable():
    point = Point(4, 30, 16, 64, 128)

    def make(seed):
        return make_tables(point, 2, torch.Generator().manual_seed(seed))

    for table, same, other in zip(make(0), make(0), make(1), strict=True):
        assert_same_bits(table, same)
        assert not torch.equal(table, other)
        rows = {tuple(row) for row in table.flatten(0, 1).tolist()}
        assert len(rows) == 2 * 4  # every layer and request its own
        assert not any(row == tuple(range(len(row))) for row in rows)
    tables = make(0)
    hit_slots = torch.isin(tables.device_buffer_tokens[0, 0], tables.positions[0, 0]).nonzero()
    assert 40 < hit_slots.double().mean() < 87  # all over the slots, not the first of them


def test_pool_and_pages():
    case = make_case(Point(3, 1, 20, 8, 50))
    assert case.host_records.shape == (40 * PAGE_SIZE, 20)
    assert case.host_records.unique().tolist() == list(range(256))
    assert case.req_to_host_pool.shape == (3, 13)  # 200 positions
    assert (case.req_to_host_pool >= 0).all() and (case.req_to_host_pool < 40).all()
    assert len({tuple(row) for row in case.req_to_host_pool.tolist()}) == 3


# ---- the check of a call ----


@pytest.mark.parametrize("misses", [0, 3, 8])
@pytest.mark.parametrize("record_bytes", [16, 20], ids="{} bytes".format)
@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_passes(rung, record_bytes, misses):
    case = make_case(SMALL._replace(misses=misses, record_bytes=record_bytes))
    case.check(case.resolver(rung=rung))
    assert not torch.equal(case.lru_slots[0], case.before.lru_slots[0])
    assert_same_bits(case.lru_slots[1], case.before.lru_slots[1])
    case.restore()
    assert_same_bits(case.lru_slots, case.before.lru_slots)
    assert_same_bits(case.device_buffer_tokens, case.before.device_buffer_tokens)


@pytest.mark.parametrize("settings", [{"skip_io": True}, {"blocks_per_request": 3}], ids=str)
def test_variants_of_the_fused_rung_pass(settings):
    case = make_case()
    case.check(case.resolver(**settings))


def slot_of(case: Case, missed: bool) -> tuple[int, int]:
    """The last request, and the first of its slots that was filled, or that was not."""
    filled = case.device_buffer_tokens[0, -1] != case.before.device_buffer_tokens[0, -1]
    return -1, int((filled == missed).nonzero()[0])


def flip(tensor: torch.Tensor, *index: int) -> None:
    tensor[index] = tensor[index] ^ 1


SPOILERS: dict[str, Callable[[Case, torch.Tensor], None]] = {
    "top_k_device_locs": lambda case, slots: flip(slots, -1, -1),
    "device_buffer_tokens": lambda case, slots: flip(case.device_buffer_tokens, 0, -1, -1),
    "lru_slots": lambda case, slots: case.lru_slots[0, -1].copy_(case.lru_slots[0, -1].flip(0)),
    "counters": lambda case, slots: case.counters.add_(1),
    "records of request 0": lambda case, slots: case.records.fill_(UNTOUCHED),  # nothing copied
    "records of request 1": lambda case, slots: flip(case.records, *slot_of(case, True), -1),
}
STRAY = {
    "another slot": lambda case, slots: flip(case.records, *slot_of(case, False), 0),
    "the newest slot": lambda case, slots: flip(case.records, -1, -1, 0),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_what_is_wrong_is_named(monkeypatch, name):
    spoiled(monkeypatch, SPOILERS[name], name)


@pytest.mark.parametrize("skip_io", [False, True])
@pytest.mark.parametrize("where", STRAY)
def test_bytes_written_elsewhere(monkeypatch, where, skip_io):
    spoiled(monkeypatch, STRAY[where], "records of request 1", skip_io=skip_io)


def test_bytes_copied_without_io(monkeypatch):
    spoiled(monkeypatch, SPOILERS["records of request 1"], "records of request 1", skip_io=True)


def spoiled(monkeypatch, spoil, name: str, **settings) -> None:
    case = make_case()
    right = Resolver.resolve

    def wrong(*args, **kwargs):
        slots = right(*args, **kwargs)
        spoil(case, slots)
        return slots

    monkeypatch.setattr(Resolver, "resolve", wrong)
    with pytest.raises(RuntimeError, match=f"'fused', .*: wrong {name} at .*misses=3"):
        case.check(case.resolver(**settings))


def test_a_miss_count_that_is_not_the_points():
    case = make_case()
    case.point = case.point._replace(misses=4)
    with pytest.raises(RuntimeError, match="wrong the misses, counters at"):
        case.check(case.resolver())


# ---- the time of a call ----


class FakeGpu:
    """A clock that calls, copies and launches advance, in microseconds; the first replays are slow.

    A layer that is called again before its tables are restored is an error: it would hit only.
    """

    RESTORE, LAUNCH, COLD = 1000.0, 50.0, 9999.0

    def __init__(self, call_us: float) -> None:
        self.call_us, self.now = call_us, 0.0
        self.capturing: list[int | None] | None = None
        self.restored: set[int] = set()
        self.replayed: list[int] = []  # calls in each replayed graph
        self.before = argparse.Namespace(positions=[None] * 24)

    def do(self, layer: int | None) -> None:
        """Calls a layer, or restores all; or enters that into the graph."""
        if self.capturing is not None:
            self.capturing.append(layer)
        elif layer is None:
            self.now += self.RESTORE
            self.restored = set(range(24))
        else:
            self.now += self.call_us
            self.restored.remove(layer)

    # what time_calls uses of a Case
    def restore(self) -> None:
        self.do(None)

    def call(self, resolver, layer: int) -> None:
        self.do(layer)

    def install(self, monkeypatch) -> None:
        gpu = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                assert gpu.capturing is None
                self.at = gpu.now

            def synchronize(self):
                assert self.at == gpu.now  # all that is measured was waited for

            def elapsed_time(self, other):
                return (other.at - self.at) / 1e3

        class CUDAGraph:
            def replay(self):
                gpu.now += gpu.LAUNCH + gpu.COLD / 10 ** len(gpu.replayed)
                for layer in self.work:
                    gpu.do(layer)
                gpu.replayed.append(len(self.work) - 1)

        class graph:
            def __init__(self, graph):
                self.graph = graph

            def __enter__(self):
                gpu.capturing = self.graph.work = []

            def __exit__(self, *error):
                gpu.capturing = None

        for value in (Event, CUDAGraph, graph):
            monkeypatch.setattr(torch.cuda, value.__name__, value)


@pytest.mark.parametrize(
    "call_us, few, many", [(12.5, 6, 24), (3000.0, 1, 6), (170_000.0, 1, 4), (0.1, 6, 24)]
)
def test_only_calls_are_timed(monkeypatch, call_us, few, many):
    gpu = FakeGpu(call_us)
    gpu.install(monkeypatch)
    times = bench_resolve.time_calls(gpu, None, num_iters=5)
    assert times == pytest.approx([call_us] * 5, abs=0.01)
    assert gpu.replayed[-10:] == [few, many] * 5


def test_link(monkeypatch):
    """Bytes of the pool by the time of a copy: 64 KiB in 4 us are 16.4 GB/s."""
    gpu = FakeGpu(0)
    gpu.install(monkeypatch)
    copies = []

    class Target:
        def copy_(self, records, non_blocking):
            copies.append(non_blocking)
            gpu.now += 99.0 if len(copies) in (1, 2, 7) else 4.0

    monkeypatch.setattr(torch, "empty_like", lambda records, device: Target())
    records = torch.zeros(1, 64, 1024, dtype=torch.uint8)
    assert bench_resolve.measure_link(records) == pytest.approx(16.384)
    assert all(copies)


# ---- rows, table, figures ----


def test_a_row():
    point = Point(16, 256, 1152, 2048, 4096)
    row = make_row(point, "fused", [100.0, 110.0, 90.0], [20.0], link_gb_per_s=50.0)
    num_bytes = 16 * 256 * 1152
    assert row == {
        "rung": "fused",
        "batch": 16,
        "misses": 256,
        "record_bytes": 1152,
        "top_k": 2048,
        "device_buffer_size": 4096,
        "us": 100.0,
        "us_p10": 92.0,
        "us_p90": 108.0,
        "us_no_io": 20.0,
        "us_no_io_p10": 20.0,
        "us_no_io_p90": 20.0,
        "gb_per_s": round(num_bytes / 100e-6 / 1e9, 3),
        "limit_us": round(num_bytes / 50e9 * 1e6, 3),
    }
    cells = "fused 16 256 1152 2048 4096 100.0 92.0..108.0 20.0 47.2 94.4"
    assert line(row).split() == cells.split()
    assert len(line(row)) == len(bench_resolve.HEAD) <= 100


def test_a_row_without_misses_and_without_a_switch_for_io():
    row = make_row(Point(1, 0, 4, 8, 8), "one_block", [1.25], link_gb_per_s=50.0)
    assert (row["us"], row["gb_per_s"], row["limit_us"]) == (1.25, 0.0, 0.0)
    assert row["us_no_io"] is row["us_no_io_p10"] is row["us_no_io_p90"] is None
    assert line(row).split()[-3:] == ["-", "0.0", "0.0"]


def rows_of(*points: Point, rung: str = "fused") -> list[dict]:
    return [make_row(point, rung, [9.0], [4.0], link_gb_per_s=50.0) for point in points]


def report_of(rows: list[dict]) -> dict:
    return {"device_name": "made up", "link_gb_per_s": 50.0, "rows": rows}


def test_figures():
    """B/K at batch 16 if it has as many as any, batches at B = 2K; a figure per miss count."""
    points = [Point(b, 64, 1152, 8, s) for b in (16, 1, 32) for s in (32, 8, 16)]
    points += [Point(64, 64, 1152, 8, 16), Point(16, 5, 1152, 8, 8)]
    rows = rows_of(*points)
    rows.append(rows[0] | {"rung": "one_block", "us_no_io": None})
    (name, data), (other_name, other) = figures(report_of(rows))
    assert name == "resolve-K8-1152B-64misses.png"
    assert [(r["batch"], r["device_buffer_size"]) for r in data["by_ratio"]] == [
        (16, 8),
        (16, 16),
        (16, 32),
    ]
    assert [(r["batch"], r["device_buffer_size"]) for r in data["by_batch"]] == [
        (1, 16),
        (16, 16),
        (32, 16),
        (64, 16),
    ]
    assert all(row["rung"] == "fused" for row in data["by_ratio"] + data["by_batch"])
    for part in ("made up", "K = 8", "1152 bytes", "64 misses", "50.0 GB/s"):
        assert part in data["config"]
    sizes = rows_of(*(Point(1, 64, 1152, 8, s) for s in (32, 8, 16)))
    ((_, data),) = figures(report_of(sizes))
    assert [row["device_buffer_size"] for row in data["by_batch"]] == [16]  # 2K, of three
    ((_, data),) = figures(report_of(sizes[:2]))
    assert [row["device_buffer_size"] for row in data["by_batch"]] == [8]
    ((_, data),) = figures(report_of([row for row in rows[:-2] if row["batch"] != 16]))
    assert [row["batch"] for row in data["by_ratio"]] == [32] * 3
    assert other_name == "resolve-K8-1152B-5misses.png"
    assert other["by_ratio"] == other["by_batch"] == [rows[-2]]


# ---- what is asked for, and what is refused ----


def test_default_points():
    points, rungs = checked(parse())
    assert rungs == ["fused"]
    pairs = [(b, m) for b in (1, 4, 16, 64) for m in (0, 64, 256, 1024)]
    assert points == [Point(b, m, 1152, 2048, 4096) for b, m in pairs]


def test_points_of_pairs_and_lists():
    argv = ["--points", "1:0,128:8", "--record-bytes", "4,1152", "--top-k", "8"]
    points, rungs = checked(
        parse(*argv, "--device-buffer-size", "8,16", "--rungs", "one_thread,fused")
    )
    assert rungs == ["one_thread", "fused"]
    assert points == [
        Point(batch, misses, record_bytes, 8, size)
        for record_bytes in (4, 1152)
        for size in (8, 16)
        for batch, misses in ((1, 0), (128, 8))
    ]


@pytest.mark.parametrize(
    "argv, message",
    [
        ("--misses 0,2049", "--misses: 2049 misses per request are more than --top-k 2048"),
        ("--points 1:0,4:9 --top-k 8", "--points: 9 misses per request are more than --top-k 8"),
        ("--top-k 4097", "--top-k 4097 is more than --device-buffer-size 4096"),
        ("--device-buffer-size 4096,2047", "--top-k 2048 is more than --device-buffer-size 2047"),
        ("--device-buffer-size 32768", "--device-buffer-size 32768 is more than 32767"),
        ("--record-bytes 1152,6", "--record-bytes 6 is not a multiple of 4"),
        ("--record-bytes 67108868", "--record-bytes 67108868 is more than 67108864"),
        ("--rungs fused,two_blocks", "--rungs: 'two_blocks' is not one of: one_thread, one_block"),
        ("--rungs ,", "--rungs: '' is not one of"),
        ("--points 1:0 --misses 1", "--points and --batch-sizes or --misses set the same things"),
        ("--points 1:0 --batch-sizes 1", "--points and --batch-sizes or --misses set the same"),
        ("--num-iters 0", "--num-iters 0 is less than 1"),
        ("--blocks-per-request 0", "--blocks-per-request 0 is less than 1"),
        ("--blocks-per-request 2 --rungs one_block", "only the rung 'fused' has it"),
        (
            "--swap-in-block-size 100",
            "--swap-in-block-size 100 is not a multiple of 32 in 32..1024",
        ),
        ("--swap-in-block-size 0", "--swap-in-block-size 0 is not a multiple of 32 in 32..1024"),
        ("--swap-in-block-size 64 --rungs one_thread", "the rung 'one_thread' has none"),
        ("--plot x --rungs one_thread,one_block", "--plot: only the rung 'fused' can leave out IO"),
    ],
)
def test_refused(capsys, argv, message):
    """Before a GPU is looked for, so that flags are checked everywhere."""
    with pytest.raises(ValueError) as error:
        checked(parse(*argv.split()))
    assert message in str(error.value)
    assert cli.main(["bench", "resolve", *argv.split()]) == 1
    out, err = capsys.readouterr()
    assert message in json.loads(out)["error"] and "Traceback" not in err


def test_too_little_memory(monkeypatch):
    monkeypatch.setattr(bench_resolve, "free_host_bytes", lambda: 2**31)
    points, _ = checked(parse("--points", "1:0,256:0"))
    needed = bench_resolve.device_bytes(points[1])
    records = 256 * 4097 * 1152
    tables = 256 * 24 * (2048 * 4 + 2 * 4096 * (4 + 2))
    assert records + tables < needed < 1.5 * (records + tables)
    bench_resolve.check_memory(points, needed)
    with pytest.raises(MemoryError) as error:
        bench_resolve.check_memory(points, needed - 1)
    for part in (
        "batch 256 with --device-buffer-size 4096 and --record-bytes 1152",
        "GiB are free",
    ):
        assert part in str(error.value)
    monkeypatch.setattr(bench_resolve, "free_host_bytes", lambda: 2**29)
    with pytest.raises(MemoryError, match="pins 1.00 GiB of host memory, only 0.50 GiB are free"):
        bench_resolve.check_memory(points, needed)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_without_a_gpu(monkeypatch, capsys, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "resolve", "--device", device]) == 1
    out, err = capsys.readouterr()
    report = json.loads(out)  # nothing else on stdout
    assert report["error"] == (
        "bench resolve measures a GPU, and torch finds none; tutorial 04 runs the same kernels "
        "simulated, on any machine"
    )
    assert err == f"error: {report['error']}\n"


def test_figures_without_matplotlib_are_refused_at_once(monkeypatch, tmp_path):
    def missing(*size):
        raise ImportError("figures need matplotlib")

    monkeypatch.setattr(bench_resolve.plots, "new_figure", missing)
    with pytest.raises(ImportError, match="figures need matplotlib"):
        bench_resolve.bench_resolve(parse("--plot", str(tmp_path / "new")), {})
    assert not list(tmp_path.iterdir())


# ---- a whole run, simulated but for the clock ----


@pytest.fixture
def simulated(monkeypatch) -> list:
    """The flow on a CPU; a list of what was timed: (case, resolver)."""
    timed = []

    def time_calls(case, resolver, num_iters):
        timed.append((case, resolver))
        return [10.0 if resolver.skip_io else 40.0] * num_iters

    monkeypatch.setattr(bench_resolve, "HOST_POOL_BYTES", 2**16)
    monkeypatch.setattr(bench_resolve, "NUM_LAYERS", 1)
    monkeypatch.setattr(bench_resolve, "measure_link", lambda records: 55.5)
    monkeypatch.setattr(bench_resolve, "time_calls", time_calls)
    return timed


TINY = ["--top-k", "8", "--device-buffer-size", "16", "--record-bytes", "16,20"]


def run(*argv: str) -> dict:
    report: dict = {}
    args = parse(*TINY, *argv)
    points, rungs = checked(args)
    bench_resolve.run(args, points, rungs, CPU, report)
    return report


def test_a_run(simulated, capsys):
    argv = ["--points", "1:0,2:8", "--rungs", "one_block,fused", "--swap-in-block-size", "64"]
    report = run(*argv, "--num-iters", "3", "--seed", "7")
    points = [Point(b, m, size, 8, 16) for size in (16, 20) for b, m in ((1, 0), (2, 8))]
    kinds = [("one_block", False), ("fused", False), ("fused", True)]
    assert [(case.point, r.rung, r.skip_io) for case, r in simulated] == [
        (point, *kind) for point in points for kind in kinds
    ]
    assert {r.num_threads for _, r in simulated} == {64}
    assert [(Point(*list(row.values())[1:6]), row["rung"]) for row in report["rows"]] == [
        (point, rung) for point in points for rung in ("one_block", "fused")
    ]
    assert [(row["us"], row["us_no_io"]) for row in report["rows"][:2]] == [(40, None), (40, 10)]
    assert (report["link_gb_per_s"], report["num_iters"], report["seed"]) == (55.5, 3, 7)
    assert (report["swap_in_block_size"], report["blocks_per_request"]) == (64, None)
    assert {"torch", "numba", "numba_cuda", "device_name"} <= set(report)
    json.dumps(report, allow_nan=False)
    out, err = capsys.readouterr()
    card, head, *lines = out.splitlines()
    assert "link 55.5 GB/s" in card and head == bench_resolve.HEAD
    assert lines == [line(row) for row in report["rows"]]
    assert err == ""


def test_settings_reach_the_kernel(simulated):
    run("--points", "2:3", "--blocks-per-request", "2", "--seed", "7", "--num-iters", "1")
    run("--points", "2:3", "--num-iters", "1")
    given, default = simulated[0], simulated[4]
    assert (given[1].blocks_per_request, default[1].blocks_per_request) == (2, None)
    assert not torch.equal(given[0].before.positions, default[0].before.positions)
    assert not torch.equal(given[0].host_records, default[0].host_records)
    twice = make_tables(given[0].point, 1, torch.Generator().manual_seed(7))
    assert_same_bits(given[0].before.positions, twice.positions)


def test_progress_goes_to_stderr(simulated, monkeypatch, capsys):
    args = parse(*TINY, "--points", "1:0")
    args.disable_tqdm = False
    bench_resolve.run(args, *checked(args), CPU, {})
    out, err = capsys.readouterr()
    assert "2/2" in err and "%|" not in out


def test_what_is_wrong_is_not_timed(simulated, monkeypatch):
    right = Resolver.resolve

    def wrong(self, *args, **kwargs):
        slots = right(self, *args, **kwargs)
        if self.skip_io:
            slots[0, 0] = -1
        return slots

    monkeypatch.setattr(Resolver, "resolve", wrong)
    with pytest.raises(RuntimeError, match="skip_io=True: wrong top_k_device_locs"):
        run("--points", "1:3")
    assert [resolver.skip_io for _, resolver in simulated] == [False]


def test_rows_before_ctrl_c_are_reported(simulated, monkeypatch, capsys):
    measured = bench_resolve.time_calls

    def interrupted(case, *args):
        if case.point.batch == 4:
            raise KeyboardInterrupt
        return measured(case, *args)

    def on_a_cpu(args, report):
        bench_resolve.run(args, *checked(args), CPU, report)

    monkeypatch.setattr(bench_resolve, "time_calls", interrupted)
    monkeypatch.setattr(bench_resolve, "bench_resolve", on_a_cpu)
    assert cli.main(["bench", "resolve", "--disable-tqdm", *TINY, "--points", "1:1,4:2,2:2"]) == 130
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["interrupted"] is True
    assert [row["batch"] for row in report["rows"]] == [1]


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [[], ["--blocks-per-request", "3"]], ids=str)
def test_on_a_gpu(settings, capsys, tmp_path):
    """Every rung is right there, and is timed; times and figures are real."""
    argv = ["--points", "1:0,2:64,40:8", "--top-k", "64", "--device-buffer-size", "64,256"]
    argv += ["--record-bytes", "80,1152", "--num-iters", "3", "--plot", str(tmp_path)]
    argv += ["--rungs", ",".join(RUNGS), "--disable-tqdm", *settings]
    assert cli.main(["bench", "resolve", *argv]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(report["rows"]) == 3 * 2 * 2 * len(RUNGS)
    assert report["link_gb_per_s"] > 1
    for row in report["rows"]:
        times = [row["us_p10"], row["us"], row["us_p90"]]
        if row["rung"] == "fused":
            no_io = [row["us_no_io_p10"], row["us_no_io"], row["us_no_io_p90"]]
            assert no_io == sorted(no_io)
            times += no_io
        assert times[:3] == sorted(times[:3])
        assert all(math.isfinite(us) and 0 < us < 1e6 for us in times)
        assert (row["gb_per_s"] > 0) == (row["limit_us"] > 0) == (row["misses"] > 0)
    names = {path.name for path in tmp_path.iterdir()}
    assert "resolve-K64-1152B-64misses.png" in names and len(names) == 2 * 2 * 3
