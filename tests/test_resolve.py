"""Guards: a slot that holds another position than the answer says, an LRU order that drifts from
the rule, a duplicate that is fetched twice, padding that takes a slot, and positions out of range
that are accepted.

Both versions run through the same cases: the sequential oracle, and the torch version as a batch.
A third model, an OrderedDict written from the rule's text alone, checks both.
"""

import random
import re
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minihisparse.kernels import resolve as resolve_module
from minihisparse.kernels.resolve import Fetch, resolve_oracle
from minihisparse.kernels.resolve_torch import first_occurrence, resolve_torch

INT32_MAX = 2**31 - 1
property_test = settings(derandomize=True, deadline=None, database=None, max_examples=150)


@dataclass(frozen=True)
class State:
    """One request in one layer: which position each slot holds, and the LRU order of the slots."""

    tokens: list[int]
    lru_slots: list[int]

    @classmethod
    def holding(cls, *tokens: int) -> "State":
        return cls(list(tokens), list(range(len(tokens))))


@dataclass(frozen=True)
class Outcome:
    slots: list[int]
    plan: list[Fetch]
    state: State


Request = tuple[list[int], int, State]  # positions, seq_len, state before


def by_oracle(requests: list[Request], checked: bool = False) -> list[Outcome]:
    outcomes = []
    for positions, seq_len, state in requests:
        tokens, lru_slots = list(state.tokens), list(state.lru_slots)
        slots, plan = resolve_oracle(positions, seq_len, tokens, lru_slots, checked=checked)
        outcomes.append(Outcome(slots, plan, State(tokens, lru_slots)))
    return outcomes


def tensors(requests: list[Request]) -> list[torch.Tensor]:
    return [
        torch.tensor([positions for positions, _, _ in requests], dtype=torch.int32),
        torch.tensor([seq_len for _, seq_len, _ in requests], dtype=torch.int32),
        torch.tensor([state.tokens for _, _, state in requests], dtype=torch.int32),
        torch.tensor([state.lru_slots for _, _, state in requests], dtype=torch.int16),
    ]


def by_torch(requests: list[Request], checked: bool = False) -> list[Outcome]:
    """All requests in one call."""
    arguments = tensors(requests)
    done = resolve_torch(*arguments, checked=checked)
    outcomes = []
    for row, positions in enumerate(arguments[0].tolist()):
        slots = done.slots[row].tolist()
        entries = zip(
            positions, slots, done.fetch[row].tolist(), done.evicted[row].tolist(), strict=True
        )
        plan = []
        for position, slot, fetch, evicted in entries:
            if fetch:
                plan.append(Fetch(position, slot, evicted))
            else:
                assert evicted == -1, "an eviction without a fetch"
        state = State(done.tokens[row].tolist(), done.lru_slots[row].tolist())
        outcomes.append(Outcome(slots, plan, state))
    return outcomes


def by_torch_in_a_crowd(requests: list[Request], checked: bool = False) -> list[Outcome]:
    """Between two other requests of the same K and B, which must not matter."""
    _, _, state = requests[0]
    num_slots, top_k = len(state.tokens), len(requests[0][0])
    stranger = State([*range(7, 7 + num_slots)], [*reversed(range(num_slots))])
    before = ([8] * top_k, 999, stranger)
    after = ([500 + i % num_slots for i in range(top_k)], 999, stranger)
    return by_torch([before, *requests, after], checked)[1:-1]


class LruModel:
    """The rule as its text has it: slots in an OrderedDict, the least recently used first."""

    def __init__(self, state: State) -> None:
        self.position_in = OrderedDict((slot, state.tokens[slot]) for slot in state.lru_slots)

    def resolve(self, positions: list[int], seq_len: int) -> list[int]:
        num_slots, newest = len(self.position_in), seq_len - 1
        if seq_len <= num_slots:
            return [p if 0 <= p <= newest else -1 for p in positions]
        wanted = dict.fromkeys(p for p in positions if 0 <= p < newest)  # unique, in order
        hits = [slot for slot, position in self.position_in.items() if position in wanted]
        misses = [p for p in wanted if p not in self.position_in.values()]
        victims = [slot for slot in self.position_in if slot not in hits]
        for slot, position in zip(victims, misses, strict=False):
            self.position_in[slot] = position
            self.position_in.move_to_end(slot)
        for slot in hits:
            self.position_in.move_to_end(slot)
        answer = {position: slot for slot, position in self.position_in.items()}
        answer |= {newest: num_slots, -1: -1}
        return [answer.get(p, -1) if p <= newest else -1 for p in positions]

    @property
    def state(self) -> State:
        return State(
            [self.position_in[slot] for slot in range(len(self.position_in))],
            list(self.position_in),
        )


