"""`bench decode`: a row per engine, of as many steps as were asked for, or a refusal.

Guards: an engine that is timed over other work than the others (steps, rounds, context, batch);
warm-up steps that are counted; request rows that a round keeps, so that the next one is refused;
sizes that end in a traceback.
"""

import argparse
import statistics
from collections.abc import Callable

import pytest
import torch

from minihisparse import bench
from minihisparse.cli import build_parser, hisparse_config
from minihisparse.model import Decoder
from minihisparse.runner import Runner
from minihisparse.tokenizer import Tokenizer

SMALL = ["--top-k", "8", "--device-buffer-size", "16", "--page-size", "4", "--disable-tqdm"]
SHORT = ["--input-len", "40", "--output-len", "3", "--num-iters", "2"]


@pytest.fixture(scope="module")
def decoder(tiny_folder) -> Decoder:
    return Decoder.from_folder(tiny_folder, progress=False)


@pytest.fixture(scope="module")
def tokenizer(tiny_folder) -> Tokenizer:
    return Tokenizer.from_folder(tiny_folder)


@pytest.fixture
def run(tiny_folder, decoder, tokenizer) -> Callable[..., dict]:
    """run(*flags): bench_decode's report."""

    def parse(*argv: str) -> argparse.Namespace:
        args = build_parser().parse_args(
            ["bench", "decode", "--model", str(tiny_folder), *SMALL, *argv]
        )
        args.hisparse = hisparse_config(args)
        return args

    def run(*argv: str) -> dict:
        report: dict = {}
        bench.bench_decode(parse(*argv), decoder, tokenizer, report)
        return report

    return run


def assert_rows(report: dict, modes: list[str], steps: int) -> None:
    assert [row["mode"] for row in report["rows"]] == modes
    for row in report["rows"]:
        assert set(row) == {"mode", "ms_per_step_p50", "ms_per_step_min", "steps"}
        assert row["steps"] == steps
        assert 0 < row["ms_per_step_min"] <= row["ms_per_step_p50"]


def test_beside_transformers(run, capsys):
    pytest.importorskip("transformers")
    report = run(*SHORT, "--compare", "transformers", "--batch-size", "2")
    modes = ["transformers", "full", "hisparse"]
    assert_rows(report, modes, steps=2 * 3)
    assert (report["input_len"], report["batch_size"]) == (40, 2)
    assert report["threads"] == torch.get_num_threads()
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["mode", "ms/step,", "median", "fastest"]
    for line, row in zip(lines, report["rows"], strict=True):
        mode, median, fastest = line.split()
        assert mode == row["mode"]
        assert float(median) == pytest.approx(row["ms_per_step_p50"], abs=0.0051)
        assert float(fastest) == pytest.approx(row["ms_per_step_min"], abs=0.0051)


@pytest.mark.parametrize("modes", ["full", "hisparse", "hisparse,full", "full,hisparse"])
def test_modes(run, modes):
    assert_rows(run(*SHORT, "--modes", modes), modes.split(","), steps=6)


def test_one_step(run):
    report = run("--input-len", "1", "--output-len", "1", "--num-iters", "1")
    assert_rows(report, ["full", "hisparse"], steps=1)


def test_every_engine_does_the_same_work(run, monkeypatch):
    """Prefills, and the lengths at which steps ran, of each cache; the engines take turns."""
    calls: dict[str, list] = {}
    turns = []
    prefill, decode = Runner.prefill, Runner.decode

    def name_of(runner: Runner) -> str:
        return type(runner.cache).__name__

    def counted_prefill(self, row, ids):
        turns.append(name_of(self))
        calls.setdefault(name_of(self), []).append(("prefill", row, ids.tolist()))
        return prefill(self, row, ids)

    def counted_decode(self, tokens, batch):
        calls[name_of(self)].append(("decode", tokens.tolist(), batch.seq_lens.tolist()))
        return decode(self, tokens, batch)

    monkeypatch.setattr(Runner, "prefill", counted_prefill)
    monkeypatch.setattr(Runner, "decode", counted_decode)
    run(*SHORT, "--batch-size", "2")
    full, hisparse = calls["FullCache"], calls["HiSparseCache"]
    assert full == hisparse  # the tokens too: they are exact
    assert full[: len(full) // 2] == full[len(full) // 2 :]  # both rounds
    lens = [call[2] for call in full if call[0] == "decode"][: len(full) // 2]
    num_steps = bench.WARM_UP_STEPS + 3
    assert lens[:num_steps] == [[41 + i] * 2 for i in range(num_steps)]
    assert [call[1] for call in full if call[0] == "prefill"] == [0, 1] * 2
    assert turns == (["FullCache"] * 2 + ["HiSparseCache"] * 2) * 2


def test_warm_up_is_not_counted(run, monkeypatch):
    """A clock that shows a step's number as its time: 1 to 4 are warm-up, 5 to 7 count."""
    ticks = []

    def perf_counter() -> float:
        ticks.append(None)
        step = (len(ticks) + 1) // 2  # two readings a step
        return step + (0 if len(ticks) % 2 else step / 1e3)

    monkeypatch.setattr(bench.time, "perf_counter", perf_counter)
    argv = ["--input-len", "40", "--output-len", "3", "--num-iters", "1", "--modes", "full"]
    (row,) = run(*argv)["rows"]
    assert row["steps"] == 3
    assert row["ms_per_step_min"] == 5.0
    assert row["ms_per_step_p50"] == statistics.median([5.0, 6.0, 7.0])


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--input-len", "10000000"], "--input-len 10000000 is more than the text has"),
        # Within the text, but not within the model's 1024 positions.
        (["--input-len", "1024"], "1..1024"),
        (["--modes", "full,half"], "--modes: 'half' is not one of: full, hisparse"),
        (["--modes", ""], "--modes: '' is not one of"),
        (["--batch-size", "0"], "is less than 1"),
    ],
)
def test_refused(run, argv, message):
    with pytest.raises(ValueError, match=message):
        run(*SHORT, *argv)


@pytest.mark.parametrize("flag", ["--input-len", "--output-len", "--num-iters"])
@pytest.mark.parametrize("value", ["0", "-3"])
def test_sizes_below_one_are_refused_by_name(run, flag, value):
    with pytest.raises(ValueError, match=f"{flag} {value} is less than 1"):
        run(*SHORT, flag, value)
