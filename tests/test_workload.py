"""Prompts, arrivals, both loops, and latencies: by hand, on a clock that only tests turn.

Guards: a loop that sends too many requests at once, or too few; a request that is sent before its
time, or whose wait does not count; an answer that ends early; an error that is taken for an end; a
percentile of the wrong list; an arrival that never comes.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from bench_rig import Clock, slow_engine
from conftest import make_tiny_config, make_tiny_decoder

from minihisparse.assembly import make_runner
from minihisparse.config import HiSparseConfig
from minihisparse.decode_step import DecodeStep
from minihisparse.model import Decoder
from minihisparse.request import Request
from minihisparse.sampling import SamplingParams
from minihisparse.scheduler import Scheduler
from minihisparse.tokenizer import Tokenizer
from minihisparse.workload import (
    STRIDE,
    Arrival,
    latencies,
    percentiles,
    poisson,
    prompts_of,
    read_arrivals,
    run_closed_loop,
    run_open_loop,
    text_ids,
)


def make_scheduler(rows: int = 2, model: Decoder | None = None) -> Scheduler:
    model = model or make_tiny_decoder(num_hidden_layers=1)
    runner = make_runner(
        model,
        cache="hisparse",
        selector="quest",
        hisparse=HiSparseConfig(top_k=8, device_buffer_size=16, page_size=4),
        max_model_len=48,
        max_running_requests=rows,
    )
    return Scheduler(runner, DecodeStep(runner))


def make_prompts(input_len: int = 20) -> Iterator[list[int]]:
    return prompts_of(range(128), input_len)


# ---- prompts ----


def test_prompts_go_round_the_text():
    ids = list(range(10))
    assert STRIDE % len(ids) == 7
    short = prompts_of(ids, 4)
    assert [next(short) for _ in range(3)] == [[0, 1, 2, 3], [7, 8, 9, 0], [4, 5, 6, 7]]
    long = prompts_of(ids, 23)
    assert next(long) == [*ids, *ids, 0, 1, 2]
    assert next(long) == [7, 8, 9, *ids, *ids]


def test_the_text_is_real_and_long(tiny_folder):
    tokenizer = Tokenizer.from_folder(tiny_folder)
    ids = text_ids(tokenizer)
    assert len(ids) > 200_000
    assert "import" in tokenizer.decode(ids[:4000])
    prompts = prompts_of(ids, 100)
    assert len({tuple(next(prompts)) for _ in range(500)}) == 500


# ---- closed loop ----


@pytest.mark.parametrize(
    ("concurrency", "num_requests", "most"), [(1, 3, 1), (3, 7, 3), (4, 2, 2), (5, 5, 5)]
)
def test_closed_loop(monkeypatch, concurrency, num_requests, most):
    """Clients, not rows, limit what is in flight; every request is served whole."""
    scheduler = make_scheduler(rows=2)
    in_flight, served = [], []
    step = scheduler.step

    def counted_step() -> None:
        in_flight.append(len(scheduler.waiting) + len(scheduler.running))
        # As long as there is something to send, a client does not pause.
        assert in_flight[-1] == min(concurrency, num_requests - len(served))
        step()

    monkeypatch.setattr(scheduler, "step", counted_step)
    requests = run_closed_loop(
        scheduler,
        make_prompts(),
        5,
        concurrency=concurrency,
        num_requests=num_requests,
        progress=lambda: served.append(1),
    )
    assert max(in_flight) == most
    assert len(requests) == len(served) == num_requests
    assert [r.index for r in requests] == list(range(num_requests))
    expected = make_prompts()
    for request in requests:
        assert request.prompt_ids == next(expected)
        assert len(request.output_ids) == 5 and request.finish_reason == "length"
        assert not request.unread
    assert not scheduler.has_unfinished and not scheduler.runner.cache.rows


def test_answers_do_not_end_early():
    """Every token ends a text of this model, and yet none does."""
    config = make_tiny_config(num_hidden_layers=1, eos_token_ids=tuple(range(128)))
    scheduler = make_scheduler(model=Decoder.random(config, seed=0))
    requests = run_closed_loop(scheduler, make_prompts(), 6, concurrency=2, num_requests=3)
    assert [len(r.output_ids) for r in requests] == [6, 6, 6]


def test_a_refused_request_ends_the_run():
    with pytest.raises(RuntimeError, match="prompt 0: .*--max-model-len"):
        run_closed_loop(make_scheduler(), make_prompts(60), 5, concurrency=1, num_requests=3)


@pytest.mark.parametrize("loop", ["closed", "open"])
def test_an_error_half_way_ends_the_run(monkeypatch, loop):
    """Request 2's prefill gives no numbers."""
    scheduler = make_scheduler()
    prefill, calls = scheduler.runner.prefill, []

    def broken(*args) -> torch.Tensor:
        calls.append(1)
        logits = prefill(*args)
        return logits * float("nan") if len(calls) == 3 else logits

    monkeypatch.setattr(scheduler.runner, "prefill", broken)
    with pytest.raises(RuntimeError, match="prompt 2: .* largest logit is no finite number"):
        if loop == "closed":
            run_closed_loop(scheduler, make_prompts(), 5, concurrency=2, num_requests=9)
        else:
            run_open_loop(scheduler, make_prompts(), [Arrival(0.0, 20, 5)] * 9)