every_version = pytest.mark.parametrize(
    "resolve", [by_oracle, by_torch, by_torch_in_a_crowd], ids=lambda f: f.__name__
)


# -- worked by hand ---------------------------------------------------------------------------


@every_version
def test_vector_1_lru_order(resolve):
    """The newest position, 7, is in slot 4; hits 4 and 2 keep their old order."""
    [done] = resolve([([4, 2, 7], 8, State.holding(1, 4, 2, 5))])
    assert done == Outcome([1, 2, 4], [], State([1, 4, 2, 5], [0, 3, 1, 2]))


@every_version
def test_vector_2_hits_rank_above_fetched(resolve):
    [done] = resolve([([0, 7, 8], 50, State.holding(0, 1, 2, 3))])
    plan = [Fetch(7, slot=1, evicted=1), Fetch(8, slot=2, evicted=2)]
    assert done == Outcome([0, 1, 2], plan, State([0, 7, 8, 3], [3, 1, 2, 0]))


@every_version
def test_vector_3_padding_inside_a_row(resolve):
    [done] = resolve([([1, -1, 6], 50, State.holding(0, 1, 2, 3))])
    plan = [Fetch(6, slot=0, evicted=0)]
    assert done == Outcome([1, -1, 0], plan, State([6, 1, 2, 3], [2, 3, 0, 1]))
    nothing = State([9, 4, -1, 2], [2, 0, 3, 1])
    assert resolve([([-1, -1, -1], 50, nothing)]) == [Outcome([-1, -1, -1], [], nothing)]


@every_version
def test_vector_4_the_newest_token_is_in_no_slot_one_step_later(resolve):
    state = State.holding(0, 1, 2, 3)
    [done] = resolve([([5, 0], 6, state)])
    assert done == Outcome([4, 0], [], State([0, 1, 2, 3], [1, 2, 3, 0]))
    [done] = resolve([([5, 6], 7, done.state)])
    plan = [Fetch(5, slot=1, evicted=1)]
    assert done == Outcome([1, 4], plan, State([0, 5, 2, 3], [2, 3, 0, 1]))
    [done] = resolve([([5, 7], 8, done.state)])
    assert done == Outcome([1, 4], [], State([0, 5, 2, 3], [2, 3, 0, 1]))


@every_version
def test_vector_5_growth_across_the_buffer(resolve):
    """Up to S = B all positions are resident and nothing moves, not even the LRU order."""
    state = State([0, 1, 2, 3], [3, 1, 0, 2])
    assert resolve([([3, 0], 4, state)]) == [Outcome([3, 0], [], state)]
    state = State.holding(0, 1, 2, 3)
    [done] = resolve([([4, 3], 5, state)])
    assert done == Outcome([4, 3], [], State([0, 1, 2, 3], [0, 1, 2, 3]))
    [done] = resolve([([4, 5], 6, done.state)])
    plan = [Fetch(4, slot=0, evicted=0)]
    assert done == Outcome([0, 4], plan, State([4, 1, 2, 3], [1, 2, 3, 0]))


def test_vector_6_padded_rows_beside_real_ones():
    """A row of length 0 answers -1 whatever it asks for, and its state stays as it was."""
    garbage = State([123456, 3, 123456, 0], [2, 2, 2, 2])
    real = ([0, 7, 8], 50, State.holding(0, 1, 2, 3))
    done = by_torch([([123456, 0, 3], 0, garbage), real, ([0, 0, -1], 0, garbage)])
    assert done[0] == done[2] == Outcome([-1, -1, -1], [], garbage)
    assert done[1] == by_oracle([real])[0]


