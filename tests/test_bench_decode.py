"""`bench decode`: what each row says, by hand; the same work for every mode; refusals by name.

Guards: a number under a wrong name, or of a wrong unit; warm-up that is counted; a mode that does
other work than the others; a baseline that fetches after all; misses that are not those asked for;
a run that fails at its last point for what was known before the first; rows that are lost.
"""

import ctypes
import gc
import json
import math
import re
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from bench_rig import (
    NUM_LAYERS,
    PAGE,
    PERCENTILES,
    RECORD_BYTES,
    ROW_KEYS,
    SMALL,
    TEXT_IDS,
    B,
    Clock,
    K,
    Run,
    budget_of,
    make_quick,
    run_cli,
    slow_engine,
)

from minihisparse import bench_decode, bench_engine, cli, compare, energy, scheduler
from minihisparse.bench_table import line, predict
from minihisparse.decode_step import DecodeStep
from minihisparse.gpu_cache import HiSparseCache
from minihisparse.host_store import HostPool
from minihisparse.runner import Runner
from minihisparse.trace import Trace, write_trace
from minihisparse.workload import percentiles

SLOT_BYTES = NUM_LAYERS * RECORD_BYTES  # a position in all layers
MODES = ("full", "hisparse", "no-io")


@pytest.fixture
def run(capsys, monkeypatch, tiny_folder) -> Callable[..., Run]:
    """run("--input-len", 40, ...): bench decode of the tiny folder; model=None: without --model."""
    make_quick(monkeypatch)

    def run(*argv: object, model=tiny_folder, sizes: list[str] = SMALL) -> Run:
        of = [] if model is None else ["--model", model]
        return run_cli(capsys, "bench", "decode", *of, *sizes, "--device", "cpu", *argv)

    return run


@pytest.fixture
def random(run, tiny_folder) -> Callable[..., Run]:
    """random("--input-len", 40, ...): the same with random weights of the tiny folder's config."""
    return lambda *argv: run("--random-weights", tiny_folder / "config.json", *argv, model=None)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A prefill takes 1 s, a decode step 0.1 s; an engine's first ones 50 s more."""
    clock = Clock(monkeypatch)
    slow_engine(clock, monkeypatch, first_s=50.0)
    return clock


# ---- rows ----


