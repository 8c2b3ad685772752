"""Tutorial 9 runs as a reader would run it; what it shows is so; its answers are right.

Guards: a replay that agrees with the engine whatever is replayed; points, curves and splits that
another count does not confirm; a Belady by hand that is not the optimum; a best B that is not best;
numbers that are quoted and are not those of BENCHMARKS.md; flags too small for what they promise;
a file that is left behind.
"""

import json
import runpy
import shlex
from contextlib import redirect_stdout
from io import StringIO
from itertools import combinations
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.replay import replay
from minihisparse.trace import Trace, read_trace

REPOSITORY = Path(__file__).parents[1]
CHAPTER = REPOSITORY / "tutorials" / "09_how_much_cache.py"


@pytest.fixture(scope="module")
def nine(tmp_path_factory):
    """The chapter's globals, and what it printed, after it ran in an empty folder."""
    folder, random_state = tmp_path_factory.mktemp("nine"), torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(StringIO()) as printed:
        patch.chdir(folder)
        names = runpy.run_path(str(CHAPTER), run_name="__main__")
    assert torch.equal(torch.get_rng_state(), random_state), "draws without a seed of its own"
    assert not list(folder.iterdir()), "leaves a file behind"
    return SimpleNamespace(**names, printed=printed.getvalue())


def misses_of(steps: list[set[int]], lens: list[int], slots: int, policy: str) -> list[int]:
    """Misses per step of one layer, one eviction at a time; slots begin empty."""
    cache: list[int] = []  # first to go first, but for belady
    misses = []
    for now, (picks, S) in enumerate(zip(steps, lens, strict=True)):
        picks = sorted(picks - {S - 1})
        misses.append(len([p for p in picks if p not in cache]))
        if policy == "last_step":
            cache = picks
            continue
        if policy == "lru":
            stale = [p for p in cache if p not in picks]
            cache = (stale + picks)[-slots:]
            continue
        for p in picks:
            if p in cache:
                continue
            if len(cache) == slots:
                others = [q for q in cache if q not in picks]
                if policy == "belady":
                    others.sort(key=lambda q, now=now: -next_use(steps, q, now))
                cache.remove(others[0])
            cache.append(p)
    return misses


def next_use(steps: list[set[int]], position: int, now: int) -> int:
    return next((t for t in range(now + 1, len(steps)) if position in steps[t]), len(steps))


def test_it_runs(nine):
    assert "chapter 9: all asserts hold" in nine.printed
    rows = nine.LONGEST, nine.K, nine.L, nine.trace.positions.shape
    assert rows == (8192, 64, 4, (400, 4, 1, 64))


# ---- record, replay ----


def test_the_replay_of_a_recording_can_differ(nine, tmp_path):
    """Recorded again with other prompts: the engine's counts at its own B, and at no other."""
    file, runner = tmp_path / "trace.safetensors", nine.runner
    before = runner.cache.counters.clone()
    with nine.TraceRecorder(runner, file) as recorder:
        step = recorder.around(nine.DecodeStep(runner, progress=False))
        loop = {"concurrency": 2, "num_requests": 2}
        nine.run_closed_loop(nine.Scheduler(runner, step), nine.prompts_of([5, 9], 90), 21, **loop)
    counted = (runner.cache.counters - before)[:, 1].tolist()
    recorded = read_trace(file)
    assert recorded.metadata["counters"] and recorded.seq_lens[0].tolist() == [91, 91]
    for B in (63, 64, 65):
        replayed = replay(recorded, "engine", B).misses.sum(0).tolist()
        assert (replayed == counted) == (B == nine.recorded_B)


def test_what_was_recorded(nine):
    assert "[steps, layers, requests, K]: (80, 4, 2, 32)" in nine.printed
    assert "{0: [151, 151], 39: [190, 190], 40: [151, 0], 79: [190, 0]}" in nine.printed
    assert nine.replayed == nine.counted and min(nine.counted) > 0


# ---- the points ----


