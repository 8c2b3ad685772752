"""Replay: every policy against a model of it in plain Python, engine also against the engine.

Guards: a policy that is another one in disguise; a replay whose numbers are not the engine's, above
all in the step at which a request outgrows B; an eviction of what the step uses; the newest token
in a slot it does not have; slots, counts or random numbers that pass from one request, row or layer
to another; a Belady that is not the optimum, so that every comparison with it is wrong.

The models know no slots (except the oracle's, and random's): they keep positions in dicts and sets,
and evict one at a time.
"""

from collections import deque
from functools import partial
from itertools import combinations

import numpy as np
import pytest
import torch

from minihisparse import replay as module
from minihisparse.config import HiSparseConfig
from minihisparse.engine import LLM
from minihisparse.kernels.resolve import resolve_oracle
from minihisparse.replay import POLICIES, replay, request_seed, requests_of
from minihisparse.sampling import SamplingParams
from minihisparse.trace import Trace

Steps = list[tuple[int, list[int]]]  # one request in one layer: seq_len, selected positions


def make_trace(rows: list[Steps | list[Steps]], top_k: int) -> Trace:
    """rows: the steps of each request row, or those of each of its layers."""
    rows = [row if row and isinstance(row[0], list) else [row] for row in rows]
    shape = (len(rows[0][0]), len(rows[0]), len(rows))
    positions = torch.full((*shape, top_k), -1, dtype=torch.int32)
    seq_lens = torch.zeros(shape[0], shape[2], dtype=torch.int32)
    for row, layers in enumerate(rows):
        for layer, steps in enumerate(layers):
            for step, (seq_len, selected) in enumerate(steps):
                seq_lens[step, row] = seq_len
                positions[step, layer, row, : len(selected)] = torch.tensor(selected)
    return Trace(positions, seq_lens)


def misses_of(steps: Steps, policy: str, num_slots: int, top_k: int | None = None) -> list[int]:
    """Misses of each step; that hits are all others is checked."""
    top_k = top_k or max(len(selected) for _, selected in steps)
    result = replay(make_trace([steps], top_k), policy, num_slots)
    both = (result.hits + result.misses)[:, 0].tolist()
    assert both == [len(selected) for _, selected in steps]
    return result.misses[:, 0].tolist()


# ---- models of the policies ----


class Model:
    """What a request's cache does in one layer; a policy is a choice of who goes."""

    def __init__(self, num_slots: int, steps: Steps) -> None:
        self.num_slots, self.steps = num_slots, steps
        prompt_len = steps[0][0] - 1
        self.resident = set(range(prompt_len)) if prompt_len <= num_slots else set()
        for position in self.resident:
            self.enter(-1, position)

    def run(self) -> list[int]:
        return [self.step(now, *step) for now, step in enumerate(self.steps)]

    def step(self, now: int, seq_len: int, selected: list[int]) -> int:
        """The number of misses."""
        if seq_len <= self.num_slots:
            self.resident.add(seq_len - 1)
            self.enter(-1, seq_len - 1)
        else:
            selected = [p for p in selected if p != seq_len - 1]
        hits = [p for p in selected if p in self.resident]
        missed = [p for p in selected if p not in self.resident]
        for position in hits:
            self.hit(now, position)
        for position in missed:
            if len(self.resident) == self.num_slots:
                self.resident.remove(self.victim(now, set(selected)))
            self.resident.add(position)
            self.enter(now, position)
        return len(missed)

    def enter(self, now: int, position: int) -> None: ...

    def hit(self, now: int, position: int) -> None: ...

    def victim(self, now: int, in_use: set[int]) -> int:
        """Who goes, among the residents that the step does not use."""
        return min(self.resident - in_use, key=self.value)

    def value(self, position: int): ...


class Fifo(Model):
    def __init__(self, *args) -> None:
        self.entered = {}
        super().__init__(*args)

    def enter(self, now, position):
        self.entered[position] = (now, position)

    def value(self, position):
        return self.entered[position]


class Lru(Fifo):
    hit = Fifo.enter


class Lfu(Lru):
    def __init__(self, *args) -> None:
        self.count = {}
        super().__init__(*args)

    def enter(self, now, position):
        super().enter(now, position)
        self.count[position] = int(now >= 0)

    def hit(self, now, position):
        super().hit(now, position)
        self.count[position] += 1

    def value(self, position):
        return self.count[position], super().value(position)