def test_a_row_by_hand(run, clock, monkeypatch):
    """Two clients, three requests of 40 + 3 tokens; synthetic misses, so everything is known.

    time  1.0      2.0      2.1   2.2    3.2      3.3  3.4
          0 first  1 first  0, 1  0, 1   2 first  2    2       2 is sent at 2.2
    """
    monkeypatch.setattr(bench_decode, "measure_link", lambda device: 1e-4)  # 100 kB/s
    argv = ["--input-len", 40, "--output-len", 3, "--concurrency", 2, "--num-requests", 3]
    result = run(*argv, "--modes", "full,hisparse,no-io", "--selections", "synthetic:miss=0.25")
    assert result.code == 0
    assert result.report["output_len"] == 3 and result.report["link_gb_per_s"] == 1e-4
    assert result.report["threads"] == torch.get_num_threads()
    assert [row["mode"] for row in result.rows] == list(MODES)
    against_no_io = {"exposed_io_ms": 0.0, "share_of_no_io": 1.0}  # by this clock
    for row in result.rows:
        others = against_no_io if row["mode"] == "hisparse" else {}
        assert set(row) == ROW_KEYS | {"concurrency", "resolve_us"} | others.keys()
        assert row | others == row
        assert row["input_len"] == 40 and row["hbm_budget_gib"] is None
        assert (row["concurrency"], row["requests"]) == (2, 3)
        assert row["running_mean"] == 1.5 and row["running_max"] == 2  # 6 tokens in 4 steps
        assert row["decode_tokens_per_second"] == 15.0  # 6 in 0.4 s
        assert row["tokens_per_second"] == round(9 / 3.4, 2)
        assert row["step_ms"] == dict.fromkeys(PERCENTILES, 100.0)
        assert row["ttft_ms"]["mean"] == round((1000 + 2000 + 1000) / 3, 3)
        # Request 0 waits for request 1's prefill before its second token.
        gaps = [1100, 100, 100, 100, 100, 100]
        assert row["itl_ms"] == percentiles(gaps)
        assert row["tpot_ms"] == percentiles([600, 100, 100])
        assert row["joules_per_token"] is None and row["resolve_us"] is None
        assert "allocated_bytes" not in row

    full, hisparse, no_io = result.rows
    # A request misses K in its first step and K / 4 in its second one.
    misses, selected = 3 * (K + K // 4) * NUM_LAYERS, 3 * 2 * K * NUM_LAYERS
    assert full["hit_rate"] is full["bytes_h2d_per_step"] is full["link_share"] is None
    assert hisparse["hit_rate"] == no_io["hit_rate"] == 1 - misses / selected == 0.375
    assert hisparse["bytes_h2d_per_step"] == misses * RECORD_BYTES / 4 == 1920
    assert hisparse["link_share"] == 0.192  # 7,680 bytes in 0.4 s
    assert no_io["bytes_h2d_per_step"] == no_io["link_share"] == 0.0

    rows, pages = 2, 11
    selections_bytes = 3 * NUM_LAYERS * rows * K * 4
    expected = {
        "selector_bytes": selections_bytes,
        "full_kv_bytes": rows * 43 * SLOT_BYTES,  # of as many as run at once
        "step_bytes": 0,
        "graph_bytes": 0,
    }
    for row in result.rows:
        kv, host = rows * (B + 1) * SLOT_BYTES, rows * pages * PAGE * SLOT_BYTES
        if row["mode"] == "full":
            kv, host = rows * 43 * SLOT_BYTES, 0
        assert row["memory"] | expected == row["memory"]
        assert row["memory"]["device_kv_bytes"] == kv
        assert row["memory"]["host_pool_bytes"] == host
        assert row["memory"]["workspace_bytes"] > 0


def test_the_counters_are_the_caches_own(run, monkeypatch):
    """With a real selection, whatever it chooses."""
    caches = keep_caches(monkeypatch)
    argv = ["--input-len", 70, "--output-len", 9, "--concurrency", 2, "--modes", "full,hisparse"]
    full, hisparse = run(*argv).rows
    hits, misses, _ = caches[1].counters.sum(0).tolist()
    assert 0 < misses < hits + misses <= 2 * 8 * K * NUM_LAYERS
    assert hisparse["hit_rate"] == round(hits / (hits + misses), 6)
    assert hisparse["bytes_h2d_per_step"] == misses * RECORD_BYTES / 8
    assert hisparse["link_share"] is None  # on a CPU nobody knows the link


def keep_caches(monkeypatch: pytest.MonkeyPatch) -> list:
    """The caches of the points, in the order in which they are made."""
    caches, init = [], Runner.__init__

    def noted(self, model, cache, *args) -> None:
        caches.append(cache)
        init(self, model, cache, *args)

    monkeypatch.setattr(Runner, "__init__", noted)
    return caches


def test_answers_of_one_token_have_no_decode_steps(run):
    """Nothing is divided by their number, and the JSON has no NaN."""
    result = run("--input-len", 40, "--output-len", 1)
    assert result.code == 0
    for row in result.rows:
        for key in ("step_ms", "tpot_ms", "itl_ms", "running_mean", "decode_tokens_per_second"):
            assert row[key] is None
        assert row["tokens_per_second"] > 0 and row["ttft_ms"]["mean"] > 0
        assert row["hit_rate"] is row["bytes_h2d_per_step"] is None or row["mode"] != "full"
    assert all("-" in words for words in result.table[1:])


def test_the_table(run):
    result = run("--input-len", 40, "--output-len", 5, "--concurrency", 3)
    words = " ".join(result.table[0].split())
    assert words == (
        "mode tokens GiB clients running step, ms tok/s decode tok/s TTFT, ms TPOT, ms hit rate "
        "of link"
    )
    for text, row in zip(result.table[1:], result.rows, strict=True):
        assert len(text) == len(result.table[0])
        mode, tokens, gib, clients, running, step, *rates, ttft, tpot, hits, link = text.split()
        assert (mode, int(tokens), gib, int(clients)) == (row["mode"], 40, "-", 3)
        assert float(running) == pytest.approx(row["running_mean"], abs=0.05)
        assert float(step) == row["step_ms"]["p50"] and float(tpot) == row["tpot_ms"]["mean"]
        assert float(rates[0]) == pytest.approx(row["tokens_per_second"], abs=0.051)
        assert float(rates[1]) == pytest.approx(row["decode_tokens_per_second"], abs=0.051)
        assert float(ttft) == pytest.approx(row["ttft_ms"]["mean"], abs=0.051)
        assert hits == ("-" if row["mode"] == "full" else f"{100 * row['hit_rate']:.2f}%")
        assert link == "-"


def test_a_common_prefix(run):
    """Shared only if asked for; the prompts are the same either way, and warm-up is not counted."""
    argv = ["--input-len", 60, "--prefix-len", 48, "--output-len", 4, "--concurrency", 4]
    alone = run(*argv, "--modes", "full,hisparse")
    sharing = run(*argv, "--modes", "full,hisparse", "--enable-prefix-sharing")
    for result, shared in ((alone, 0), (sharing, 48)):
        assert result.report["prefix_len"] == 48
        assert result.report["enable_prefix_sharing"] is bool(shared)
        full, hisparse = (row["prefix"] for row in result.rows)
        for counts in (full, hisparse):
            assert (counts["requests"], counts["requests_sharing"]) == (4, 3 if shared else 0)
            assert counts["tokens_computed"] == 4 * 60 - 3 * shared
            assert counts["tokens_shared"] == 3 * shared
        pages, saved = 4 * 64 // PAGE, 3 * shared // PAGE
        page_bytes = PAGE * SLOT_BYTES
        assert hisparse["pages_shared"] == saved and full["pages_shared"] is None
        assert hisparse["host_bytes_peak"] == (pages - saved) * page_bytes
        assert hisparse["host_bytes_saved"] == saved * page_bytes
    apart = run("--input-len", 60, "--output-len", 2, "--concurrency", 4, "--enable-prefix-sharing")
    assert [row["prefix"]["tokens_shared"] for row in apart.rows] == [0, 0]


def test_prompts_with_a_common_prefix():
    args = SimpleNamespace(prefix_len=3)
    prompts = bench_engine.point_prompts(args, list(range(1000)), 5)
    assert [next(prompts) for _ in range(3)] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 260, 261],
        [0, 1, 2, 517, 518],
    ]


