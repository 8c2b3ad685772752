"""`bench serve`: who comes when, what they see, and the same arrivals for every cache.

Guards: a load that a cache does not get; TTFT without the wait in the queue; a batch that is
smaller than anybody asked for; flags that are accepted and ignored; rows that are lost.
"""

import json
import re
import sys
from collections.abc import Callable

import pytest
from bench_rig import (
    NUM_LAYERS,
    RECORD_BYTES,
    ROW_KEYS,
    SMALL,
    B,
    Clock,
    Run,
    budget_of,
    make_quick,
    run_cli,
    slow_engine,
)

from minihisparse import bench_engine, bench_serve
from minihisparse.workload import percentiles, poisson


@pytest.fixture
def run(capsys, monkeypatch, tiny_folder) -> Callable[..., Run]:
    """run("--input-len", 40, ...): bench serve of the tiny folder."""
    make_quick(monkeypatch)

    def run(*argv: object, model=tiny_folder) -> Run:
        return run_cli(capsys, "bench", "serve", "--model", model, *SMALL, "--device", "cpu", *argv)

    return run


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A prefill takes 1 s, a decode step 0.1 s; an engine's first ones 50 s more."""
    clock = Clock(monkeypatch)
    slow_engine(clock, monkeypatch, first_s=50.0)
    return clock


@pytest.fixture
def arrivals(tmp_path) -> Callable[[str], str]:
    def write(text: str) -> str:
        file = tmp_path / "arrivals.csv"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


@pytest.fixture
def loops(monkeypatch) -> list[list[tuple]]:
    """Of each point that is run: (arrival, prompt tokens, new tokens, prompt) of its requests."""
    loops, loop = [], bench_serve.run_open_loop

    def noted(*args, **settings):
        requests = loop(*args, **settings)
        first = requests[0].arrival
        loops.append(
            [
                (r.arrival - first, len(r.prompt_ids), len(r.output_ids), r.prompt_ids)
                for r in requests
            ]
        )
        return requests

    monkeypatch.setattr(bench_serve, "run_open_loop", noted)
    return loops


# ---- rows ----


def test_a_row_by_hand(run, clock, arrivals):
    """Two rows; a prompt of 20 tokens is in the slots, so hisparse misses nothing.

    time  1.0      2.0      2.1      2.2      5.0 ... 6.0
          0 first  1 first  0, 1     0        2 comes at 5.0
          1 came at 0.5
    """
    file = arrivals("0, 10, 3\n0.5, 8, 2\n5, 4, 1\n")
    for row in run("--arrivals", file, "--max-running-requests", 2).rows:
        assert set(row) == ROW_KEYS | {"request_rate"}
        assert row["request_rate"] == 0.6 and row["input_len"] == 10  # 3 in 5 s
        assert row["requests"] == 3 and row["running_max"] == 2 and row["hbm_budget_gib"] is None
        # 0 is prefilled 0..1 and decodes in 1.0..1.1, then 1 is prefilled ..2.1; both: 2.2.
        assert row["ttft_ms"] == percentiles([1000, 2100 - 500, 1000])
        assert row["itl_ms"] == percentiles([100, 1100, 100])
        assert row["tpot_ms"] == percentiles([600, 100])
        assert row["running_mean"] == 1.5  # 1, then 2
        assert row["decode_tokens_per_second"] == 15.0
        assert row["tokens_per_second"] == 1.0  # 6 in 6 s
    full, hisparse = run("--arrivals", file, "--max-running-requests", 2).rows
    assert full["hit_rate"] is None and hisparse["hit_rate"] == 1.0
    kv = hisparse["memory"]["device_kv_bytes"]
    assert kv == 2 * (B + 1) * NUM_LAYERS * RECORD_BYTES


def test_ttft_grows_with_the_queue(run, clock):
    """A request takes 1.1 s of the engine: at 10 per second they queue, at 0.1 hardly any do."""
    argv = ["--input-len", 20, "--output-len", 2, "--num-requests", 12, "--modes", "full"]
    slow, fast = run(*argv, "--request-rate", "0.1,10", "--max-running-requests", 2).rows
    assert slow["request_rate"] == 0.1 and fast["request_rate"] == 10
    assert slow["ttft_ms"]["p50"] == 1000.0
    assert fast["ttft_ms"]["mean"] > 4000
    assert slow["tokens_per_second"] < fast["tokens_per_second"]


