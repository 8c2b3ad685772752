"""`trace size`, from flags to the last line: a trace in which the best B is known, and bad input.

Guards: a table whose numbers are not the replay's; a best B that ignores the budget; halves that
are none; a split that the engine does not accept; a prediction made of nothing; a message that does
not say which flag.
"""

import argparse
import json
from pathlib import Path

import pytest
import torch

from minihisparse.config import HiSparseConfig, parse_device_buffer_size
from minihisparse.replay import replay
from minihisparse.sglang import SGLangFlags
from minihisparse.sizing import miss_curves
from minihisparse.sizing_command import size
from minihisparse.trace import Trace, write_trace
from minihisparse.trace_flags import add_size_flags

K, LAYERS, STEPS, PROMPT = 16, 3, 80, 1000
COST = ["--record-bytes", "512", "--link-gb-per-s", "2", "--fixed-us", "100"]
COST += ["--per-request-us", "1"]


def make_trace(seed: int, reach=(24, 200, 40)) -> Trace:
    """Each layer's picks stay among so many positions; some change in each step."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.empty(STEPS, len(reach), 1, K, dtype=torch.int32)
    for layer, count in enumerate(reach):
        places = torch.randperm(PROMPT, generator=generator)[:count]
        picks = places[:K].clone()
        for step in range(STEPS):
            others = places[~torch.isin(places, picks)]
            order = torch.randperm(len(others), generator=generator)
            picks[torch.randperm(K, generator=generator)[:2]] = others[order[:2]]
            positions[step, layer, 0] = picks.sort().values.int()
    lens = torch.arange(PROMPT + 1, PROMPT + 1 + STEPS, dtype=torch.int32)
    return Trace(positions, lens[:, None])


@pytest.fixture(scope="module")
def trace() -> Trace:
    return make_trace(0)


@pytest.fixture(scope="module")
def file(trace, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("size") / "trace.safetensors"
    write_trace(path, trace)
    return str(path)


def run(*words: str) -> dict:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_size_flags(parser)
    report: dict = {}
    assert size(parser.parse_args([*words, "--disable-tqdm"]), report) == 0
    return json.loads(json.dumps(report, allow_nan=False))


# ---- misses ----


def test_rows_are_the_replays(trace, file):
    report = run(file, "--warmup-steps", "5")
    assert [row["device_buffer_size"] for row in report["rows"]] == [16, 24, 32, 48, 64, 96, 128]
    for row in report["rows"]:
        b = row["device_buffer_size"]
        engine, lru = (replay(trace, policy, b) for policy in ("engine", "lru"))
        assert row["miss_rate"] == round(engine.miss_rate(5), 6)
        assert row["lru_miss_rate"] == round(lru.miss_rate(5), 6)
        assert row["layer_miss_rates"] == [round(rate, 6) for rate in engine.layer_miss_rates(5)]
    gaps = [row["miss_rate"] - row["lru_miss_rate"] for row in report["rows"]]
    assert abs(report["largest_gap_to_lru"]) == pytest.approx(max(map(abs, gaps)), abs=1e-6)
    assert report["trace"] == {
        "file": file,
        "bytes": Path(file).stat().st_size,
        "steps": STEPS,
        "layers": LAYERS,
        "requests": 1,
        "top_k": K,
        "longest": PROMPT + STEPS,
        "metadata": {},
    }


def test_sizes_that_are_asked_for(file):
    report = run(file, "--device-buffer-size", "20,16,2000")
    assert [row["device_buffer_size"] for row in report["rows"]] == [16, 20, 2000]
    assert report["rows"][-1]["miss_rate"] == report["rows"][-1]["lru_miss_rate"] == 0.0


def test_what_is_missing_is_said(file, capsys):
    report = run(file)
    assert report["best"] is None and "cost" not in report
    out, printed = capsys.readouterr()
    assert out == ""  # all of it is for the report
    assert "no prediction without --record-bytes" in printed
    assert "--steps, or --fixed-us and --per-request-us" in printed
    assert "--device-buffer-size" not in printed


# ---- prediction ----


def test_the_best_size_is_the_best_of_the_curve(trace, file, capsys):
    report = run(file, *COST, "--hbm-budget-gib", "0.005")
    best, curves = report["best"], miss_curves(trace)
    found = best["device_buffer_size"]
    rows = {row["device_buffer_size"]: row for row in report["rows"]}
    assert rows[found]["tokens_per_second"] == best["tokens_per_second"]
    assert (
        max(row["tokens_per_second"] for row in rows.values()) * 0.985 < (best["tokens_per_second"])
    )
    # By hand: a row of 3 layers of B + 1 records and 6 B bytes of tables, and little more.
    per_row = 3 * ((found + 1) * 512 + 6 * found) + 8 + 4 * 68 + 12 * K + 64
    assert best["requests"] == int(0.005 * 2**30) // per_row
    missed = best["requests"] * 3 * K * best["miss_rate"]
    step_us = 100 + best["requests"] + 3 * (4 + 0.8e-3 * found + 2) + missed * 512 / 1800
    assert best["tpot_ms"] == pytest.approx(step_us / 1e3, abs=1e-3)
    low, high = best["within_2_percent"]
    assert low <= found <= high < curves.largest
    assert f"best B: {found}" in capsys.readouterr().err


def test_halves_are_halves(trace, file):
    report = run(file, *COST, "--max-running-requests", "8", "--warmup-steps", "10")
    halves, b = report["best"]["halves"], report["best"]["device_buffer_size"]
    result = replay(trace, "engine", b)
    for rate, part in zip(halves["miss_rate"], (slice(10, 45), slice(45, 80)), strict=True):
        assert rate == round(int(result.misses[part].sum()) / (35 * LAYERS * K), 6)
    first, second = halves["tokens_per_second"]
    assert halves["first_predicts_second"] == pytest.approx(first / second - 1, abs=1e-4)
    assert halves["lost_by_choice_of_first"] >= 0 and len(halves["best"]) == 2


def test_a_slower_link_wants_more_slots(file):
    words = [file, *COST, "--hbm-budget-gib", "0.005", "--link-gb-per-s"]
    slow, fast = (run(*words, link)["best"]["device_buffer_size"] for link in ("0.5", "200"))
    assert slow > fast


def test_steps_of_a_bench(file, tmp_path):
    path = tmp_path / "decode.json"
    rows = [
        {"mode": "full", "input_len": n, "running_mean": r, "step_ms": {"mean": (50 * n + 3 * r)}}
        for n in (1, 2)
        for r in (1, 9)
    ]
    path.write_text(json.dumps({"rows": rows}))
    cost = ["--record-bytes", "512", "--link-gb-per-s", "2", "--max-running-requests", "4"]
    words = [file, *cost, "--steps", str(path)]
    report = run(*words, "--input-len", "2")
    assert report["cost"]["fixed_us"] == pytest.approx(100e3)
    assert report["cost"]["per_request_us"] == pytest.approx(3e3)
    assert report["cost"]["link_gb_per_s"] == pytest.approx(1.8)
    assert report["fit"] == {"rows": 2, "worst_error": pytest.approx(0, abs=1e-4)}
    with pytest.raises(ValueError, match=r"decode.json: it has prompts of \[1, 2\] tokens.*input"):
        run(*words)
    for text in ("[]", "{}", '{"rows": [{"input_len": 2}]}', "what"):
        path.write_text(text)
        with pytest.raises(ValueError, match="--steps .*decode.json: "):
            run(*words)
    path.write_text(json.dumps({"rows": rows[:1]}))
    with pytest.raises(ValueError, match="decode.json: got batches .* expected two different"):
        run(*words)


# ---- what follows from it ----


def test_per_layer_fits_the_engine_and_gains(trace, file, tmp_path, capsys):
    other = tmp_path / "other.safetensors"
    write_trace(other, make_trace(1))
    report = run(file, "--per-layer", "--total-slots", "180", "--held-out", str(other))
    split = report["per_layer"]
    sizes = split["device_buffer_size"]
    assert sum(sizes) == split["total_slots"] <= 180 and min(sizes) >= K
    assert sizes[1] > sizes[2] > sizes[0]
    assert split["miss_rate"] == round(replay(make_trace(1), "engine", sizes).miss_rate(), 6)
    assert split["uniform_miss_rate"] == round(replay(make_trace(1), "engine", 60).miss_rate(), 6)
    assert split["saved"] > 0.05 and split["groups"] == [[0], [1], [2]]
    flag = capsys.readouterr().err.split("--device-buffer-size ")[1].split()[0]
    assert parse_device_buffer_size(flag) == tuple(sizes)
    HiSparseConfig(top_k=K, device_buffer_size=parse_device_buffer_size(flag))


def test_per_layer_without_another_trace_is_measured_on_the_second_half(trace, file, capsys):
    report = run(file, "--per-layer", *COST, "--max-running-requests", "4")
    split, best = report["per_layer"], report["best"]["device_buffer_size"]
    assert split["total_slots"] <= 3 * best
    half = Trace(trace.positions[40:], trace.seq_lens[40:])
    assert split["uniform_miss_rate"] == round(replay(half, "engine", best).miss_rate(), 6)
    assert split["measured_on"] == "the second half, sized on the first"
    assert len(split["tokens_per_second"]) == 2


@pytest.mark.parametrize(
    ("metadata", "groups", "source"),
    [
        ({}, [[0, 1], [2, 3], [4, 5]], "equal selections"),
        (
            {"settings": '{"anchor_of": [0, 0, 2, 2, 4, 5]}'},
            [[0, 1], [2, 3], [4], [5]],
            "the trace's anchor_of",
        ),
    ],
    ids=["found", "declared"],
)
def test_layers_in_lockstep_get_one_size(tmp_path, capsys, metadata, groups, source):
    trace, file = make_trace(0), str(tmp_path / "t.safetensors")
    positions = trace.positions[:, [0, 0, 1, 1, 2, 2]].contiguous()
    write_trace(file, Trace(positions, trace.seq_lens, metadata))
    split = run(file, "--per-layer", "--total-slots", "360")["per_layer"]
    assert split["groups"] == groups and split["groups_from"] == source
    sizes = split["device_buffer_size"]
    assert sizes[0] == sizes[1] and sizes[2] == sizes[3]
    said = f"shared out among {len(groups)} groups of layers in lockstep (by {source})"
    assert said in capsys.readouterr().err


def test_sglang_gets_the_best_size(file, capsys):
    words = [file, *COST, "--max-running-requests", "8", "--layers", "78", "--max-model-len"]
    report = run(*words, "100000", "--model", "some/model")
    found, best = report["sglang"], report["best"]["device_buffer_size"]
    flags = SGLangFlags(K, best, 100_000, 8)
    assert found == flags.report() | {
        "host_bytes": flags.host_bytes(78, 512),
        "launch": flags.launch_line("some/model"),
    }
    printed = capsys.readouterr().err
    assert found["launch"] in printed and flags.config_flag() in printed
    assert f"{found['host_bytes'] / 2**30:.1f} GiB in each rank" in printed
    assert "warning" not in printed
    assert run(file)["sglang"] == SGLangFlags(K, 2 * K, PROMPT + STEPS, 1).report()


def test_too_little_host_memory_for_sglang_is_said(file, capsys):
    """Its ratio is whole, and its buffers are pages: a bit more than the requests need."""
    run(file, *COST, "--host-gib", str(3.01 * (PROMPT + STEPS) * 3 * 512 / 2**30))
    assert "warning: more than --host-gib" in capsys.readouterr().err


def test_figure(file, tmp_path):
    pytest.importorskip("matplotlib")
    for words in ([], [*COST, "--hbm-budget-gib", "0.005"]):
        folder = tmp_path / str(len(words))
        report = run(file, *words, "--plot", str(folder))
        assert (folder / "size.png").stat().st_size > 10_000
        data = json.loads((folder / "size.json").read_text())
        assert data["engine"] == report["rows"]
        assert ("tpot_ms" in data["curve"][0]) == bool(words)
        assert data["curve"][0]["device_buffer_size"] == K


# ---- bad input ----


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device-buffer-size", "15"], r"--device-buffer-size 15 is not in 16\.\.32767"),
        (["--device-buffer-size", "40000"], "--device-buffer-size 40000 is not in"),
        (["--warmup-steps", "79"], "--warmup-steps 79 of 80 steps"),
        (["--warmup-steps", "-1"], "--warmup-steps -1"),
        ([*COST], "--hbm-budget-gib, --host-gib or --max-running-requests"),
        ([*COST, "--hbm-budget-gib", "0.00001"], "not one request of 1080 tokens fits"),
        ([*COST, "--host-gib", "0.00001"], "not one request of 1080 tokens fits"),
        ([*COST, "--steps", "x"], "--steps and --fixed-us"),
        (["--per-layer", "--total-slots", "47"], "--total-slots 47 is less than K = 16"),
        (["--per-layer", "--layers", "78"], "--per-layer needs a trace of all layers"),
        (["--total-slots", "300"], "--total-slots is of --per-layer; pass both"),
        (["--held-out", "x"], "--held-out is of --per-layer; pass both"),
        ([*COST, "--input-len", "2"], "--input-len picks rows of --steps; pass both"),
    ],
)
def test_bad_values_are_refused(file, words, message):
    with pytest.raises(ValueError, match=message):
        run(file, *words)


def test_files_that_are_none(file, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run(str(tmp_path / "nowhere"))
    (tmp_path / "bad").write_text("no trace")
    with pytest.raises(ValueError, match="bad is no selection trace"):
        run(str(tmp_path / "bad"))
    with pytest.raises(ValueError, match="bad is no selection trace"):
        run(file, "--per-layer", "--held-out", str(tmp_path / "bad"))
    write_trace(tmp_path / "other", make_trace(0, reach=(24, 40)))
    with pytest.raises(ValueError, match="traces of 3 layers with K = 16 and of 2 with K = 16"):
        run(file, "--per-layer", "--held-out", str(tmp_path / "other"))
    cost = ["--record-bytes", "512", "--link-gb-per-s", "2", "--max-running-requests", "4"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run(file, *cost, "--steps", str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--record-bytes", "0"),
        ("--link-gb-per-s", "inf"),
        ("--link-gb-per-s", "nan"),
        ("--fixed-us", "-1"),
        ("--max-running-requests", "x"),
        ("--device-buffer-size", "512;1024"),
    ],
)
def test_flags_that_are_no_numbers(file, flag, value, capsys):
    with pytest.raises(SystemExit):
        run(file, flag, value)
    assert flag in capsys.readouterr().err