def test_prefetch_beside_hisparse(run, clock, tiny_folder, tmp_path):
    """A config that declares anchors: the same bytes are fetched, by an anchor for its group."""
    config = json.loads((tiny_folder / "config.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"index_topk_freq": 2}))
    argv = ["--random-weights", path, "--input-len", 40, "--output-len", 3]
    argv += ["--selections", "synthetic:miss=0.25", "--modes", "hisparse,prefetch,no-io"]
    result = run(*argv, model=None)
    assert result.code == 0
    hisparse, prefetch, no_io = result.rows
    assert prefetch["mode"] == "prefetch" and prefetch["share_of_no_io"] == 1.0
    for key in ("hit_rate", "bytes_h2d_per_step"):
        assert prefetch[key] == hisparse[key] > 0
    # One table of slots, for both layers.
    saved = hisparse["memory"]["metadata_bytes"] - prefetch["memory"]["metadata_bytes"]
    assert saved == B * (4 + 2) + 3 * 8
    assert no_io["memory"] == prefetch["memory"] | {
        "workspace_bytes": no_io["memory"]["workspace_bytes"]
    }
    assert "prefetch, 40 tokens, 1 running: IO adds 0.000 ms per token; 100.0%" in "\n".join(
        result.table
    )


def test_prefetch_needs_anchors(run):
    """Said before anything is measured."""
    result = run("--input-len", 40, "--output-len", 3, "--modes", "full,prefetch")
    assert re.search("--modes prefetch needs layers that share.*dsa-shared", result.error)
    assert "rows" not in result.report


# ---- the same work ----


def test_every_mode_does_the_same_work(run, monkeypatch):
    """Prompts, request rows and lengths of each step; between full and hisparse, the tokens too.
    Each has run before it is measured.
    """
    calls: dict[str, list] = {}
    turns = []
    prefill, decode = Runner.prefill, DecodeStep.__call__

    def mode_of(runner: Runner) -> str:
        return "no-io" if getattr(runner.cache, "skip_io", False) else type(runner.cache).__name__

    def noted_prefill(self, row, ids, *args):
        turns.append(mode_of(self))
        calls.setdefault(mode_of(self), []).append(("prefill", row, ids.tolist()))
        return prefill(self, row, ids, *args)

    def noted_decode(self, tokens, rows, seq_lens):
        calls[mode_of(self.runner)].append((list(rows), list(seq_lens), list(tokens)))
        return decode(self, tokens, rows, seq_lens)

    monkeypatch.setattr(Runner, "prefill", noted_prefill)
    monkeypatch.setattr(DecodeStep, "__call__", noted_decode)
    argv = ["--input-len", 40, "--output-len", 4, "--concurrency", 2, "--num-requests", 3]
    assert run(*argv, "--modes", "full,hisparse,no-io", "--num-iters", 2).code == 0
    full, hisparse, no_io = (calls[name] for name in ("FullCache", "HiSparseCache", "no-io"))
    assert full == hisparse
    assert [call[:2] for call in full] == [call[:2] for call in no_io]
    half = len(full) // 2
    assert full[:half] == full[half:]  # both iterations
    modes = [turn for turn, before in zip(turns, [None, *turns], strict=False) if turn != before]
    assert modes == ["FullCache", "HiSparseCache", "no-io"] * 2

    warm_up, first_step, *work = full[:half]
    assert warm_up[:2] == ("prefill", 0) and len(warm_up[2]) == 40 and first_step[1] == [41]
    prompts = [call[2] for call in work if call[0] == "prefill"]
    assert [len(prompt) for prompt in prompts] == [40] * 3
    assert len({tuple(prompt) for prompt in [warm_up[2], *prompts]}) == 4
    lengths = [call[1] for call in work if call[0] != "prefill"]
    assert lengths == [[41, 41], [42, 42], [43, 43], [41], [42], [43]]


def test_synthetic_contexts_are_no_prefill(run, monkeypatch):
    monkeypatch.setattr(Runner, "prefill", None)
    result = run("--input-len", 40, "--output-len", 4, "--synthetic-context", "--concurrency", 2)
    assert [row["requests"] for row in result.rows] == [2, 2]


def test_no_io_reads_no_host_record(run, monkeypatch):
    """In the host pool there is NaN; who fetches it, fails."""
    write = HostPool.write

    def poison(self, layer, host_rows, records) -> None:
        write(self, layer, host_rows, torch.full_like(records, math.nan))

    monkeypatch.setattr(HostPool, "write", poison)
    argv = ["--input-len", 40, "--output-len", 6, "--concurrency", 2]
    (row,) = run(*argv, "--modes", "no-io").rows
    assert row["requests"] == 2 and row["hit_rate"] < 1 and row["bytes_h2d_per_step"] == 0
    assert "largest logit is no finite number" in run(*argv, "--modes", "hisparse").error

    monkeypatch.setattr(HostPool, "read", None)
    assert run(*argv, "--modes", "no-io").code == 0


def test_no_io_decides_as_hisparse_does(run, monkeypatch):
    """With given selections: the same slots, call by call."""
    slots: dict[bool, list] = {False: [], True: []}
    resolve = HiSparseCache.resolve

    def noted(self, *args) -> torch.Tensor:
        answer = resolve(self, *args)
        slots[self.skip_io].append(answer.tolist())
        return answer

    monkeypatch.setattr(HiSparseCache, "resolve", noted)
    argv = ["--input-len", 40, "--output-len", 6, "--concurrency", 3, "--num-requests", 4]
    hisparse, no_io = run(
        *argv, "--modes", "hisparse,no-io", "--selections", "synthetic:miss=0.4"
    ).rows
    assert slots[False] == slots[True] and len(slots[True]) > 10
    assert hisparse["hit_rate"] == no_io["hit_rate"] < 1


# ---- selections ----


@pytest.mark.parametrize("rate", ["0", "0.2", "0.5", "1"])
@pytest.mark.parametrize("together", [True, False], ids=["together", "staggered"])
def test_synthetic_misses_are_exact(run, monkeypatch, rate, together):
    """Counted in the cache, layer by layer and step by step: all of K in a request's first step,
    then round(rate * K); whoever joins or leaves meanwhile, and in rows that others had before.
    """
    if not together:
        monkeypatch.setattr(scheduler, "MAX_PREFILL_TOKENS", 1)  # one prompt between two steps
    per_step, resolve, batches = round(float(rate) * K), HiSparseCache.resolve, []

    def counted(self, layer, positions, batch) -> torch.Tensor:
        before = int(self.counters[layer, 1])
        slots = resolve(self, layer, positions, batch)
        steps = [seq_len - 41 for seq_len in batch.seq_lens.tolist()]
        assert int(self.counters[layer, 1]) - before == sum(per_step if s else K for s in steps)
        batches.append(steps)
        return slots

    monkeypatch.setattr(HiSparseCache, "resolve", counted)
    argv = ["--input-len", 40, "--output-len", 7, "--concurrency", 3, "--num-requests", 5]
    (row,) = run(*argv, "--modes", "hisparse", "--selections", f"synthetic:miss={rate}").rows
    assert any(len(set(steps)) > 1 for steps in batches) != together
    assert row["hit_rate"] == pytest.approx(1 - (K + 5 * per_step) / (6 * K), abs=1e-6)


def make_trace(num_layers: int = NUM_LAYERS, top_k: int = K, context_len: int = 30) -> Trace:
    """Four steps of two requests, each position list another one."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, num_layers, 2)
    positions = torch.rand(*shape, context_len, generator=generator).argsort(-1)[..., :top_k]
    positions = positions.sort(-1).values.int()
    positions[..., -1] = -1
    seq_lens = torch.arange(4, dtype=torch.int32)[:, None] + context_len + 1
    return Trace(positions, seq_lens.expand(4, 2))


def test_a_trace_is_replayed(run, monkeypatch, tmp_path):
    """Three rows: the third has request 0's selections. Six steps: the trace begins anew."""
    trace = make_trace(num_layers=NUM_LAYERS + 1)  # more layers than the model: the first ones
    write_trace(tmp_path / "trace.safetensors", trace)
    resolve, num_seen = HiSparseCache.resolve, []

    def checked(self, layer, positions, batch) -> torch.Tensor:
        for row, seq_len, chosen in zip(
            batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), positions, strict=True
        ):
            expected = trace.positions[(seq_len - 41) % 4, layer, row % 2]
            assert chosen.tolist() == expected.tolist()
            num_seen.append(1)
        return resolve(self, layer, positions, batch)

    monkeypatch.setattr(HiSparseCache, "resolve", checked)
    argv = ["--input-len", 40, "--output-len", 7, "--concurrency", 3, "--modes", "hisparse"]
    assert run(*argv, "--selections", tmp_path / "trace.safetensors").code == 0
    assert len(num_seen) == (1 + 3 * 6) * NUM_LAYERS  # one of them in the warm-up


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (make_trace(num_layers=1), "has 1 layers, the model 2"),
        (make_trace(top_k=12), "has K = 12, not --top-k 8"),
        (make_trace(context_len=41), "begins with 41 tokens, more than --input-len 40"),
    ],
)
def test_traces_that_do_not_fit(run, tmp_path, trace, message):
    file = tmp_path / "trace.safetensors"
    write_trace(file, trace)
    error = run("--input-len", "50,40", "--output-len", 4, "--selections", file).error
    assert error == f"--selections {file} {message}"