def test_the_table(run, clock):
    result = run("--input-len", 20, "--output-len", 3, "--num-requests", 2, "--request-rate", 2.5)
    assert "req/s" in result.table[0] and "clients" not in result.table[0]
    assert [text.split()[:4] for text in result.table[1:]] == [
        ["full", "20", "-", "2.5"],
        ["hisparse", "20", "-", "2.5"],
    ]


# ---- loads ----


def test_every_cache_is_sent_the_same(run, clock, loops):
    argv = ["--input-len", "20,30", "--output-len", 3, "--num-requests", 5]
    result = run(*argv, "--request-rate", "2,4", "--seed", 7, "--modes", "full,hisparse,no-io")
    keys = ("input_len", "request_rate", "mode")
    assert [tuple(row[key] for key in keys) for row in result.rows] == [
        (input_len, rate, mode)
        for input_len in (20, 30)
        for rate in (2, 4)
        for mode in ("full", "hisparse", "no-io")
    ]
    for at in range(0, len(loops), 3):
        assert [r[1:] for r in loops[at]] == [r[1:] for r in loops[at + 1]]
        assert [r[1:] for r in loops[at]] == [r[1:] for r in loops[at + 2]]
        row = result.rows[at]
        expected = poisson(row["request_rate"], 5, row["input_len"], 3, seed=7)
        for loop in loops[at : at + 3]:
            assert [r[0] for r in loop] == pytest.approx([a.seconds for a in expected])
            assert [r[1:3] for r in loop] == [(row["input_len"], 3)] * 5


def test_arrivals_of_a_file(run, clock, loops, arrivals):
    """Lengths of their own; the cache has room for the longest request, not for the longest prompt
    with the longest answer.
    """
    file = arrivals("# two\n0,900,2\n0.25,5,1000\n")
    result = run("--arrivals", file, "--modes", "full", "--max-running-requests", 1)
    assert [r[:3] for r in loops[0]] == [(0.0, 900, 2), (0.25, 5, 1000)]
    assert result.report["output_len"] is None
    slots = result.rows[0]["memory"]["device_kv_bytes"] / (NUM_LAYERS * RECORD_BYTES)
    assert slots == 1005


def test_arrivals_with_a_common_prefix(run, clock, loops, arrivals):
    """A shorter prompt is all prefix; one token of it is computed, for its logits."""
    file = arrivals("0,60,9\n0,30,9\n0,50,9\n")
    argv = ["--arrivals", file, "--modes", "hisparse", "--prefix-len", 40]
    (row,) = run(*argv, "--enable-prefix-sharing").rows
    prompts = [prompt for _, _, _, prompt in loops[0]]
    assert prompts[0][:40] == prompts[2][:40] and prompts[0][:30] == prompts[1]
    assert row["prefix"]["tokens_shared"] == 28 + 40  # whole pages of 4
    assert row["prefix"]["tokens_computed"] == 60 + 2 + 10
    assert run(*argv).rows[0]["prefix"]["tokens_shared"] == 0
    assert "--prefix-len -1 is not in" in run(*argv, "--prefix-len", -1).error


def test_arrivals_at_once_have_no_rate(run, clock, arrivals):
    result = run("--arrivals", arrivals("0,9,2\n0,8,2\n"), "--modes", "full")
    assert result.rows[0]["request_rate"] is None
    assert result.table[1].split()[:4] == ["full", "9", "-", "-"]