# ---- open loop, latencies ----


@pytest.fixture
def clock(monkeypatch) -> Clock:
    """A prefill takes a second, a decode step a tenth of one."""
    clock = Clock(monkeypatch)
    slow_engine(clock, monkeypatch)
    return clock


def test_open_loop_by_hand(clock, monkeypatch):
    """One row, so request 1 waits for the end of request 0; before request 2 nobody is there.

    request  arrives  prefilled    tokens at
    0        0.00     0.00..1.00   1.0  1.1  1.2
    1        0.05     1.20..2.20   2.2  2.3
    2        3.00     3.00..4.00   4.0  4.1  4.2
    """
    scheduler = make_scheduler(rows=1)
    sent_at, served = [], []
    add = scheduler.add

    def noted_add(request: Request) -> None:
        sent_at.append(clock.now)
        add(request)

    monkeypatch.setattr(scheduler, "add", noted_add)
    clock.now = 100.0
    arrivals = [Arrival(0.0, 20, 3), Arrival(0.05, 7, 2), Arrival(3.0, 20, 3)]
    requests = run_open_loop(
        scheduler, make_prompts(20), arrivals, progress=lambda: served.append(1)
    )
    assert [r.arrival for r in requests] == pytest.approx([100.0, 100.05, 103.0])
    assert all(at >= r.arrival for at, r in zip(sent_at, requests, strict=True))
    assert sent_at[2] == pytest.approx(103.0)
    assert clock.naps == pytest.approx([0.7])  # from 102.3
    assert [len(r.prompt_ids) for r in requests] == [20, 7, 20]
    expected = [[1.0, 1.1, 1.2], [2.2, 2.3], [4.0, 4.1, 4.2]]
    for request, times in zip(requests, expected, strict=True):
        assert request.token_times == pytest.approx([100 + t for t in times])
    assert len(served) == 3

    seen = latencies(requests)
    assert seen["ttft_ms"]["mean"] == pytest.approx((1000 + 2150 + 1000) / 3, abs=0.001)
    assert seen["ttft_ms"]["p50"] == pytest.approx(1000, abs=0.001)
    assert seen["tpot_ms"]["mean"] == seen["itl_ms"]["mean"] == pytest.approx(100, abs=0.001)


def test_open_loop_keeps_the_order_and_shares_the_batch(clock, monkeypatch):
    """Three at once into two rows: the third starts when the first two have left."""
    scheduler = make_scheduler(rows=2)
    started = []
    prefill = scheduler.runner.prefill
    monkeypatch.setattr(
        scheduler.runner, "prefill", lambda *args: (started.append(clock.now), prefill(*args))[1]
    )
    requests = run_open_loop(scheduler, make_prompts(), [Arrival(0.0, 20, 2)] * 3)
    assert started == pytest.approx([0.0, 1.0, 2.1])
    assert [r.token_times[0] for r in requests] == pytest.approx([1.0, 2.0, 3.1])
    assert [r.token_times[1] for r in requests] == pytest.approx([2.1, 2.1, 3.2])
    assert latencies(requests)["ttft_ms"]["p50"] == pytest.approx(2000)


def test_requests_during_a_step_have_arrived_in_it(clock):
    """The engine is busy for a second from 0 on; who came meanwhile has waited since then."""
    arrivals = [Arrival(0.0, 20, 2), Arrival(0.25, 20, 2)]
    requests = run_open_loop(make_scheduler(rows=2), make_prompts(), arrivals)
    # 0: 1.0, then its turn to decode: 1.1. 1: 2.1.
    assert requests[1].token_times[0] - requests[1].arrival == pytest.approx(2.1 - 0.25)