def test_selections_that_are_none(run, tmp_path):
    short = ["--input-len", 40, "--output-len", 4, "--selections"]
    assert "nowhere.st: there is no such file" in run(*short, tmp_path / "nowhere.st").error
    (tmp_path / "notes.txt").write_text("positions")
    assert "notes.txt is no selection trace" in run(*short, tmp_path / "notes.txt").error
    for text in ("synthetic", "synthetic:miss=", "synthetic:miss=x", "synthetic:hit=0.5"):
        assert f"{text!r} is neither a file nor like synthetic:miss=0.13" in run(*short, text).error
    for rate in ("1.01", "-0.1", "nan", "inf"):
        assert "a share in 0..1" in run(*short, f"synthetic:miss={rate}").error
    error = run("--input-len", "40,23", *short[2:], "synthetic:miss=0.5").error
    assert "needs --input-len 24 or more, K + B, got 23" in error


# ---- points ----


def test_all_combinations_in_order(run):
    budgets = [budget_of("full", rows, 46) for rows in (2, 3)]
    result = run(
        *("--input-len", "30,40", "--output-len", 3, "--num-requests", 1, "--concurrency", "1,2"),
        *("--hbm-budget-gib", ",".join(map(str, budgets)), "--modes", "hisparse,full"),
    )
    keys = ("input_len", "hbm_budget_gib", "concurrency", "mode")
    assert [tuple(row[key] for key in keys) for row in result.rows] == [
        (input_len, budget, clients, mode)
        for input_len in (30, 40)
        for budget in budgets
        for clients in (1, 2)
        for mode in ("hisparse", "full")
    ]