class Belady(Model):
    def victim(self, now, in_use):
        def next_use(position: int) -> int:
            later = range(now + 1, len(self.steps))
            return next((t for t in later if position in self.steps[t][1]), 10**9)

        return max(self.resident - in_use, key=next_use)


class Clock(Model):
    """Second chance, as a queue whose front is under the hand; None is an empty slot."""

    def __init__(self, *args) -> None:
        self.queue = deque([None] * args[0])
        self.referenced = set()
        super().__init__(*args)

    def enter(self, now, position):
        if now < 0:
            self.queue[position] = position
            return
        self.queue.popleft()
        self.queue.append(position)
        self.referenced.add(position)

    def hit(self, now, position):
        self.referenced.add(position)

    def victim(self, now, in_use):
        while True:
            front = self.queue[0]
            if front not in in_use:
                if front not in self.referenced:
                    return front  # `enter` takes its place
                self.referenced.remove(front)
            self.queue.rotate(-1)


class LastStep(Model):
    def step(self, now, seq_len, selected):
        if seq_len <= self.num_slots:
            return super().step(now, seq_len, selected)
        used = set(selected) - {seq_len - 1}
        missed = used - self.resident
        self.resident = used
        return len(missed)


def run_engine(num_slots: int, steps: Steps) -> list[int]:
    """The sequential oracle of Resolve, with write-through's part of the table."""
    prompt_len = steps[0][0] - 1
    tokens = [p if p < prompt_len <= num_slots else -1 for p in range(num_slots)]
    lru_slots, misses = [*range(num_slots)], []
    for seq_len, selected in steps:
        if seq_len <= num_slots:
            tokens[seq_len - 1] = seq_len - 1
        misses.append(len(resolve_oracle(selected, seq_len, tokens, lru_slots)[1]))
    return misses


def run_random(num_slots: int, steps: Steps, seed: int = 0) -> list[int]:
    """A draw for each slot that is not in use, in every step; the lowest go, empty ones first."""
    rng = np.random.RandomState(seed)
    prompt_len = steps[0][0] - 1
    tokens = [p if p < prompt_len <= num_slots else -1 for p in range(num_slots)]
    misses = []
    for seq_len, selected in steps:
        if seq_len <= num_slots:
            tokens[seq_len - 1] = seq_len - 1
        else:
            selected = [p for p in selected if p != seq_len - 1]
        unused = [slot for slot in range(num_slots) if tokens[slot] not in selected]
        draws = dict(zip(unused, rng.random_sample(len(unused)), strict=True))
        missed = [p for p in selected if p not in tokens]
        unused.sort(key=lambda slot: -1.0 if tokens[slot] < 0 else draws[slot])
        for slot, position in zip(unused, missed, strict=False):
            tokens[slot] = position
        misses.append(len(missed))
    return misses


def expected_misses(policy: str, num_slots: int, steps: Steps, seed: int) -> list[int]:
    models = {"fifo": Fifo, "lru": Lru, "lfu": Lfu, "clock": Clock, "belady": Belady}
    models["last_step"] = LastStep
    if policy == "engine":
        return run_engine(num_slots, steps)
    if policy == "random":
        return run_random(num_slots, steps, seed)
    return models[policy](num_slots, steps).run()


def random_requests(
    rng: np.random.Generator, num_steps: int, num_layers: int, top_k: int, num_slots: int
) -> list[tuple[int, list[Steps]]]:
    """The requests of one row, one after the other: first step, and the steps of each layer.

    Some positions are far more popular than others; most selections have the newest position, some
    have fewer than K.
    """
    requests, step = [], 0
    while step < num_steps:
        step += int(rng.integers(0, 3)) * int(rng.integers(0, 2))  # no request for a while
        prompt_len = int(rng.integers(0, 2 * num_slots + 2))
        if requests and requests[-1][1][0][-1][0] == prompt_len:
            prompt_len += 1  # it would look like the one before
        length = min(int(rng.integers(1, 40)), num_steps - step)
        if length < 1:
            break
        layers = []
        for _ in range(num_layers):
            steps = []
            for seq_len in range(prompt_len + 1, prompt_len + 1 + length):
                weights = 1 / (1 + (np.arange(seq_len) * 7 + prompt_len) % 11)
                count = min(seq_len, top_k, max(0, top_k + 1 - int(rng.integers(0, 4))))
                chosen = rng.choice(seq_len, count, replace=False, p=weights / weights.sum())
                chosen = set(chosen.tolist())
                if chosen and rng.integers(0, 3):
                    chosen = {*sorted(chosen)[1:], seq_len - 1}
                steps.append((seq_len, sorted(chosen)))
            layers.append(steps)
        requests.append((step, layers))
        step += length
    return requests


