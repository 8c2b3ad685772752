"""Threads that take turns: blocks of greenlets, run one at a time until all have ended.

So that what threads do to each other can be repeated and looked at: in ascending order or, to find
races, in a random one from a seed. A wait that never ends is found, and says where.

    threads = Scheduler("kernel plan", num_blocks=4, num_threads=64, seed=None)
    threads.run(body, resident_blocks=2)    # every thread calls body(); in there:
    threads.current, threads.caller()       # who am I, and at which line?
    threads.pause()                         # others may go first
    threads.meet(mask, value, answer)       # wait for the lanes of a mask, or for the block
    threads.changed = True                  # one that waits may now find what it waits for

Simulated: blocks that start when others end, barriers of a block, collectives of a warp; divergent
barriers, misused masks and threads that wait for what never comes are errors.
Not simulated: threads at the same time (one runs until it pauses, meets others or ends), a warp's
lockstep between collectives, and time.
Stricter than CUDA: a mask must not name lanes that have ended.

Cost, about: 5 us per pause or meeting, for each thread.

It deliberately does not know kernels, arrays or CUDA's names; and a loop that waits without a pause
never ends.
"""

from __future__ import annotations

import linecache
import operator
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from greenlet import getcurrent, greenlet

EVERY_LANE = 0xFFFFFFFF
QUIET_ROUNDS = 1_000  # without a change: the threads hang. Ten times as many if some have met


class SimulationError(RuntimeError):
    """What a GPU would hang at, not survive, or answer with anything at all."""


class Block:
    """Threads that can meet, and what they share."""

    def __init__(self, number: int, num_threads: int) -> None:
        self.number = number
        self.num_threads = self.num_live = num_threads
        self.num_waiting = 0  # in meetings
        self.meetings: dict[Any, list[Thread]] = {}  # of a warp and a mask; None: of all threads
        self.shared: dict[Any, Any] = {}  # for the body to use; gone when the block is


class Thread(greenlet):
    def __init__(self, body: Callable, block: Block, number: int) -> None:
        super().__init__(body)
        self.block, self.number, self.order = block, number, (block.number, number)
        self.warp, self.lane = divmod(number, 32)
        self.frame, self.mask = None, None  # of the line where it waits, and for which lanes
        self.value, self.answer = None, None  # what it brings to a meeting, then what it gets

    def place(self) -> str:
        frame, lines = self.frame, []
        while frame.f_back:  # up to the body, which only calls
            path, line = frame.f_code.co_filename, frame.f_lineno
            source = linecache.getline(path, line).strip()
            lines.append(f"{Path(path).name}:{line} in {frame.f_code.co_name}: {source}")
            frame = frame.f_back
        mask = "" if self.mask is None else f" (mask {self.mask:#x})"
        return f"block {self.block.number} at {', called at '.join(lines)}{mask}"