@every_version
def test_the_docstring_diagram(resolve):
    """Every number of the drawing in kernels/resolve.py is what the code answers."""
    text = " ".join(resolve_module.__doc__.split())

    def after(label: str, pattern: str) -> str:
        found = re.search(rf"{label}\s+{pattern}", text)
        assert found, f"the diagram has no {label!r}"
        return found[1]

    def numbers(listed: str) -> list[int]:
        return [int(number) for number in listed.split(",")]

    def state(label: str) -> State:
        pairs = re.findall(r"slot (\d+): (\d+)", after(label, r"((?:slot \d+: \d+ )+)lru_slots"))
        assert [int(slot) for slot, _ in pairs] == list(range(num_slots))
        tokens = [int(position) for _, position in pairs]
        return State(tokens, numbers(after(rf"{label} [^\[]*", r"lru_slots \[(.*?)\]")))

    num_slots = int(after("One call, B", r"= (\d+)"))
    positions = numbers(after("positions", r"\[(.*?)\] S ="))
    seq_len = int(after(r"\] S", r"= (\d+)"))
    newest, newest_slot = re.search(r"so (\d+) is the newest: slot (\d+)", text).groups()
    assert (int(newest), int(newest_slot)) == (seq_len - 1, num_slots)

    [done] = resolve([(positions, seq_len, state("tokens before"))])
    assert done.slots == numbers(after("answer", r"\[(.*?)\]"))
    assert done.state == state("tokens after")
    to_fetch = re.findall(r"position (\d+) into slot (\d+)", text)
    assert to_fetch == [(str(fetch.position), str(fetch.slot)) for fetch in done.plan]
    assert len(to_fetch) == 1 and newest_slot != "0"  # else the drawing shows nothing


# -- the same kinds at other sizes ------------------------------------------------------------

SIZES = [1, 2, 3, 7, 64, 300]
every_size = pytest.mark.parametrize("num_slots", SIZES)


def shuffled(num_slots: int, first: int = 100) -> State:
    """Positions first .. first + B - 1, each in some slot, in some LRU order."""
    rng = random.Random(num_slots)
    tokens, lru_slots = [*range(first, first + num_slots)], [*range(num_slots)]
    rng.shuffle(tokens)
    rng.shuffle(lru_slots)
    return State(tokens, lru_slots)


@every_version
@every_size
def test_all_hits_at_k_equal_b(resolve, num_slots):
    """Asking for everything that is there leaves the order as it was."""
    state = shuffled(num_slots)
    positions = [*range(100, 100 + num_slots)]
    [done] = resolve([(positions, 1000, state)])
    slots = [state.tokens.index(position) for position in positions]
    assert done == Outcome(slots, [], state)


@every_version
@every_size
def test_all_misses_at_k_equal_b(resolve, num_slots):
    """The m-th miss takes the m-th least recent slot; the order comes round to where it was."""
    state = shuffled(num_slots)
    positions = [*range(500 + num_slots, 500, -1)]
    [done] = resolve([(positions, 1000, state)])
    plan = [
        Fetch(position, slot, state.tokens[slot])
        for position, slot in zip(positions, state.lru_slots, strict=True)
    ]
    assert done.slots == done.state.lru_slots == state.lru_slots
    assert done.plan == plan
    assert all(done.state.tokens[slot] == position for position, slot, _ in plan)


@every_version
@every_size
def test_one_hit_moves_to_the_end(resolve, num_slots):
    state = shuffled(num_slots)
    least = state.lru_slots[0]
    [done] = resolve([([state.tokens[least]], 1000, state)])
    assert done == Outcome([least], [], State(state.tokens, state.lru_slots[1:] + [least]))


@every_version
@every_size
def test_one_miss_takes_the_least_recent_slot(resolve, num_slots):
    state = shuffled(num_slots)
    least = state.lru_slots[0]
    [done] = resolve([([999], 5000, state)])
    assert done.slots == [least] and done.plan == [Fetch(999, least, state.tokens[least])]
    assert done.state.lru_slots == state.lru_slots[1:] + [least]