def random_trace(seed: int, num_steps: int = 60):
    """A trace, its rows of requests, and a B for each layer."""
    rng = np.random.default_rng(seed)
    top_k = int(rng.integers(1, 6))
    sizes = [top_k + int(rng.integers(0, 2 * top_k + 1)) for _ in range(3)]
    rows = [random_requests(rng, num_steps, 3, top_k, max(sizes)) for _ in range(2)]
    filled = []
    for requests in rows:
        layers = [[(0, [])] * num_steps for _ in sizes]
        for start, of_layers in requests:
            for layer, steps in zip(layers, of_layers, strict=True):
                layer[start : start + len(steps)] = steps
        filled.append(layers)
    return make_trace(filled, top_k), rows, sizes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_against_the_model(policy, seed):
    """Requests of all lengths that come and go in two rows; another B in each of three layers."""
    trace, rows, sizes = random_trace(seed)
    misses = np.zeros((60, 3), dtype=np.int64)
    for row, requests in enumerate(rows):
        for start, layers in requests:
            for layer, steps in enumerate(layers):
                own_seed = request_seed(5, layer, row, start)
                expected = expected_misses(policy, sizes[layer], steps, own_seed)
                misses[start : start + len(steps), layer] += expected
    result = replay(trace, policy, sizes, seed=5)
    assert result.policy == policy and result.device_buffer_size == tuple(sizes)
    assert result.hits.dtype == result.misses.dtype == torch.int64
    assert result.misses.tolist() == misses.tolist()
    selected = (trace.positions >= 0).sum((2, 3))
    assert torch.equal(result.hits + result.misses, selected)
    assert 0 < misses.sum() < selected.sum()


# ---- the engine's own numbers ----

B, K = 32, 16


@pytest.mark.parametrize("sizes", [(K, B), (K, K), (8, 21)], ids=str)
def test_engine_equals_the_engine(tiny_decoder, sizes):
    """Prompts below, at and above B; requests that outgrow it; more of them than request rows."""
    top_k, num_slots = sizes
    setup = HiSparseConfig(top_k=top_k, device_buffer_size=num_slots, page_size=4)
    llm = LLM(
        tiny_decoder(), hisparse=setup, max_model_len=200, max_running_requests=3, use_tqdm=False
    )
    lengths = [num_slots - 5, num_slots, num_slots + 1, 100, 3, num_slots - 1, 60]
    new_tokens = [20, 8, 30, 12, 40, 9, 14]
    prompts = [[(7 * i + 3 * n) % 120 for i in range(n)] for n in lengths]
    params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in new_tokens]
    counters = llm.cache.counters  # [L, 3]: hits, misses, evictions so far
    num_layers, before = len(counters), counters.clone()
    selections, seq_lens, counted = [], [], []
    for event in llm.step(prompts, params):
        if event.layer == 0:
            selections.append(torch.full((num_layers, len(prompts), top_k), -1, dtype=torch.int32))
            seq_lens.append(torch.zeros(len(prompts), dtype=torch.int32))
            seq_lens[-1][event.indices] = torch.tensor(event.seq_lens, dtype=torch.int32)
        selections[-1][event.layer, event.indices] = event.positions
        if event.layer == num_layers - 1:
            counted.append((counters - before)[:, :2])
            before = counters.clone()
    trace = Trace(torch.stack(selections), torch.stack(seq_lens))
    outgrown = (trace.seq_lens[:-1] == num_slots) & (trace.seq_lens[1:] == num_slots + 1)
    assert outgrown.sum() >= 3 and (trace.seq_lens > 0).sum(1).max() == 3

    result = replay(trace, "engine", num_slots)
    assert torch.equal(torch.stack([result.hits, result.misses], -1), torch.stack(counted))
    assert result.misses.sum(0).min() > 0

    rows, taken = [], {}  # the same requests, in as few rows as the engine had
    for step in trace.seq_lens.tolist():
        taken = {request: row for request, row in taken.items() if step[request]}
        for request in np.flatnonzero(step):
            free = (row for row in range(3) if row not in taken.values())
            taken[request] = taken[request] if request in taken else next(free)
        rows.append(dict(taken))
    packed = torch.full((len(rows), num_layers, 3, top_k), -1, dtype=torch.int32)
    lens = torch.zeros(len(rows), 3, dtype=torch.int32)
    for step, taken in enumerate(rows):
        for request, row in taken.items():
            packed[step, :, row] = trace.positions[step, :, request]
            lens[step, row] = trace.seq_lens[step, request]
    assert ((lens.diff(dim=0) != 1) & (lens[:-1] > 0) & (lens[1:] > 0)).any()  # without a gap
    again = replay(Trace(packed, lens), "engine", num_slots)
    assert torch.equal(again.misses, result.misses) and torch.equal(again.hits, result.hits)


