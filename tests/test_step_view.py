"""StepView: the table of one layer, from LayerEvents written by hand, and the answers of a person.

Guards: a hit that is shown as fetched, or the other way round; an evicted position beside the wrong
slot; slots of padding, or of other requests; an answer that shows too much, too little, or never
ends.
"""

from collections.abc import Sequence

import pytest
import torch

from minihisparse.events import LayerEvent
from minihisparse.step_view import PER_LINE, StepView


def make_event(
    positions: Sequence[int],
    slots: Sequence[int],
    missed: Sequence[int] = (),
    evicted: dict[int, int] | None = None,
    tokens: Sequence[int] | None = (),
    lru: Sequence[int] = (),
    step: int = 3,
    layer: int = 1,
    seq_len: int = 41,
    record_bytes: int = 128,
) -> LayerEvent:
    """missed: columns of `positions`; evicted: column -> position. A second request is noise."""
    resident = torch.tensor(slots) >= 0
    miss = torch.zeros(len(slots), dtype=torch.bool)
    miss[list(missed)] = True
    gone = torch.full((len(slots),), -1, dtype=torch.int32)
    for column, position in (evicted or {}).items():
        gone[column] = position

    def pair(first: torch.Tensor, other: int) -> torch.Tensor:
        return torch.stack([first, torch.full_like(first, other)])

    attention = torch.zeros(2, 2, 3)
    attention[0, 1] = torch.tensor([3.0, 0.0, 4.0])
    attention[1] = 1e6
    return LayerEvent(
        step=step,
        layer=layer,
        indices=[0, 1],
        seq_lens=[seq_len, 777],
        positions=pair(torch.tensor(positions, dtype=torch.int32), 776),
        slots=pair(torch.tensor(slots), 0),
        hit=pair(resident & ~miss, True),
        missed=pair(miss, True),
        evicted=pair(gone, 775),
        bytes_h2d=torch.tensor([int(miss.sum()) * record_bytes, 999_999]),
        attention=attention,
        device_buffer_tokens=None
        if tokens is None
        else pair(torch.tensor(tokens, dtype=torch.int32), 774),
        lru_slots=None if tokens is None else pair(torch.tensor(lru, dtype=torch.int16), 9),
    )


# ---- the table ----


def test_render():
    """B = 4. Position 7 was in slot 0; 12 displaced 5 in slot 2; 40 is the newest, in slot B."""
    event = make_event(
        positions=[7, 12, 40, -1],
        slots=[0, 2, 4, -1],
        missed=[1],
        evicted={1: 5},
        tokens=[7, 31, 12, -1],
        lru=[3, 1, 2, 0],
    )
    assert StepView.render(event).split("\n") == [
        "step 3, layer 1, seq_len 41: 3 selected, 2 hits, 1 misses, 1 evicted, 128 bytes fetched",
        "slot: position; + is a hit, * was fetched, (p) is the position it displaced",
        "0: 7+      1: 31      2: 12*(5)  4: 40+",
        "least recent slot first: 3 1 2 0",
        "norm of the attention output: 5.0000",
    ]


def test_a_fetch_into_an_empty_slot_displaces_nothing():
    event = make_event([7, 40], [0, 2], missed=[0], tokens=[7, -1], lru=[1, 0])
    head, _, table, *_ = StepView.render(event).split("\n")
    assert head.endswith(": 2 selected, 1 hits, 1 misses, 0 evicted, 128 bytes fetched")
    assert table == "0: 7*   2: 40+"


def test_position_and_slot_zero():
    """0 is a position, a slot and an evicted position like any other."""
    hit = make_event([0, 1], [0, 1], tokens=[0, 1, -1], lru=[2, 0, 1], seq_len=2)
    assert "0: 0+  1: 1+" in StepView.render(hit)
    evicting = make_event([9], [0], missed=[0], evicted={0: 0}, tokens=[9, 3], lru=[1, 0])
    assert "0: 9*(0)  1: 3" in StepView.render(evicting)
    assert "1 evicted" in StepView.render(evicting)


def test_a_step_of_misses_only():
    columns = range(3)
    evicted = {column: 10 + column for column in columns}
    event = make_event(
        [20, 21, 22], [2, 0, 1], columns, evicted, [21, 22, 20], [2, 0, 1], record_bytes=10
    )
    head, _, table, *_ = StepView.render(event).split("\n")
    assert head.endswith("3 selected, 0 hits, 3 misses, 3 evicted, 30 bytes fetched")
    assert table.split() == ["0:", "21*(11)", "1:", "22*(12)", "2:", "20*(10)"]