@every_version
@every_size
def test_the_newest_position_costs_nothing(resolve, num_slots):
    state = shuffled(num_slots)
    [done] = resolve([([999] * num_slots, 1000, state)])
    assert done == Outcome([num_slots] * num_slots, [], state)


@every_version
@every_size
def test_seq_len_below_at_and_above_b(resolve, num_slots):
    """B - 1 and B: position p is in slot p. B + 1: the newest is in slot B, the others stay."""
    state = State([*range(num_slots)], [*reversed(range(num_slots))])
    for seq_len in (num_slots - 1, num_slots):
        positions = [*range(num_slots - 1, -1, -1)]
        slots = [p if p < seq_len else -1 for p in positions]
        assert resolve([(positions, seq_len, state)]) == [Outcome(slots, [], state)]
    positions = [*range(num_slots, 0, -1)]
    [done] = resolve([(positions, num_slots + 1, state)])
    assert done.slots == positions and done.plan == []
    hits = [slot for slot in state.lru_slots if slot >= 1]
    assert done.state == State(state.tokens, [0] + hits)


@every_version
@every_size
def test_empty_slots_are_filled_in_lru_order(resolve, num_slots):
    """Cold start: -1 in a slot is never a hit, not even for the padding of a selection."""
    empty = State.holding(*[-1] * num_slots)
    selection = [*range(20, 20 + num_slots - 1), -1]
    [done] = resolve([(selection, 5000, empty)])
    assert done.slots == [*range(num_slots - 1), -1]
    assert done.plan == [Fetch(20 + slot, slot, -1) for slot in range(num_slots - 1)]
    assert done.state.tokens == selection
    [done] = resolve([([-1] * num_slots, 5000, empty)])
    assert done == Outcome([-1] * num_slots, [], empty)


@every_version
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_k_may_exceed_b_while_all_is_resident(resolve, top_k):
    """Short sequences: K positions are asked of fewer slots, some of them twice."""
    state = State.holding(0, 1)
    positions = [0, 1, -1, 1, 2][:top_k]
    assert resolve([(positions, 2, state)])[0].slots == [0, 1, -1, 1, -1][:top_k]


@every_version
def test_duplicates_share_a_slot_and_a_copy(resolve):
    """Of a miss, a hit, the newest position and padding alike."""
    [done] = resolve([([9, 9, 1, 49, 1, -1, 9, 49, -1], 50, shuffled(16, first=0))])
    expected = by_oracle([([9, 1, 49], 50, shuffled(16, first=0))])[0]
    assert done.state == expected.state and done.plan == expected.plan
    nine, one, _ = expected.slots
    assert done.slots == [nine, nine, one, 16, one, -1, nine, 16, -1]

    [done] = resolve([([30, 30, 31, 30, 31, 32], 50, State.holding(0, 1, 2, 3, 4, 5))])
    assert done.slots == [0, 0, 1, 0, 1, 2]
    assert done.plan == [Fetch(30, 0, 0), Fetch(31, 1, 1), Fetch(32, 2, 2)]
    assert done.state == State([30, 31, 32, 3, 4, 5], [3, 4, 5, 0, 1, 2])


@every_version
def test_largest_positions_and_buffer(resolve):
    """int32 positions up to the end of their range, and every slot that int16 can name."""
    top = INT32_MAX - 1
    [done] = resolve([([top, top - 1, 0], INT32_MAX, State.holding(top - 1, 5, -1))])
    assert done.slots == [3, 0, 1] and done.plan == [Fetch(0, 1, 5)]

    num_slots = 32_767
    state = State.holding(*range(num_slots))
    [done] = resolve([([num_slots - 1, 40_000, 40_001], 50_000, state)])
    assert done.slots == [num_slots - 1, 0, 1]
    assert done.state.lru_slots == [*range(2, num_slots - 1), 0, 1, num_slots - 1]


# -- positions out of range -------------------------------------------------------------------

OUT_OF_RANGE = [-2, -INT32_MAX - 1, 9, 10, INT32_MAX]