class Scheduler:
    """Whose turn it is."""

    def __init__(
        self,
        title: str,
        num_blocks: int,
        num_threads: int,
        seed: int | None,
        hidden_files: Iterable[str] = (),
    ) -> None:
        """title: what errors call the whole. seed: of the random order; None: ascending.

        hidden_files: their lines simulate, so they are not the place where a thread is.
        """
        self.title, self.num_blocks, self.num_threads = title, num_blocks, num_threads
        self.hidden_files = {__file__, *hidden_files}
        self.current: Thread  # whose turn it is
        self.changed = self.met = False  # since the last turn; since the last change
        self.hub, self.num_resident = getcurrent(), 0
        self.to_start = [*range(num_blocks)]
        self.live: set[Thread] = set()  # started, not ended
        self.ready: list[Thread] = []  # of these, the ones that wait for nobody
        self.random = None if seed is None else random.Random(seed)
        if self.random:
            self.random.shuffle(self.to_start)

    def run(self, body: Callable[[], Any], resident_blocks: int) -> None:
        """Runs all threads to their end; an exception of one ends all.

        body: only calls what a thread is to do; errors do not name its own line.
        resident_blocks: so many at most are under way.
        Raises SimulationError for a divergence or a hang, and what a body raises, with its place.
        """
        quiet = 0
        try:
            while self.to_start or self.live:
                while self.to_start and self.num_resident < resident_blocks:
                    self._start(body, self.to_start.pop(0))
                self._turn()
                quiet = 0 if self.changed else quiet + 1
                self.met, self.changed = self.met and not self.changed, False
                if quiet == QUIET_ROUNDS * (10 if self.met else 1):
                    text = f"hangs, {len(self.to_start)} blocks cannot start and nothing changes"
                    raise self._failure(text, self.live)
        finally:
            for thread in self.live:
                thread.throw()

    # ---- for the thread whose turn it is ----

    def caller(self) -> FrameType:
        """Where it is: the frame that called something of this file, or of the hidden ones."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename in self.hidden_files:
            frame = frame.f_back
        return frame

    def pause(self) -> None:
        """A scheduling point: others may go first."""
        self.current.frame, self.current.mask = self.caller(), None
        self.ready.append(self.current)
        self.hub.switch()

    def meet(self, mask: int | None, value: Any, answer: Callable[[list[Thread]], Any]) -> Any:
        """Waits for the lanes of the mask, or for the block; each gets answer(all the threads).

        value: what this thread brings: the answer finds it as thread.value.
        answer: the same object for all of one meeting, else they diverged, as in different lines.
        """
        thread, block = self.current, self.current.block
        key, num_needed = None, block.num_live
        if mask is not None:
            mask = int(mask) & EVERY_LANE
            lanes = (1 << min(32, block.num_threads - 32 * thread.warp)) - 1
            key, num_needed = (thread.warp, mask), (mask & lanes).bit_count()
            if not mask >> thread.lane & 1:
                raise SimulationError(f"lane {thread.lane} is not in its own mask {mask:#x}")
        thread.frame, thread.mask, thread.value, thread.answer = self.caller(), mask, value, answer
        meeting = block.meetings.setdefault(key, [])
        meeting.append(thread)
        block.num_waiting += 1
        if meeting[0].answer is not answer or not _same_line(meeting[0].frame, thread.frame):
            raise self._failure("diverged, these meet in different lines", meeting)
        if len(meeting) == num_needed:
            self._close(block, key)
        self.hub.switch()
        return thread.value

    # ---- between turns ----

    def _start(self, body: Callable, number: int) -> None:
        block = Block(number, self.num_threads)
        threads = [Thread(body, block, i) for i in range(self.num_threads)]
        self.ready += threads
        self.live.update(threads)
        self.num_resident += 1

    def _turn(self) -> None:
        """Each ready thread runs to its next scheduling point; with a seed, some of them do."""
        some = len(self.ready)
        if self.random:
            self.random.shuffle(self.ready)
            some = self.random.randint(1, some)
        else:
            self.ready.sort(key=operator.attrgetter("order"))
        threads, self.ready = self.ready[:some], self.ready[some:]
        for thread in threads:
            self.current, block = thread, thread.block
            try:
                thread.switch()
            except Exception as error:
                where = f"thread {thread.number} of block {block.number} of {self.title}"
                error.args = (f"{where}: {error}",)
                raise
            if thread.dead:
                self._end(thread)
            if block.num_waiting == block.num_live > 0:
                ended = f"{block.num_threads - block.num_live} of {block.num_threads} have ended"
                waiting = sum(block.meetings.values(), [])
                raise self._failure(f"diverged, these wait for others, {ended}", waiting)

    def _end(self, thread: Thread) -> None:
        self.live.remove(thread)
        self.changed = True
        block = thread.block
        block.num_live -= 1
        if not block.num_live:
            self.num_resident -= 1
        elif len(block.meetings.get(None, ())) == block.num_live:
            self._close(block, None)  # a barrier does not wait for those that have ended

    def _close(self, block: Block, key: Any) -> None:
        """All have come to a meeting, and can go on."""
        meeting = block.meetings.pop(key)
        answer = meeting[0].answer(meeting)
        for thread in meeting:
            thread.value = answer
        block.num_waiting -= len(meeting)
        self.ready += meeting
        self.met = True

    def _failure(self, problem: str, threads: Iterable[Thread]) -> SimulationError:
        started = sorted((t for t in threads if t.frame), key=operator.attrgetter("order"))
        places = Counter(thread.place() for thread in started)
        lines = [f"{count} threads of {place}" for place, count in places.items()]
        return SimulationError("\n  ".join([f"{self.title} {problem}:", *lines]))


def _same_line(a: FrameType | None, b: FrameType | None) -> bool:
    """Whether two frames, and all that called them, are at the same lines."""
    while a and a.f_code is b.f_code and (a.f_lasti == b.f_lasti or a.f_lineno == b.f_lineno):
        a, b = a.f_back, b.f_back
    return a is None