@pytest.mark.parametrize("layer", [0, 3])
def test_points(nine, layer):
    steps, lens = [set(x) for x in nine.layers[layer].tolist()], nine.seq_lens[:, 0].tolist()
    for (policy, times), result in nine.points.items():
        got = result.misses[:, layer].tolist()
        if policy == "random":
            assert sum(got) > sum(nine.points["lru", 2].misses[:, layer].tolist())
        else:
            assert got == misses_of(steps, lens, times * nine.K, policy), policy


def test_layers_are_what_the_text_says(nine):
    rates = nine.points["lru", 2].layer_miss_rates(nine.WARMUP)
    assert rates == sorted(rates) and rates[0] < 0.01 and rates[3] > 0.1


def test_numbers_that_are_quoted(nine):
    text = (REPOSITORY / "BENCHMARKS.md").read_text(encoding="utf-8")
    head = next(line for line in text.splitlines() if "| Belady |" in line)
    row = next(line for line in text.splitlines() if line.startswith("| **dsa** |"))
    cells = [[cell.strip() for cell in line.split("|")] for line in (head, row)]
    of = dict(zip(*cells, strict=True))
    names = ("at K", "FIFO", "random", "LRU misses at 2K", "Belady", "LRU at 4K")
    quoted = [smollm2 for _, smollm2 in nine.POINTS.values()]
    assert [float(of[name].rstrip("%")) for name in names] == quoted


# ---- Belady by hand ----


def fewest_misses(accesses: list[int], slots: int) -> int:
    """Of all that can be evicted at each access."""
    states = {frozenset(): 0}  # cache -> fewest misses so far
    for p in accesses:
        after: dict[frozenset, int] = {}
        for cache, misses in states.items():
            if p in cache:
                options = [(cache, misses)]
            elif len(cache) < slots:
                options = [(cache | {p}, misses + 1)]
            else:
                kept = combinations(sorted(cache), slots - 1)
                options = [(frozenset({*keep, p}), misses + 1) for keep in kept]
            for state, count in options:
                after[state] = min(count, after.get(state, count))
        states = after
    return min(states.values())


def test_belady_by_hand_is_the_optimum(nine, capsys):
    rng, worse = Random(0), 0
    for _ in range(60):
        accesses, slots = [rng.randrange(6) for _ in range(12)], rng.choice((2, 3, 4))
        misses = nine.belady(accesses, slots)
        trace = nine.one_by_one(accesses)
        assert misses == fewest_misses(accesses, slots)
        assert misses == int(replay(trace, "belady", slots).misses.sum())
        worse += int(replay(trace, "lru", slots).misses.sum()) > misses
    assert worse > 20  # so that LRU in its place would be seen
    # By hand: 3 comes last, then 4 never comes, then nothing does.
    assert "access 4: [1, 2, 4]  miss, evicts 3; to come: [1, 2, 5, 1, 2, 3]" in nine.printed
    assert "access 5: [1, 2, 5]  miss, evicts 4; to come: [1, 2, 3]" in nine.printed


# ---- stack distances ----


def test_naive_distances(nine):
    rng = Random(1)
    for _ in range(20):
        lens = list(range(41, 61))
        steps = [sorted({*rng.sample(range(12), 3), *rng.sample([S - 1, 0], 1)}) for S in lens]
        distances = nine.naive_distances(steps, lens)
        for B in range(4, 14):
            expected = misses_of([set(x) for x in steps], lens, B, "lru")
            assert sum(d > B for d in distances) == sum(expected)


def test_comparing_the_curves_can_fail(nine):
    """Layer 2's naive curve is not layer 3's; neither is flat."""
    assert nine.same == {1: True, 3: True}
    lens, whole = nine.seq_lens[:, 0].tolist(), nine.miss_curves(nine.trace).layer_misses()
    found = torch.tensor(nine.naive_distances(nine.layers[2].tolist(), lens))
    sizes = range(nine.K, nine.PROMPT)
    curve = [int((found > B).sum()) for B in sizes]
    assert curve == whole[2, nine.K : nine.PROMPT].tolist()
    assert curve != whole[3, nine.K : nine.PROMPT].tolist() and curve[0] > 2 * curve[100]