# ---- worked by hand ----


def one_by_one(positions: list[int]) -> Steps:
    """A request of K = 1, far beyond these positions, with an empty cache."""
    return [(1000 + step, [position]) for step, position in enumerate(positions)]


TEXTBOOK = [7, 0, 1, 2, 0, 3, 0, 4, 2, 3, 0, 3, 2, 1, 2, 0, 1, 7, 0, 1]


def test_textbook_reference_string():
    """The page reference string of operating systems courses, three frames: 15, 12 and 9 faults."""
    faults = {p: sum(misses_of(one_by_one(TEXTBOOK), p, 3)) for p in POLICIES}
    assert (faults["fifo"], faults["lru"], faults["belady"]) == (15, 12, 9)
    assert faults["engine"] == 12  # with one position at a time it is lru
    assert faults["last_step"] == 20  # no page twice in a row
    assert sum(misses_of(one_by_one([3, 3, 5, 5, 3]), "last_step", 3)) == 3


def test_more_slots_can_mean_more_misses():
    """Belady's anomaly: FIFO with four frames misses more than with three; LRU never does."""
    steps = one_by_one([1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5])
    assert [sum(misses_of(steps, "fifo", num_slots)) for num_slots in (3, 4)] == [9, 10]
    assert [sum(misses_of(steps, "lru", num_slots)) for num_slots in (3, 4)] == [10, 8]


def test_a_second_chance():
    """1, 2, 3 fill three slots, all referenced. 4: the hand spares all three and takes 1's slot.
    2 is used; 5 comes: 2 is spared, 3 goes. FIFO would have taken 2."""
    steps = one_by_one([1, 2, 3, 4, 2, 5, 2, 3])
    assert misses_of(steps, "clock", 3) == [1, 1, 1, 1, 0, 1, 0, 1]
    assert misses_of(steps, "fifo", 3) == [1, 1, 1, 1, 0, 1, 1, 1]


def test_the_least_frequently_used_goes():
    """3: 1 was used twice, 2 once, so 2 goes, though it is more recent. 2 starts again at one use,
    as 3 has, and 3 is less recent."""
    steps = one_by_one([1, 1, 2, 3, 1, 2, 3])
    assert misses_of(steps, "lfu", 2) == [1, 0, 1, 1, 0, 1, 1]
    assert misses_of(one_by_one([1, 1, 2, 3, 1]), "lru", 2) == [1, 0, 1, 1, 1]