@every_version
@pytest.mark.parametrize("bad", OUT_OF_RANGE)
@pytest.mark.parametrize("num_slots", [4, 12], ids=["evicting", "resident"])
def test_unchecked_out_of_range_is_padding(resolve, bad, num_slots):
    """It takes no slot and is no hit, even if a slot holds that number."""
    state = State.holding(9, 10, *range(2, num_slots))
    with_bad = resolve([([3, bad, 8], 9, state)])[0]
    without = resolve([([3, -1, 8], 9, state)])[0]
    assert with_bad == without and with_bad.slots[1] == -1


@every_version
@pytest.mark.parametrize("bad", OUT_OF_RANGE)
@pytest.mark.parametrize("num_slots", [4, 12], ids=["evicting", "resident"])
def test_checked_out_of_range_is_an_error(resolve, bad, num_slots):
    with pytest.raises(ValueError, match=rf"position {bad} is out of range: seq_len is 9$"):
        resolve([([3, bad, 8], 9, State.holding(*range(num_slots)))], checked=True)
    assert resolve([([0, -1, 8], 9, State.holding(*range(num_slots)))], checked=True)


def test_the_error_names_the_row():
    good, bad = ([0, 1], 9, State.holding(0, 1, 2)), ([0, 12], 12, State.holding(0, 1, 2))
    message = "row 2: position 12 is out of range: seq_len is 12"
    with pytest.raises(ValueError, match=f"^{message}$"):
        by_torch([good, good, bad, bad], checked=True)


def test_a_checked_error_changes_nothing():
    tokens, lru_slots = [0, 1, 2], [0, 1, 2]
    with pytest.raises(ValueError):
        resolve_oracle([7, 8, 50], 50, tokens, lru_slots, checked=True)
    assert (tokens, lru_slots) == ([0, 1, 2], [0, 1, 2])


# -- any state, any selection -----------------------------------------------------------------


@st.composite
def batches(draw, max_requests: int = 4):
    """Requests of one K and B in arbitrary states, and further selections for later steps."""
    num_slots = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, num_slots))
    num_steps = draw(st.integers(1, 4))
    requests, later = [], []
    for _ in range(draw(st.integers(1, max_requests))):
        seq_len = draw(st.integers(1, 3 * num_slots + 2))
        held = draw(st.lists(st.integers(0, max(seq_len - 2, 0)), max_size=num_slots, unique=True))
        tokens = draw(st.permutations(held + [-1] * (num_slots - len(held))))
        state = State(list(tokens), list(draw(st.permutations(range(num_slots)))))
        position = st.one_of(
            st.integers(0, seq_len - 1),
            st.integers(-3, seq_len + num_steps + 2),
            st.sampled_from([-1, seq_len - 1, *tokens]),
        )
        row = st.lists(position, min_size=top_k, max_size=top_k)
        requests.append((draw(row), seq_len, state))
        later.append([draw(row) for _ in range(num_steps - 1)])
    return requests, later


@property_test
@given(batches())
def test_torch_equals_the_oracle_in_every_state(drawn):
    """Step after step: slots, miss plan, evicted positions, tokens, LRU order."""
    requests, later = drawn
    for step in range(len(later[0]) + 1):
        expected, done = by_oracle(requests), by_torch(requests)
        assert done == expected
        if step < len(later[0]):
            requests = [
                (later[row][step], seq_len + 1, done[row].state)
                for row, (_, seq_len, _) in enumerate(requests)
            ]


@every_version
@property_test
@given(drawn=batches(max_requests=2))
def test_every_version_equals_the_ordered_dict(resolve, drawn):
    requests, later = drawn
    models = [LruModel(state) for _, _, state in requests]
    for step in range(len(later[0]) + 1):
        done = resolve(requests)
        for model, outcome, (positions, seq_len, _) in zip(models, done, requests, strict=True):
            assert outcome.slots == model.resolve(positions, seq_len)
            assert outcome.state == model.state
        if step < len(later[0]):
            requests = [
                (later[row][step], seq_len + 1, done[row].state)
                for row, (_, seq_len, _) in enumerate(requests)
            ]


