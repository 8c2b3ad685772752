"""What tests of the benchmarks share: a command in process, and a clock that nobody waits for."""

import json
import time
from dataclasses import dataclass

import pytest
from conftest import make_tiny_config

from minihisparse import bench_decode, bench_engine, bench_serve, cli
from minihisparse.capacity import plan_capacity
from minihisparse.config import HiSparseConfig
from minihisparse.decode_step import DecodeStep
from minihisparse.runner import Runner

K, B, PAGE, NUM_LAYERS = 8, 16, 4, 2
RECORD_BYTES = 32 * 4  # conftest's folder: 2 KV heads of 8, K and V, fp32
SMALL = ["--top-k", str(K), "--device-buffer-size", str(B), "--page-size", str(PAGE)]
PERCENTILES = {"mean", "p50", "p99", "p99_9"}
ROW_KEYS = {
    "mode",
    "input_len",
    "hbm_budget_gib",
    "requests",
    "running_mean",
    "running_max",
    "decode_tokens_per_second",
    "tokens_per_second",
    "step_ms",
    "ttft_ms",
    "tpot_ms",
    "itl_ms",
    "hit_rate",
    "bytes_h2d_per_step",
    "link_share",
    "joules_per_token",
    "memory",
    "prefix",
}


TEXT_IDS = [7 * i % 288 for i in range(5000)]


def make_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No real text, which takes a second to encode, and no search for garbage, which takes as long
    as the process is large: test_workload.py has the one, `test_every_point_is_freed` the other.
    """
    monkeypatch.setattr(bench_engine, "text_ids", lambda tokenizer: TEXT_IDS)
    for bench in (bench_decode, bench_serve):
        monkeypatch.setattr(bench, "free_memory", lambda device: None)


@dataclass
class Run:
    """table: stdout without its last line, the report."""

    code: int
    table: list[str]
    report: dict
    err: str

    @property
    def rows(self) -> list[dict]:
        return self.report["rows"]

    @property
    def error(self) -> str:
        assert self.code == 1 and f"error: {self.report['error']}" in self.err.splitlines()
        assert "Traceback" not in self.err
        return self.report["error"]


def run_cli(capsys: pytest.CaptureFixture, *argv: object) -> Run:
    """A command without bars. Its last line must be strict JSON, whatever happened."""
    capsys.readouterr()
    code = cli.main([*map(str, argv), "--disable-tqdm"])
    out, err = capsys.readouterr()
    *table, last = out.splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in the JSON line")

    return Run(code, table, json.loads(last, parse_constant=refuse), err)


class Clock:
    """In place of time.perf_counter and time.sleep: time passes in a sleep, or by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.naps: list[float] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.naps.append(seconds)
        self.now += max(seconds, 1e-9)  # or a nap too short for a float would never end


def slow_engine(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    prefill_s: float = 1.0,
    step_s: float = 0.1,
    first_s: float = 0.0,
) -> None:
    """Every prefill and decode step takes so long; each runner's first ones `first_s` more."""

    def slow_down(owner: type, name: str, seconds: float) -> None:
        right, has_run = getattr(owner, name), set()

        def slow(self, *args):
            clock.now += seconds + (0 if self in has_run else first_s)
            has_run.add(self)
            return right(self, *args)

        monkeypatch.setattr(owner, name, slow)

    slow_down(Runner, "prefill", prefill_s)
    slow_down(DecodeStep, "__call__", step_s)


def budget_of(cache: str, rows: int, tokens: int) -> float:
    """GiB that hold so many requests of so many tokens in a cache, and hardly more."""
    capacity = plan_capacity(
        make_tiny_config(num_hidden_layers=NUM_LAYERS),  # of the folder's KV, too
        HiSparseConfig(top_k=K, device_buffer_size=B, page_size=4),
        cache=cache,
        itemsize=4,
        max_model_len=tokens,
        max_running_requests=rows,
    )
    return (capacity.total_bytes + 100) / 2**30