def test_defaults(run, monkeypatch):
    """64 requests of 1,024 + 64 tokens at 1 per second; 8 at once."""
    jobs = []
    monkeypatch.setattr(bench_serve, "num_rows", lambda *args: None)
    monkeypatch.setattr(bench_serve, "jobs_of", keep(bench_serve.jobs_of, jobs))
    monkeypatch.setattr(bench_serve, "measure", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("--modes", "full")
    ((point, rate, arrivals),) = jobs[-1]
    assert point[:4] == (1024, 1088, None, None) and rate == 1.0 and len(arrivals) == 64
    assert arrivals == poisson(1.0, 64, 1024, 64, seed=0)


def keep(function: Callable, results: list) -> Callable:
    def kept(*args):
        results.append(function(*args))
        return results[-1]

    return kept


def test_rows_at_once(run, clock):
    """8, what is asked for, or what the budget holds."""
    argv = ["--input-len", 20, "--output-len", 4, "--num-requests", 3, "--modes", "full"]
    (row,) = run(*argv).rows
    assert row["running_max"] == 8
    (row,) = run(*argv, "--max-running-requests", 3).rows
    assert row["running_max"] == 3
    gib = budget_of("full", 5, 24)
    (row,) = run(*argv, "--hbm-budget-gib", gib).rows
    assert row["running_max"] == 5 and row["hbm_budget_gib"] == gib


# ---- refusals, interruptions, figures ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--modes", "half"], "--modes: 'half' is not one of"),
        (["--output-len", "0"], "--output-len 0 is less than 1"),
        (["--num-requests", "-1"], "--num-requests -1 is less than 1"),
        (["--prefix-len", "20"], r"--prefix-len 20 is not in 0\.\.19, below --input-len"),
        (["--max-running-requests", "0"], "--max-running-requests 0 is less than 1"),
        (["--hbm-budget-gib", "1,1e-7"], "--hbm-budget-gib 1e-07 is less than one request of 26"),
        (["--input-len", "20,1023"], "requests of 1029 tokens, but the model was made for 1024"),
        (["--max-model-len", "25"], "a request of 26 tokens, .* is more than --max-model-len 25"),
    ],
)
def test_refused(run, monkeypatch, argv, message):
    monkeypatch.setattr(bench_engine, "make_runner", None)
    result = run("--input-len", "20", "--output-len", "6", *argv)
    assert re.search(message, result.error) and "rows" not in result.report


def test_arrivals_that_are_refused(run, arrivals, tmp_path):
    file = arrivals("0,9,2\n")
    for flags in (
        ["--input-len", 20],
        ["--output-len", 64],  # given is given, even if it is the default
        ["--num-requests", 1, "--request-rate", 2],
    ):
        error = run("--arrivals", file, *flags).error
        assert "--arrivals and " in error and "set the same things" in error
        assert all(flag in error for flag in flags[::2])
    nowhere = {"model": tmp_path / "nowhere"}  # refused before a model is loaded
    assert "line 1: '0,9'" in run("--arrivals", arrivals("0,9\n"), **nowhere).error
    assert "nowhere.csv" in run("--arrivals", tmp_path / "nowhere.csv", **nowhere).error
    assert "--modes" in run("--modes", "half", **nowhere).error


def test_rows_so_far_survive_ctrl_c(run, clock, monkeypatch):
    measure, calls = bench_serve.measure, []

    def interrupted(*args) -> dict:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*args)

    monkeypatch.setattr(bench_serve, "measure", interrupted)
    result = run("--input-len", 20, "--output-len", 3, "--num-requests", 3)
    assert result.code == 130 and result.report["interrupted"] is True
    assert [row["mode"] for row in result.rows] == ["full"] and len(result.table) == 2


def test_beyond_the_models_limit(run, clock, arrivals):
    argv = ["--arrivals", arrivals("0,4,2\n0,1100,2\n"), "--modes", "full"]
    assert "--allow-beyond-model-limit" in run(*argv).error
    result = run(*argv, "--allow-beyond-model-limit")
    assert result.code == 0 and "positions from 1024 on are beyond" in result.err


def test_plot(run, clock, tmp_path, arrivals):
    pytest.importorskip("matplotlib")
    file = arrivals("0,9,2\n1,8,2\n")
    result = run("--arrivals", file, "--plot", tmp_path)
    assert result.code == 0 and (tmp_path / "serve.png").is_file()
    data = json.loads((tmp_path / "serve.json").read_text(encoding="utf-8"))
    assert data["rows"] == result.rows and "arrivals of arrivals.csv" in data["config"]


def test_what_a_figure_needs_is_known_first(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "minihisparse[plots]" in run("--plot", "out").error