def test_rows_are_what_the_budget_holds(run, monkeypatch):
    """And as many clients, each with one request; hisparse holds more. What is not needed by the
    clients that there are is not allocated, in host memory neither.
    """
    caches = keep_caches(monkeypatch)
    budget = budget_of("full", 3, 63)
    argv = ["--input-len", 60, "--output-len", 3, "--hbm-budget-gib", budget]
    full, hisparse = run(*argv).rows
    assert full["running_max"] == full["concurrency"] == full["requests"] == 3
    for row in (full, hisparse):
        kept = ("device_kv_bytes", "selector_bytes", "metadata_bytes")
        assert sum(row["memory"][key] for key in kept) <= budget * 2**30
    fitting = hisparse["running_max"]
    assert budget_of("hisparse", fitting, 63) <= budget + 1e-6
    assert budget_of("hisparse", fitting + 1, 63) > budget
    assert (
        hisparse["concurrency"] == hisparse["requests"] == hisparse["running_mean"] == fitting > 5
    )

    full, hisparse = run(*argv, "--concurrency", 5, "--num-requests", 6).rows
    assert [full[key] for key in ("running_max", "concurrency", "requests")] == [3, 5, 6]
    assert [hisparse[key] for key in ("running_max", "concurrency", "requests")] == [5, 5, 6]
    assert full["running_mean"] == 3 and hisparse["running_mean"] == 3
    assert caches[-1].max_requests == 5 and caches[-1].host.num_pages == 5 * 16


def test_clients_queue_where_there_are_too_few_rows(run, clock):
    """Five clients; in the end the last two have waited for the first three."""
    argv = ["--input-len", 60, "--output-len", 3, "--concurrency", 5]
    full, hisparse = run(*argv, "--hbm-budget-gib", budget_of("full", 3, 63)).rows
    assert full["ttft_ms"] == percentiles([1000, 2000, 3000, 4200, 5200])
    assert hisparse["ttft_ms"] == percentiles([1000, 2000, 3000, 4000, 5000])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--modes", "full,half"],
            "--modes: 'half' is not one of: full, hisparse, prefetch, no-io",
        ),
        (["--modes", ""], "--modes: '' is not one of"),
        (["--output-len", "0"], "--output-len 0 is less than 1"),
        (["--num-iters", "-3"], "--num-iters -3 is less than 1"),
        (["--num-requests", "0"], "--num-requests 0 is less than 1"),
        (["--num-layers", "1"], "--num-layers cuts a model with --random-weights"),
        (["--prefix-len", "40"], r"--prefix-len 40 is not in 0\.\.39, below --input-len"),
        (["--prefix-len", "-1"], "--prefix-len -1 is not in"),
        (
            ["--enable-prefix-sharing", "--synthetic-context"],
            "--enable-prefix-sharing need a prefill, which is left out with --synthetic-context",
        ),
        (["--prefix-len", "9", "--synthetic-context"], "--prefix-len and .* need a prefill"),
        (["--resolve-latency"], "--resolve-latency needs a GPU; this is device cpu"),
        # Known before the first point is measured, whichever point it is of.
        (["--hbm-budget-gib", "1,1e-7"], "--hbm-budget-gib 1e-07 is less than one request of 43"),
        (["--input-len", "40,1022"], "requests of 1025 tokens, but the model was made for 1024"),
        (["--input-len", "40,1022"], "see --allow-beyond-model-limit"),
        (["--max-model-len", "42"], "a request of 43 tokens, .* is more than --max-model-len 42"),
        (["--max-model-len", "1025"], "requests of 1025 tokens"),
    ],
)
def test_refused(run, monkeypatch, argv, message):
    monkeypatch.setattr(bench_engine, "make_runner", None)
    result = run("--input-len", "40", "--output-len", "3", *argv)
    assert re.search(message, result.error) and "rows" not in result.report


