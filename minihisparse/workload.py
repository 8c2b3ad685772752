"""What a benchmark's clients ask for, and what they see: prompts, closed and open loops, latencies.

Closed loop: so many clients, each sends its next request when its last one is finished. Open loop:
requests come at given times, whatever the server does. Times are the clients': queueing counts.

TTFT: from arrival to the first token. ITL: between tokens. TPOT: their mean over a request.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minihisparse.request import Request
from minihisparse.sampling import SamplingParams
from minihisparse.scheduler import Scheduler
from minihisparse.tokenizer import Tokenizer

TEXT_MODULES = ("argparse", "difflib", "doctest", "inspect", "optparse", "pdb", "tarfile", "typing")
STRIDE = 257  # tokens between the starts of two prompts: none begins like another one


# ---- prompts ----


def text_ids(tokenizer: Tokenizer) -> list[int]:
    """The token ids of long real text that is on every machine: modules of the standard library."""
    texts = []
    for name in TEXT_MODULES:
        texts.append(Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8"))
    return tokenizer.encode("\n".join(texts))


def prompts_of(ids: Sequence[int], input_len: int) -> Iterator[list[int]]:
    """Endlessly many prompts of `input_len` tokens from one text, read round and round."""
    start = 0
    while True:
        prompt: list[int] = []
        while len(prompt) < input_len:
            at = (start + len(prompt)) % len(ids)
            prompt += ids[at : at + input_len - len(prompt)]
        yield prompt
        start += STRIDE


# ---- arrivals ----


class Arrival(NamedTuple):
    """A request that comes `seconds` after the start: tokens of its prompt and of its answer."""

    seconds: float
    input_len: int
    output_len: int


def poisson(
    rate: float, num_requests: int, input_len: int, output_len: int, seed: int
) -> list[Arrival]:
    """A Poisson process of `rate` requests per second; the first one comes at once. The same for a
    seed.
    """
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_requests)
    times = np.cumsum(gaps) - gaps[0]
    return [Arrival(float(seconds), input_len, output_len) for seconds in times]


def read_arrivals(path: str | Path) -> list[Arrival]:
    """Lines of "seconds, prompt tokens, new tokens", ascending; blank lines and # are skipped.

    Raises FileNotFoundError, or ValueError that names file and line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    arrivals: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            seconds, input_len, output_len = line.split(",")
            arrival = Arrival(float(seconds), int(input_len), int(output_len))
        except ValueError:
            raise ValueError(f"{path}, line {number}: {line!r} is not like 0.5, 8000, 64") from None
        earliest = arrivals[-1].seconds if arrivals else 0.0
        in_order = earliest <= arrival.seconds < math.inf  # not, if it is NaN
        if not in_order or arrival.input_len < 1 or arrival.output_len < 1:
            raise ValueError(
                f"{path}, line {number}: {line!r}: seconds must be finite and not go back, and "
                "counts be at least 1"
            )
        arrivals.append(arrival)
    if not arrivals:
        raise ValueError(f"{path} has no line of seconds, prompt tokens, new tokens")
    return arrivals


# ---- loops ----


def run_closed_loop(
    scheduler: Scheduler,
    prompts: Iterator[list[int]],
    output_len: int,
    *,
    concurrency: int,
    num_requests: int,
    progress: Callable[[], object] = lambda: None,
) -> list[Request]:
    """Serves `num_requests` requests of `concurrency` clients to their end.

    Raises RuntimeError if one of them ends with an error. progress: called per finished request.
    """
    requests: list[Request] = []
    unfinished: list[Request] = []
    while len(requests) < num_requests or unfinished:
        while len(unfinished) < concurrency and len(requests) < num_requests:
            prompt, now = next(prompts), time.perf_counter()
            request = _new_request(len(requests), prompt, output_len, arrival=now)
            requests.append(request)
            unfinished.append(request)
            scheduler.add(request)
        scheduler.step()
        unfinished = _unfinished(unfinished, progress)
    return requests


def run_open_loop(
    scheduler: Scheduler,
    prompts: Iterator[list[int]],
    arrivals: Sequence[Arrival],
    *,
    progress: Callable[[], object] = lambda: None,
) -> list[Request]:
    """Serves a request for each arrival to its end; each prompt is cut to the arrival's length.

    Raises RuntimeError if one of them ends with an error. progress: called per finished request.
    """
    requests: list[Request] = []
    unfinished: list[Request] = []
    start = time.perf_counter()
    while len(requests) < len(arrivals) or unfinished:
        now = time.perf_counter() - start
        while len(requests) < len(arrivals) and arrivals[len(requests)].seconds <= now:
            seconds, input_len, output_len = arrivals[len(requests)]
            prompt = next(prompts)[:input_len]
            # It came when it came, however late the last step ended.
            request = _new_request(len(requests), prompt, output_len, arrival=start + seconds)
            requests.append(request)
            unfinished.append(request)
            scheduler.add(request)
        if unfinished:
            scheduler.step()
            unfinished = _unfinished(unfinished, progress)
        else:
            time.sleep(arrivals[len(requests)].seconds - now)
    return requests


def _new_request(index: int, prompt: list[int], output_len: int, arrival: float) -> Request:
    """A greedy request that generates exactly `output_len` tokens, without text."""
    params = SamplingParams(max_new_tokens=output_len, ignore_eos=True)
    return Request(index, None, prompt, params, arrival=arrival)


def _unfinished(requests: Sequence[Request], progress: Callable[[], object]) -> list[Request]:
    left = []
    for request in requests:
        request.unread.clear()  # nobody reads the tokens
        if request.error:
            raise RuntimeError(request.error)
        if request.finished:
            progress()
        else:
            left.append(request)
    return left


# ---- what the clients saw ----


def latencies(requests: Sequence[Request]) -> dict[str, dict[str, float] | None]:
    """ttft_ms, tpot_ms and itl_ms, each {mean p50 p99 p99_9}; None where nothing can be said.

    TTFT and TPOT are over requests, ITL is over all gaps of all requests.
    """
    ttft, tpot, itl = [], [], []
    for request in requests:
        times = np.array(request.token_times)
        if len(times):
            ttft.append(times[0] - request.arrival)
        if len(times) > 1:
            gaps = np.diff(times)
            itl += gaps.tolist()
            tpot.append(gaps.mean())
    series = {"ttft_ms": ttft, "tpot_ms": tpot, "itl_ms": itl}
    return {name: percentiles([1e3 * s for s in values]) for name, values in series.items()}


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """{mean p50 p99 p99_9} of some values, linear between two of them; None without any."""
    if not len(values):
        return None
    found = [np.mean(values), *np.percentile(values, [50, 99, 99.9])]
    names = ("mean", "p50", "p99", "p99_9")
    return {name: round(float(value), 3) for name, value in zip(names, found, strict=True)}
