"""The terminal view of `step`: one layer of one decode step, as a table of slots.

It draws a `LayerEvent` and asks what to show next; it deliberately does not run anything.
"""

from __future__ import annotations

from collections.abc import Iterator

from minihisparse.events import LayerEvent

PER_LINE = 8  # slots in a line of the table


class StepView:
    """Decides which events are shown. Answers come from `answers`: keys of a person, or a pipe."""

    QUESTION = "Enter: next layer, s: next step, g N: step N, q: quit> "

    def __init__(self, answers: Iterator[str]) -> None:
        self._answers = answers
        self._next_step = 1

    def wants(self, event: LayerEvent) -> bool:
        return event.step >= self._next_step

    def go_on(self, event: LayerEvent) -> bool:
        """Takes the next answer; False is the end. An answer not understood is asked for again."""
        for answer in self._answers:
            words = answer.split()
            if not words or words == ["n"]:
                return True
            if words == ["q"]:
                return False
            if words == ["s"]:
                self._next_step = event.step + 1
                return True
            if len(words) == 2 and words[0] == "g" and words[1].isdecimal():
                self._next_step = int(words[1])
                return True
            print(f"{answer!r} is not one of: {self.QUESTION}")
        return False

    @staticmethod
    def render(event: LayerEvent) -> str:
        """The first request's layer: counts, the slots in use, the LRU order's two ends."""
        hit, missed = event.hit[0], event.missed[0]
        lines = [
            f"step {event.step}, layer {event.layer}, seq_len {event.seq_lens[0]}: "
            f"{int((event.positions[0] >= 0).sum())} selected, {int(hit.sum())} hits, "
            f"{int(missed.sum())} misses, {int((event.evicted[0] >= 0).sum())} evicted, "
            f"{int(event.bytes_h2d[0])} bytes fetched"
        ]
        if event.device_buffer_tokens is None:
            return lines[0] + "\n(full cache: the slot of position p is p)"
        lines.append("slot: position; + is a hit, * was fetched, (p) is the position it displaced")
        lines += _table(_cells(event))
        order = event.lru_slots[0].tolist()
        if len(order) > 12:
            order = [*order[:6], "...", *order[-6:]]
        lines.append("least recent slot first: " + " ".join(map(str, order)))
        norm = float(event.attention[0].float().norm())
        return "\n".join([*lines, f"norm of the attention output: {norm:.4f}"])


def _cells(event: LayerEvent) -> list[str]:
    """One text per slot in use, the newest token's slot last."""
    tokens = event.device_buffer_tokens[0].tolist()
    cells = {slot: f"{slot}: {token} " for slot, token in enumerate(tokens) if token >= 0}
    selected = zip(
        event.positions[0].tolist(),
        event.slots[0].tolist(),
        event.missed[0].tolist(),
        event.evicted[0].tolist(),
        strict=True,
    )
    for position, slot, missed, evicted in selected:
        if slot >= 0:
            mark = "*" if missed else "+"
            gone = f"({evicted})" if evicted >= 0 else ""
            cells[slot] = f"{slot}: {position}{mark}{gone}"
    return [cells[slot] for slot in sorted(cells)]


def _table(cells: list[str]) -> list[str]:
    width = max(map(len, cells), default=0) + 2
    lines = [cells[i : i + PER_LINE] for i in range(0, len(cells), PER_LINE)]
    return ["".join(cell.ljust(width) for cell in line).rstrip() for line in lines]