def test_flags_are_checked_before_the_model_is_loaded(run, tmp_path):
    for flags in (["--modes", "half"], ["--output-len", 0], ["--num-layers", 2]):
        assert flags[0] in run(*flags, model=tmp_path / "nowhere").error


def test_max_model_len_is_the_engines(run, monkeypatch):
    caches = keep_caches(monkeypatch)
    argv = ["--input-len", 40, "--output-len", 3, "--modes", "full"]
    assert run(*argv).code == run(*argv, "--max-model-len", 100).code == 0
    assert [cache.max_model_len for cache in caches] == [43, 100]


@pytest.mark.parametrize("what", ["decode", "serve"])
def test_every_point_is_freed(capsys, monkeypatch, tiny_folder, what):
    """What a point held is gone when the next one is made, even if it refers to itself."""
    pools, init = [], HostPool.__init__

    def noted(self, **settings) -> None:
        assert all(pool() is None for pool in pools)
        init(self, **settings)
        pools.append(weakref.ref(self))
        self.itself = self

    monkeypatch.setattr(HostPool, "__init__", noted)
    monkeypatch.setattr(bench_engine, "text_ids", lambda tokenizer: TEXT_IDS)
    gc.disable()
    try:
        argv = ["--model", tiny_folder, "--input-len", "30,40", "--output-len", 2, *SMALL]
        argv += ["--num-requests", 1, "--modes", "hisparse"]
        assert len(run_cli(capsys, "bench", what, *argv).rows) == len(pools) == 2
    finally:
        gc.enable()


def test_progress_counts_requests(capsys, monkeypatch, tiny_folder):
    make_quick(monkeypatch)
    argv = ["--model", tiny_folder, "--input-len", 30, "--output-len", 2, "--concurrency", "1,2"]
    assert cli.main(list(map(str, ["bench", "decode", *argv, *SMALL]))) == 0
    out, err = capsys.readouterr()
    assert "hisparse: 100%" in err and " 6/6 " in err and "%|" not in out


# ---- random weights ----


def test_random_weights(random, monkeypatch):
    """No tokenizer, no prefill; --num-layers of the config's two."""
    monkeypatch.setattr(Runner, "prefill", None)
    argv = ["--input-len", 40, "--output-len", 4, "--concurrency", 2]
    for more, num_layers in (([], 2), (["--num-layers", 1], 1)):
        full, hisparse = random(*argv, *more).rows
        assert full["memory"]["device_kv_bytes"] == 2 * 44 * num_layers * RECORD_BYTES
        assert hisparse["memory"]["device_kv_bytes"] == 2 * (B + 1) * num_layers * RECORD_BYTES
        assert hisparse["hit_rate"] > 0 and hisparse["requests"] == 2


@pytest.mark.parametrize("number", ["0", "3", "-1"])
def test_layers_that_the_config_does_not_have(random, number):
    error = random("--num-layers", number).error
    assert f"--num-layers {number} is not in 1..2, which is what" in error


def test_a_model_or_random_weights(run, random, tiny_folder):
    message = "bench decode needs --model or --random-weights, one of them"
    assert run(model=None).error == message
    assert random("--model", tiny_folder).error == message
    assert "is missing" in run("--random-weights", "nowhere.json", model=None).error


def test_beyond_the_models_limit(random):
    """As far as the longest point goes, without --max-model-len."""
    argv = ["--input-len", "30,1100", "--output-len", 3]
    assert "--allow-beyond-model-limit" in random(*argv).error
    result = random(*argv, "--allow-beyond-model-limit")
    assert [row["input_len"] for row in result.rows] == [30, 30, 1100, 1100]
    assert "positions from 1024 on are beyond" in result.err


# ---- interrupted ----


def test_rows_so_far_survive_ctrl_c(run, monkeypatch):
    loop, calls = bench_decode.run_closed_loop, []

    def interrupted(*args, **settings) -> list:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return loop(*args, **settings)

    monkeypatch.setattr(bench_decode, "run_closed_loop", interrupted)
    result = run("--input-len", "30,40", "--output-len", 3)
    assert result.code == 130 and result.report["interrupted"] is True
    assert [row["mode"] for row in result.rows] == ["full", "hisparse"]
    assert len(result.table) == 3


def test_an_error_in_a_run_is_reported(run, monkeypatch):
    right = Runner.prefill

    def broken(self, row, ids, *args) -> torch.Tensor:
        logits = right(self, row, ids, *args)
        return logits * math.nan if isinstance(self.cache, HiSparseCache) else logits

    monkeypatch.setattr(Runner, "prefill", broken)
    result = run("--input-len", 40, "--output-len", 3)
    assert "prompt 0: " in result.error and "no finite number" in result.error
    assert [row["mode"] for row in result.rows] == ["full"]