def make_request(arrival: float, *token_times: float) -> Request:
    params = SamplingParams(max_new_tokens=9)
    return Request(0, None, [1], params, arrival=arrival, token_times=list(token_times))


def test_latencies_by_hand():
    requests = [make_request(1.0, 1.5, 1.6, 1.9), make_request(2.0, 2.1), make_request(2.0, 4.0, 5)]
    assert latencies(requests) == {
        "ttft_ms": percentiles([500, 100, 2000]),
        "tpot_ms": percentiles([200, 1000]),  # means of 100 and 300, and of 1000
        "itl_ms": percentiles([100, 300, 1000]),
    }


def test_latencies_of_nothing():
    assert latencies([make_request(1.0, 1.25)]) == {
        "ttft_ms": percentiles([250]),
        "tpot_ms": None,
        "itl_ms": None,
    }
    assert set(latencies([make_request(1.0)]).values()) == {None}
    assert set(latencies([]).values()) == {None}


def test_percentiles():
    expected = {"mean": 500.0, "p50": 500.0, "p99": 990.0, "p99_9": 999.0}
    assert percentiles(list(range(1001))) == percentiles(list(range(1000, -1, -1))) == expected
    expected = {"mean": 3.0, "p50": 2.5, "p99": 6.85, "p99_9": 6.985}  # between 4 and 7
    assert percentiles([1, 7, 2, 3, 4, 1]) == expected
    assert percentiles([2 / 3]) == dict.fromkeys(expected, 0.667)
    assert percentiles([]) is None
    assert all(type(value) is float for value in percentiles(np.arange(3)).values())


# ---- arrivals ----


def test_poisson():
    arrivals = poisson(20.0, 20_000, 100, 8, seed=3)
    assert {(a.input_len, a.output_len) for a in arrivals} == {(100, 8)}
    times = np.array([a.seconds for a in arrivals])
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # what makes it a Poisson process
    assert (gaps > 1 / 20).mean() == pytest.approx(np.exp(-1), rel=0.03)


def test_poisson_is_the_same_for_a_seed():
    arrivals = poisson(2.0, 50, 100, 8, seed=0)
    assert poisson(2.0, 50, 100, 8, seed=0) == arrivals != poisson(2.0, 50, 100, 8, seed=1)
    assert len(arrivals) == 50
    twice_as_fast = [a.seconds / 2 for a in arrivals]
    assert [a.seconds for a in poisson(4.0, 50, 100, 8, seed=0)] == pytest.approx(twice_as_fast)


@pytest.fixture
def write(tmp_path) -> Callable[[str], str]:
    def write(text: str) -> str:
        file = tmp_path / "arrivals.csv"
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write


def test_arrivals_file(write):
    text = "# seconds, prompt, new\n\n0.5, 8000, 64\n  # later\n0.5,7,1\n \t\n12,100,2\n"
    assert read_arrivals(write(text)) == [(0.5, 8000, 64), (0.5, 7, 1), (12.0, 100, 2)]


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("# c\n\n1, 2\n", 3, "'1, 2' is not like 0.5, 8000, 64"),
        ("1,2,3\n1,2,3,4\n", 2, "is not like"),
        ("1,2,3\nsoon,2,3\n", 2, "is not like"),
        ("1,2.5,3\n", 1, "is not like"),
        ("2,2,3\n1,2,3\n", 2, "'1,2,3': seconds must be finite and not go back"),
        ("-1,2,3\n", 1, "not go back"),
        ("0,0,3\n", 1, "counts be at least 1"),
        ("0,3,0\n", 1, "counts be at least 1"),
        ("0,3,3\nnan,3,3\n", 2, "must be finite"),
        ("0,3,3\n\ninf,3,3\n", 3, "must be finite"),
    ],
)
def test_bad_lines_are_named(write, text, line, message):
    file = write(text)
    with pytest.raises(ValueError) as error:
        read_arrivals(file)
    assert str(error.value).startswith(f"{file}, line {line}: ") and message in str(error.value)


def test_bad_arrivals_files(write, tmp_path):
    for text in ("", "# nothing\n\n"):
        with pytest.raises(ValueError, match="arrivals.csv has no line of seconds"):
            read_arrivals(write(text))
    with pytest.raises(FileNotFoundError, match="nowhere.csv"):
        read_arrivals(tmp_path / "nowhere.csv")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match="picture.png is not UTF-8 text"):
        read_arrivals(tmp_path / "picture.png")