def test_one_more_slot_brings_a_miss_more(nine):
    """The engine's oracle says the same; the prompt's three positions begin in the slots."""
    for B, expected in ((3, 1), (4, 2)):
        tokens, lru_slots, misses = [0, 1, 2, -1][:B], list(range(B)), 0
        for S, position in enumerate([0, 4, 4, 0], start=4):
            if S <= B:
                tokens[S - 1] = S - 1  # write-through
            misses += len(resolve_oracle([position], S, tokens, lru_slots)[1])
        assert misses == expected == nine.four["engine"][B - 3]


# ---- B ----


def test_best_b(nine):
    """From the formula, and requests from bytes: slots, the newest's, 6 bytes of tables a slot."""
    for gib, best in nine.bests.items():
        tokens = {}
        for B in nine.GRID:
            rate = nine.curves.miss_rate(B)
            R, _, tokens[B] = nine.deployments[gib].predict(B, rate).values()
            per_request = 32 * ((B + 1) * 4096 + 6 * B)
            assert R == pytest.approx(gib * 2**30 / per_request, rel=0.05, abs=1)
            us = 1300 + 18 * R + 32 * 4 + R * 32 * 64 * rate * 4096 / 45e3
            assert tokens[B] == pytest.approx(1e6 * R / us, rel=1e-4)
        assert best == min(B for B in tokens if tokens[B] >= 0.99 * max(tokens.values()))
    assert f"{nine.best:5}" in next(x for x in nine.printed.splitlines() if x.endswith(" best"))


def test_the_split_is_sized_on_one_half_and_measured_on_the_other(nine):
    half = nine.STEPS // 2
    pairs = zip((nine.first, nine.second), (slice(0, half), slice(half, None)), strict=True)
    for trace, steps in pairs:
        assert torch.equal(trace.positions, nine.trace.positions[steps])
        assert torch.equal(trace.seq_lens, nine.trace.seq_lens[steps])
    other = Trace(nine.first.positions, nine.first.seq_lens)
    for times, gain in nine.split.items():
        assert sum(gain.sizes) <= 4 * times * nine.K and gain.sizes == sorted(gain.sizes)
        assert gain.uniform_size == times * nine.K
        for sizes, rate in ((gain.uniform_size, gain.uniform), (gain.sizes, gain.per_layer)):
            assert rate == replay(nine.second, "engine", sizes).miss_rate(nine.WARMUP)
        again = nine.compare_per_layer(nine.first, other, 4 * times * nine.K, warmup_steps=64)
        assert again.sizes == gain.sizes and again.per_layer != gain.per_layer


def test_export(nine):
    line = next(x for x in nine.printed.splitlines() if "sglang.launch_server" in x)
    words = shlex.split(line)
    config = json.loads(words[words.index("--hisparse-config") + 1])
    device_tokens = int(words[words.index("--max-total-tokens") + 1])
    assert config["top_k"] == nine.K and config["device_buffer_size"] == nine.best
    requests = int(words[words.index("--max-running-requests") + 1])
    assert requests == nine.deployment.num_requests(nine.best)
    assert device_tokens == requests * (nine.best + 64)
    host = device_tokens * config["host_to_device_ratio"]
    assert host >= requests * nine.LONGEST > host - device_tokens  # no smaller whole number does


# ---- answers ----


def test_answers(nine):
    twelve = [{p} for p in [*nine.TEN, 4, 5]]
    lens = [*range(100, 112)]
    for policy in ("fifo", "lru", "belady"):
        expected = [sum(misses_of(twelve, lens, B, policy)) for B in (3, 4)]
        assert nine.answer_1(policy) == expected == nine.anomaly[policy]
    assert nine.anomaly["fifo"] == [9, 10] and nine.anomaly["lru"] == [10, 8]

    misses, slots = [[10, 10, 2], [8, 5, 4]], (4, 5, 6)
    splits = {(a, b): misses[0][a - 4] + misses[1][b - 4] for a in slots for b in slots}
    least = min((count, split) for split, count in splits.items() if sum(split) == 10)
    assert least == (10, (6, 4)) and nine.answer_2(misses, 10) == [6, 4]
    assert splits[4, 6] == 14  # slot by slot
    assert nine.answer_2([[10, 7, 6], [8, 5, 4]], 10) == [5, 5]