# ---- prediction ----


def make_row(mode: str, input_len: int, running: float, step_ms: float, **more) -> dict:
    rate = round(1e3 * running / step_ms, 2)
    return {
        "mode": mode,
        "input_len": input_len,
        "running_mean": running,
        "step_ms": dict.fromkeys(PERCENTILES, step_ms) | {"p50": 77.0},
        "decode_tokens_per_second": rate,
    } | more


SIZES = {"num_layers": 2, "top_k": 100, "record_bytes": 1000, "link_gb_per_s": 2.0}


def test_prediction_beside_what_was_measured(capsys):
    """Full KV takes 1 ms + 0.5 ms per request at one length, 2 ms + 1 ms at another. 10 requests'
    misses are 10 * 2 * 100 * 0.2 * 1000 bytes, 0.2 ms at 2 GB/s.
    """
    rows = [
        make_row("full", 100, 2, 2.0),
        make_row("full", 100, 4, 3.0),
        make_row("hisparse", 100, 10, 7.0, hit_rate=0.8),
        make_row("no-io", 100, 10, 6.0, hit_rate=0.8),
        make_row("full", 900, 1, 3.0),
        make_row("full", 900, 3, 5.0),
        make_row("hisparse", 900, 10, 13.0, hit_rate=0.8),
        make_row("full", 50, 1, 3.0),  # one batch size: nothing can be said
        make_row("hisparse", 50, 10, 13.0, hit_rate=0.8),
    ]
    predict(rows, **SIZES)
    key = "predicted_decode_tokens_per_second"
    assert [row.get(key) for row in rows] == [
        *(None, None, round(10 / 6.2e-3, 1), None),
        *(None, None, round(10 / 12.2e-3, 1)),
        *(None, None),
    ]
    assert capsys.readouterr().out.splitlines() == [
        "hisparse, 100 tokens, 10 running: predicted 1613 decode tok/s, measured 1429",
        "hisparse, 900 tokens, 10 running: predicted 820 decode tok/s, measured 769",
    ]


def test_nothing_is_predicted_without_a_link_or_decode_steps(capsys):
    rows = [make_row("full", 100, n, n) for n in (1, 2)]
    rows.append(make_row("hisparse", 100, 4, 4, hit_rate=0.5))
    predict(rows, **SIZES | {"link_gb_per_s": None})
    nothing = {"mode": "full", "input_len": 100, "step_ms": None, "running_mean": None}
    predict([nothing, nothing | {"mode": "hisparse", "hit_rate": None}], **SIZES)
    assert capsys.readouterr().out == ""
    assert "predicted_decode_tokens_per_second" not in rows[-1]


def test_prediction_in_a_run(run, monkeypatch):
    monkeypatch.setattr(bench_decode, "measure_link", lambda device: 10.0)
    result = run("--input-len", 40, "--output-len", 5, "--concurrency", "1,2")
    predicted = [row.get("predicted_decode_tokens_per_second") for row in result.rows]
    assert predicted[0] is predicted[2] is None and predicted[1] > 0 and predicted[3] > 0
    texts = [text for text in result.table if text.startswith("hisparse, 40 tokens")]
    assert result.table[-2:] == texts
    for text, row in zip(texts, result.rows[1::2], strict=True):
        assert text.endswith(f"measured {row['decode_tokens_per_second']:.0f}")


# ---- transformers ----


def test_beside_transformers(run, monkeypatch):
    pytest.importorskip("transformers")
    decode, asked = compare._decode, []

    def noted(reference, batch, cache, num_steps):
        asked.append((tuple(batch.shape), num_steps))
        return decode(reference, batch, cache, num_steps)

    monkeypatch.setattr(compare, "_decode", noted)
    argv = ["--input-len", 40, "--output-len", 4, "--concurrency", "1,2", "--modes", "full"]
    result = run(*argv, "--compare", "transformers")
    rows = [row for row in result.rows if row["mode"] == "transformers"]
    assert [row["concurrency"] for row in rows] == [1, 2] and len(result.rows) == 4
    assert asked == [((1, 40), 3), ((2, 40), 3)]  # the prompt gives the first of four tokens
    for row in rows:
        assert set(row) == set(result.rows[0])
        assert row["running_mean"] == row["running_max"] == row["requests"] == row["concurrency"]
        assert row["decode_tokens_per_second"] > 0 and row["ttft_ms"]["p50"] > 0
    assert result.table[-2:] == [line(row) for row in rows]