def test_hits_rank_above_what_was_fetched():
    """B = 4, K = 3. After the second step 1 was a hit, 7 and 8 were fetched, 2 was not used. The
    third fetches two: 2 goes, then 7 (engine: fetched, before hits) or 1 (lru: the lower one)."""
    steps = [(50, [0, 1, 2]), (51, [1, 7, 8]), (52, [3, 4])]
    for policy, after in {"engine": ([1], [7]), "lru": ([7], [1])}.items():
        stays, went = after
        assert misses_of([*steps, (53, stays)], policy, 4, 3) == [3, 2, 2, 0]
        assert misses_of([*steps, (53, went)], policy, 4, 3) == [3, 2, 2, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_newest_token(policy):
    """S = 6 > B = 4 at first: position 5 is the newest, a hit; then in no slot; then fetched."""
    steps = [(6, [0, 5]), (7, [5, 6]), (8, [5, 7])]
    assert misses_of(steps, policy, 4) == [1, 1, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_growth_across_the_buffer(policy):
    """Nothing misses until S = 5 has been decoded, where all four slots hold their positions."""
    steps = [(3, [0, 2]), (4, [1, 3]), (5, [1, 3, 4]), (6, [1, 3, 4]), (7, [1, 3, 4])]
    assert misses_of(steps, policy, 4) == [0, 0, 0, 1, 0]
    assert misses_of(steps[2:], policy, 4) == [0, 1, 0]  # the prompt fills the slots
    assert misses_of([(6, [1, 3, 5])], policy, 4) == [2]  # one longer: nothing is resident


def test_who_takes_note_while_everything_fits():
    """S = 3 uses 0, S = 4 uses 1; at S = 6 one slot is needed. Engine's order is still 0, 1, 2, 3:
    0 goes. For lru 2 is the least recent: only 0, 1 and 3 were used."""
    steps = [(3, [0]), (4, [1, 3]), (6 - 1, []), (6, [4])]
    for policy, gone in {"engine": 0, "fifo": 0, "lru": 2, "lfu": 2, "clock": 2}.items():
        for position in range(4):
            misses = misses_of([*steps, (7, [position])], policy, 4)
            assert misses == [0, 0, 0, 1, int(position == gone)], (policy, position)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("second", [(0, 31), (31, 32), (100, 101), (29, 30)], ids=str)
def test_another_request_starts_empty(policy, second):
    """Where its length is 0, does not rise, jumps, or falls, the row has another request."""
    steps = [(30, [3, 4]), (31, [3, 4])]
    steps += [(seq_len, [3, 4] if seq_len else []) for seq_len in second]
    expected = [2, 0, 0, 2] if second[0] == 0 else [2, 0, 2, 0]
    assert misses_of(steps, policy, 4) == expected


def test_requests_of():
    """Rows, first steps, and steps after the last; 0, 1 is nobody and then a request."""
    rows = [[0, 1, 2, 0, 0, 1], [7, 8, 8, 9, 5, 7], [0, 0, 0, 0, 3, 4], [0] * 6]
    expected = [(0, 1, 3), (0, 5, 6), (1, 0, 2), (1, 2, 4), (1, 4, 5), (1, 5, 6), (2, 4, 6)]
    assert requests_of(np.array(rows, dtype=np.int32).T) == expected


# ---- Belady is the optimum ----


def fewest_misses(num_slots: int, steps: Steps) -> int:
    """The least that any choice of what to keep can reach, by trying them all; S > B."""
    costs = {frozenset(): 0}  # what is resident: fewest misses on the way there
    for seq_len, selected in steps:
        used = frozenset(selected) - {seq_len - 1}
        after: dict[frozenset, int] = {}
        for resident, cost in costs.items():
            others = resident - used
            cost += len(used - resident)
            for count in range(min(len(others), num_slots - len(used)) + 1):
                for kept in combinations(sorted(others), count):
                    state = used.union(kept)
                    after[state] = min(cost, after.get(state, cost))
        costs = after
    return min(costs.values())


@pytest.mark.parametrize("seed", range(10))
def test_belady_is_the_optimum(seed):
    rng = np.random.default_rng(seed)
    for num_slots, top_k in ((2, 1), (3, 2), (4, 2), (4, 3)):
        steps = []
        for step in range(14):
            chosen = rng.choice(7, int(rng.integers(1, top_k + 1)), replace=False)
            steps.append((20 + step, sorted(chosen.tolist())))
        best = fewest_misses(num_slots, steps)
        assert sum(misses_of(steps, "belady", num_slots, top_k)) == best


@pytest.mark.parametrize("seed", range(20, 40))
def test_no_policy_misses_less_than_belady(seed):
    trace, _, sizes = random_trace(seed, num_steps=300)
    misses = {policy: replay(trace, policy, sizes).misses.sum(0) for policy in POLICIES}
    for policy in POLICIES:
        assert (misses["belady"] <= misses[policy]).all(), policy
    assert len({tuple(counts.tolist()) for counts in misses.values()}) > 2


# ---- the interface ----


def test_results_do_not_depend_on_threads(monkeypatch):
    trace, _, sizes = random_trace(50)
    for policy in POLICIES:
        results = []
        for num_threads in (1, 3):
            monkeypatch.setattr(module.torch, "get_num_threads", lambda n=num_threads: n)
            results.append(replay(trace, policy, sizes).misses)
        assert torch.equal(*results)


def test_seeds():
    trace, _, sizes = random_trace(51)
    misses = [replay(trace, "random", sizes, seed=seed).misses for seed in (0, 0, 1)]
    assert torch.equal(misses[0], misses[1]) and not torch.equal(misses[0], misses[2])
    one = make_trace([[one_by_one(TEXTBOOK)] * 8], 1)  # the same in 8 layers
    assert len(set(replay(one, "random", 3).misses.sum(0).tolist())) > 1
    seeds = {request_seed(*key) for key in np.ndindex(2, 3, 4, 5)}
    assert len(seeds) == 120


def test_one_size_for_all_layers_or_one_each():
    trace, _, _ = random_trace(52)
    layers, top_k = trace.positions.shape[1], trace.positions.shape[3]
    each = [replay(trace, "lru", top_k + layer).misses[:, layer] for layer in range(layers)]
    together = replay(trace, "lru", range(top_k, top_k + layers))
    assert torch.equal(together.misses, torch.stack(each, 1))
    assert together.device_buffer_size == (top_k, top_k + 1, top_k + 2)


def test_rates():
    layers = [[(50, [1, 2, 49]), (51, [1, 50])], [(50, [1]), (51, [3, 4, 5])]]
    result = replay(make_trace([layers], 3), "lru", 3)
    assert result.misses.tolist() == [[2, 1], [0, 3]] and result.hits.tolist() == [[1, 0], [2, 0]]
    assert result.miss_rate() == pytest.approx(6 / 9)
    assert result.layer_miss_rates() == pytest.approx([2 / 5, 1])
    assert result.miss_rate(warmup_steps=1) == pytest.approx(3 / 5)
    assert result.layer_miss_rates(warmup_steps=1) == [0, 1]
    for warmup_steps in (-1, 2):
        for rates in (result.miss_rate, result.layer_miss_rates):
            with pytest.raises(ValueError, match=f"warmup_steps {warmup_steps} is not in 0..1"):
                rates(warmup_steps)


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_selected(policy):
    trace = make_trace([[(0, []), (7, []), (8, [])], [(0, []), (0, []), (0, [])]], 2)
    result = replay(trace, policy, 2)
    assert result.hits.tolist() == result.misses.tolist() == [[0]] * 3
    assert result.miss_rate() == 0 and result.layer_miss_rates() == [0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_million_positions(policy):
    steps = [(2**20, [0, 2**20 - 2]), (2**20 + 1, [2**20 - 2, 2**20])]
    assert misses_of(steps, policy, 4) == [2, 0]


def test_progress_and_the_trace_is_left_alone():
    trace, _, sizes = random_trace(53)
    positions, seq_lens = trace.positions.clone(), trace.seq_lens.clone()
    calls = []
    for policy in POLICIES:
        replay(trace, policy, sizes, progress=partial(calls.append, policy))
    assert calls == [policy for policy in POLICIES for _ in range(3)]
    assert torch.equal(trace.positions, positions) and torch.equal(trace.seq_lens, seq_lens)


def test_what_cannot_be_replayed():
    trace = make_trace([[one_by_one([1, 2])] * 3], 4)
    with pytest.raises(ValueError, match="'mru' is not one of: last_step, random, fifo, .* belady"):
        replay(trace, "mru", 8)
    for size in (3, [4, 3, 4]):
        with pytest.raises(ValueError, match="--device-buffer-size 3 is less than .* K = 4"):
            replay(trace, "lru", size)
    with pytest.raises(ValueError, match="--device-buffer-size: 2 sizes for 3 layers"):
        replay(trace, "lru", [4, 4])
    assert replay(trace, "lru", 4).misses.sum() == 6