@pytest.mark.parametrize("num_slots", [1, PER_LINE, PER_LINE + 1, 3 * PER_LINE])
def test_lines_of_the_table(num_slots):
    """PER_LINE cells a line, columns below each other, no blanks at the ends."""
    tokens = [10**i % 99_991 for i in range(num_slots)]  # of different widths
    event = make_event([tokens[-1]], [num_slots - 1], tokens=tokens, lru=range(num_slots))
    lines = StepView.render(event).split("\n")[2:-2]
    assert [line.count(":") for line in lines] == [
        min(PER_LINE, num_slots - i) for i in range(0, num_slots, PER_LINE)
    ]
    assert all(line == line.rstrip() for line in lines)
    words = " ".join(lines).replace(":", "").replace("+", "").split()
    assert [int(word) for word in words] == [
        number for pair in enumerate(tokens) for number in pair
    ]
    for first, line in zip(range(0, num_slots, PER_LINE), lines, strict=True):
        for column in range(min(PER_LINE, num_slots - first)):
            start = column * lines[0].find("1: ")
            assert line[start:].startswith(f"{first + column}: ")


@pytest.mark.parametrize(
    "num_slots, expected",
    [
        (12, "0 1 2 3 4 5 6 7 8 9 10 11"),
        (13, "0 1 2 3 4 5 ... 7 8 9 10 11 12"),
        (500, "0 1 2 3 4 5 ... 494 495 496 497 498 499"),
    ],
)
def test_a_long_lru_order_is_shortened(num_slots, expected):
    event = make_event([0], [0], tokens=[0] + [-1] * (num_slots - 1), lru=range(num_slots))
    assert f"\nleast recent slot first: {expected}\n" in StepView.render(event)


def test_full_cache():
    event = make_event([7, 12, 40], [7, 12, 40], tokens=None)
    assert StepView.render(event).split("\n") == [
        "step 3, layer 1, seq_len 41: 3 selected, 3 hits, 0 misses, 0 evicted, 0 bytes fetched",
        "(full cache: the slot of position p is p)",
    ]


# ---- the answers ----


def walk(answers: Sequence[str], num_steps: int = 6, num_layers: int = 2) -> list[tuple[int, int]]:
    """(step, layer) of what is shown, as the command `step` goes through the events."""
    view, shown = StepView(iter(answers)), []
    for step in range(1, num_steps + 1):
        for layer in range(num_layers):
            event = make_event([0], [0], tokens=[0], lru=[0], step=step, layer=layer)
            if view.wants(event):
                shown.append((step, layer))
                if not view.go_on(event):
                    return shown
    return shown


ALL = [(step, layer) for step in range(1, 7) for layer in range(2)]


@pytest.mark.parametrize(
    "answers, expected",
    [
        ([], ALL[:1]),
        (["q"], ALL[:1]),
        ([""], ALL[:2]),
        (["", "n", "  ", "q", ""], ALL[:4]),
        ([""] * 99, ALL),
        (["s", "s", "q"], [(1, 0), (2, 0), (3, 0)]),
        (["", "s", ""], [(1, 0), (1, 1), (2, 0), (2, 1)]),  # s from the last layer of a step
        (["s"] * 99, [(step, 0) for step in range(1, 7)]),
        (["g 5", "", "s"], [(1, 0), (5, 0), (5, 1), (6, 0)]),
        (["g 99"], [(1, 0)]),
        (["s", "g 1", ""], [(1, 0), (2, 0), (2, 1), (3, 0)]),  # what is past does not come back
        (["s", "g 0"], [(1, 0), (2, 0), (2, 1)]),
        ([" s ", "\tq"], [(1, 0), (2, 0)]),
    ],
)
def test_answers(answers, expected, capsys):
    assert walk(answers) == expected
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("nonsense", ["x", "g", "g x", "g -1", "g 1 2", "q q", "S", "g ²", "5"])
def test_nonsense_is_asked_for_again(nonsense, capsys):
    """And decides nothing."""
    assert walk([nonsense, nonsense, "s", "q"]) == [(1, 0), (2, 0)]
    line = f"{nonsense!r} is not one of: {StepView.QUESTION}\n"
    assert capsys.readouterr().out == 2 * line
    assert walk([nonsense]) == [(1, 0)]  # then the pipe ends