@every_version
@property_test
@given(drawn=batches(max_requests=2), rng=st.randoms(use_true_random=False))
def test_the_names_of_slots_do_not_matter(resolve, drawn, rng):
    """Renaming the slots renames the answer: nothing depends on a slot's number but S <= B."""
    requests = [
        (p, seq_len, state) for p, seq_len, state in drawn[0] if seq_len > len(state.tokens)
    ]
    for positions, seq_len, state in requests:
        num_slots = len(state.tokens)
        name = [*range(num_slots)]
        rng.shuffle(name)
        name_of = dict(enumerate(name)) | {-1: -1, num_slots: num_slots}

        def rename(state: State, name_of=name_of) -> State:
            tokens = sorted((name_of[slot], p) for slot, p in enumerate(state.tokens))
            return State([p for _, p in tokens], [name_of[slot] for slot in state.lru_slots])

        [done] = resolve([(positions, seq_len, state)])
        [renamed] = resolve([(positions, seq_len, rename(state))])
        assert renamed.slots == [name_of[slot] for slot in done.slots]
        assert renamed.plan == [Fetch(p, name_of[s], evicted) for p, s, evicted in done.plan]
        assert renamed.state == rename(done.state)


@every_version
@property_test
@given(drawn=batches(max_requests=3))
def test_what_the_answer_promises(resolve, drawn):
    """Each slot holds its position, no position is twice, the order is a permutation."""
    for (positions, seq_len, state), done in zip(drawn[0], resolve(drawn[0]), strict=True):
        num_slots = len(state.tokens)
        assert sorted(done.state.lru_slots) == [*range(num_slots)]
        held = [position for position in done.state.tokens if position >= 0]
        assert len(held) == len(set(held))
        for position, slot in zip(positions, done.slots, strict=True):
            if not 0 <= position < seq_len:
                assert slot == -1
            elif seq_len <= num_slots:
                assert slot == position
            elif position == seq_len - 1:
                assert slot == num_slots
            else:
                assert done.state.tokens[slot] == position
        fetched = [fetch.slot for fetch in done.plan]
        assert len(fetched) == len(set(fetched))
        assert all(state.tokens[fetch.slot] == fetch.evicted for fetch in done.plan)


# -- how the torch version is called ----------------------------------------------------------


@property_test
@given(batches())
def test_arguments_are_not_changed(drawn):
    """Neither by the call nor through its results: no result is a view of an argument."""
    arguments = tensors(drawn[0])
    copies = [argument.clone() for argument in arguments]
    done = resolve_torch(*arguments)
    for result in done:
        result.zero_().sub_(1) if result.dtype != torch.bool else result.fill_(True)
    assert all(map(torch.equal, arguments, copies))


def test_result_shapes_and_dtypes():
    requests = [([1, 9, -1], 50, State.holding(0, 1, 2, 3, 4))] * 2
    done = resolve_torch(*tensors(requests))
    assert [(tuple(t.shape), t.dtype) for t in done] == [
        ((2, 3), torch.int64),
        ((2, 3), torch.bool),
        ((2, 3), torch.int32),
        ((2, 5), torch.int32),
        ((2, 5), torch.int16),
    ]


def test_a_batch_of_no_requests():
    """What a step hands over when all its rows are padding."""
    done = resolve_torch(
        torch.empty(0, 3, dtype=torch.int32),
        torch.empty(0, dtype=torch.int32),
        torch.empty(0, 5, dtype=torch.int32),
        torch.empty(0, 5, dtype=torch.int16),
        checked=True,
    )
    assert [tuple(t.shape) for t in done] == [(0, 3), (0, 3), (0, 3), (0, 5), (0, 5)]


@property_test
@given(st.lists(st.lists(st.integers(-2, 4), min_size=5, max_size=5), min_size=1, max_size=3))
def test_first_occurrence(rows):
    expected = [[row.index(value) for value in row] for row in rows]
    assert first_occurrence(torch.tensor(rows, dtype=torch.int32)).tolist() == expected


def test_the_cpu_path_imports_without_numba():
    """Blocked outright, so that an import hidden in a function's module would show too."""
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "import minihisparse.kernels.resolve_torch, minihisparse.gpu_cache\n"
        "assert not [name for name in sys.modules if name.startswith('numba.')]\n"
        "assert 'kernels' not in sys.modules"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