def test_transformers_decodes_as_many_steps(monkeypatch):
    """A stand-in that notes what it is asked: each step gets the last one's likeliest tokens."""
    asked, now = [], [0.0]

    def reference(tokens, *args, **settings) -> SimpleNamespace:
        asked.append(tokens.tolist())
        now[0] += len(asked)
        logits = torch.zeros(*tokens.shape, 10)
        logits[:, -1, len(asked)] = 1
        return SimpleNamespace(logits=logits[:, -1:])

    monkeypatch.setattr(compare.time, "perf_counter", lambda: now[0])
    ttft, steps = compare._decode(reference, torch.tensor([[7, 8], [8, 9]]), None, 3)
    assert asked[:2] == [[[7]], [[7, 8], [8, 9]]]  # a warm-up, the prompts
    assert asked[2:] == [[[n], [n]] for n in (2, 3, 4, 5, 6)]
    assert ttft == 2 and steps == [5, 6, 7]  # the second call; 3 and 4 are warm-up


def test_what_transformers_needs(run, random, monkeypatch):
    assert "--compare transformers needs --model" in random("--compare", "transformers").error
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = run("--compare", "transformers", "--input-len", 9)
    assert "--compare transformers: pip install transformers" in result.error
    assert "rows" not in result.report  # before anything is measured


# ---- figure ----


def test_plot(run, tmp_path):
    pytest.importorskip("matplotlib")
    argv = ["--input-len", "30,40", "--output-len", 3, "--plot", tmp_path / "new"]
    result = run(*argv)
    assert result.code == 0 and f"saved {tmp_path / 'new' / 'decode.png'}" in result.err
    data = json.loads((tmp_path / "new" / "decode.json").read_text(encoding="utf-8"))
    assert data["rows"] == result.rows and "3 new tokens" in data["config"]
    assert (tmp_path / "new" / "decode.png").read_bytes().startswith(b"\x89PNG")


def test_what_a_figure_needs_is_known_first(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("--input-len", 30, "--output-len", 3, "--plot", "out")
    assert "minihisparse[plots]" in result.error and "rows" not in result.report


# ---- energy ----


def test_no_energy_without_a_gpu():
    assert energy.joules(torch.device("cpu")) is None


def test_energy_by_a_stand_in_for_nvml(monkeypatch):
    """Millijoules of the board with torch's UUID; None if it does not know the board."""
    seen = []

    class Library:
        failing = None

        def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:
            seen.append(uuid)
            handle._obj.value = 42
            return 6 if self.failing == "handle" else 0

        def nvmlDeviceGetTotalEnergyConsumption(self, handle, millijoules) -> int:
            assert isinstance(handle, ctypes.c_void_p) and handle.value == 42
            millijoules._obj.value = 5_000_000_250
            return 3 if self.failing == "energy" else 0

    library = Library()
    monkeypatch.setattr(energy, "_nvml", lambda: library)
    properties = SimpleNamespace(uuid="01234567-89ab")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = torch.device("cuda")
    assert energy.joules(device) == 5_000_000.25
    assert energy.joules(torch.device("cpu")) is None
    assert seen == [b"GPU-01234567-89ab"]
    for library.failing in ("handle", "energy"):
        assert energy.joules(device) is None
    monkeypatch.setattr(energy, "_nvml", lambda: None)
    assert energy.joules(device) is None


def test_energy_per_token(run, monkeypatch):
    """Of the loop alone: read twice, around it."""
    meter = iter([100.0, 121.0])
    monkeypatch.setattr(energy, "joules", lambda device: next(meter))
    argv = ["--input-len", 40, "--output-len", 3, "--concurrency", 2, "--modes", "full"]
    (row,) = run(*argv).rows
    assert row["joules_per_token"] == 21 / 6


# ---- on a GPU ----


@pytest.mark.gpu
def test_on_a_gpu(capsys, tmp_path):
    """What a CPU does not have: the link, Resolve's times in the graph, and all memory by kind."""
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    result = run_cli(
        capsys,
        *("bench", "decode", "--random-weights", file, "--device", "cuda"),
        *("--input-len", 4096, "--output-len", 16, "--concurrency", "4,8", "--resolve-latency"),
        *("--modes", "full,hisparse,no-io", "--selections", "synthetic:miss=0.25"),
        *("--top-k", 512, "--device-buffer-size", 1024),
    )
    assert result.code == 0 and result.report["link_gb_per_s"] > 1
    for row in result.rows:
        assert row["requests"] == row["concurrency"] and row["decode_tokens_per_second"] > 0
        assert row["allocated_bytes"] > row["memory"]["device_kv_bytes"]
        if row["mode"] != "full":
            misses = 512 + 14 * 128  # in 15 steps of each request and layer
            assert row["hit_rate"] == pytest.approx(1 - misses / (15 * 512), abs=1e-6)
            assert 0 < row["resolve_us"]["p50"] < 1e3 * row["step_ms"]["p99"]
        if row["mode"] == "hisparse":
            assert 0 < row["link_share"] < 1
            assert row["predicted_decode_tokens_per_second"] > 0
        if row["joules_per_token"] is not None:
            assert row["joules_per_token"] >= 0
    no_io, with_io = (
        sum(row["resolve_us"]["mean"] for row in result.rows if row["mode"] == mode)
        for mode in ("no-io", "hisparse")
    )
    assert no_io < with_io
