"""Records what a runner selects: every decode step of a real run becomes a step of a trace.

    with TraceRecorder(runner, "run.safetensors") as recorder:   before any CUDA graph is captured
        step = DecodeStep(runner)
        scheduler = Scheduler(runner, recorder.around(step))
        ...                                                      requests come, run and go

A layer's selection is copied on the device, inside the step (in a CUDA graph too), into one tensor,
the runner's tap. After the step one copy brings it to the host, where it is written while the next
step runs: nobody waits for it. The trace's requests are the engine's request rows; a row that takes
no part in a step has length 0 and no positions there.

The metadata (its keys: `trace.py`) says in "settings" which layers share selections. With a GPU
cache, it also has the cache's B, and its own hits and misses over the recorded steps, so that
`trace replay` can show that it counts the same.

Traffic per step: 8 * R * layers * K bytes on the device, 4 * R * layers * K to the host, R requests
in the batch. It deliberately does not know what is done with a trace.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minihisparse.runner import Runner
from minihisparse.trace_writer import TraceWriter

NOT_WRITTEN = -2  # no selector answers with it


class _Step(NamedTuple):
    """A step on its way to the file: the batch, and where its copies on the host are."""

    rows: Sequence[int]
    seq_lens: Sequence[int]
    selected: Tensor  # [max_requests, L, K] int32, batch row by batch row
    counters: Tensor | None  # [L, 3] int64, the cache's after the step
    copied: torch.cuda.Event | None  # when both are there


class TraceRecorder:
    """Writes the decode steps that run in `around` to a trace.

    seconds: that the host spent on recording; on a GPU this is beside the step, not added to it. A
    context: leaving it closes the file.
    """

    def __init__(
        self,
        runner: Runner,
        path: str | Path,
        *,
        metadata: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        max_steps: int = 1 << 16,
    ) -> None:
        """metadata: what else the file should say, under keys of its own; settings: in its
        "settings", what JSON can hold. max_steps: see `TraceWriter`; the file is 4 bytes larger for
        each of them and each request row.

        Raises OSError if the file cannot be written.
        """
        cache, device = runner.cache, runner.model.device
        self.runner = runner
        self.seconds = 0.0
        self._writer = TraceWriter(
            path,
            num_layers=runner.num_layers,
            num_requests=cache.max_requests,
            top_k=runner.selector.top_k,
            max_steps=max_steps,
            metadata={**(metadata or {}), **_about(runner, settings or {})},
            checked=False,  # too slow for every step
        )
        shape = (cache.max_requests, runner.num_layers, runner.selector.top_k)
        if runner.tap is None:  # the runner's from now on: graphs go on to fill it
            runner.tap = torch.full(shape, NOT_WRITTEN, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        # Two of each: a step is written while the next one is on its way.
        self._selected = torch.empty(2, *shape, dtype=torch.int32, pin_memory=on_gpu)
        self._counters: Tensor | None = None
        if cache.counters is not None:
            shape = cache.counters.shape
            self._counters = torch.empty(2, *shape, dtype=torch.int64, pin_memory=on_gpu)
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(2)]
        self._pending: _Step | None = None
        self._before: Tensor | None = None  # the counters before the first step
        # After so many steps in the file: the last one and the one that is being written, so that
        # Ctrl-C may come at any time.
        self._after: dict[int, Tensor] = {}

    def __enter__(self) -> TraceRecorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def around(self, step: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The same decode step (`DecodeStep`), recorded.

        It raises RuntimeError in its first call if the step's graphs are older than the recorder.
        """

        def recorded(
            token_ids: Sequence[int], rows: Sequence[int], seq_lens: Sequence[int]
        ) -> Tensor:
            if self._before is None and self._counters is not None:
                self._before = self.runner.cache.counters.cpu().clone()
            logits = step(token_ids, rows, seq_lens)
            start = time.perf_counter()
            self._take(rows, seq_lens)
            self.seconds += time.perf_counter() - start
            return logits

        return recorded

    @property
    def num_steps(self) -> int:
        """Steps in the file, and one that may be on its way there."""
        return self._writer.num_steps + (self._pending is not None)

    @property
    def counters(self) -> dict[str, list[int]] | None:
        """{"hits", "misses"}: per layer, of the steps in the file; None if nobody counts."""
        after = self._after.get(self._writer.num_steps)
        if after is None:
            return None
        hits, misses, _ = (after - self._before).T.tolist()
        return {"hits": hits, "misses": misses}

    def close(self) -> None:
        """Writes what is on its way, and the counters: the file is whole."""
        try:
            self._write_pending()
            if self.counters is not None:
                self._writer.metadata["counters"] = json.dumps(self.counters)
        finally:
            self._writer.close()

    def _take(self, rows: Sequence[int], seq_lens: Sequence[int]) -> None:
        """Sends for what the step, which may still run, has selected; writes the one before."""
        turn, num_requests = self.num_steps % 2, len(rows)
        cache, selected, counters = self.runner.cache, self._selected[turn], None
        selected[:num_requests].copy_(self.runner.tap[:num_requests], non_blocking=True)
        if self._counters is not None:
            counters = self._counters[turn].copy_(cache.counters, non_blocking=True)
        copied = self._copied[turn]
        if copied is not None:
            copied.record()
        self._write_pending()
        self._pending = _Step(list(rows), list(seq_lens), selected, counters, copied)

    def _write_pending(self) -> None:
        step, self._pending = self._pending, None
        if step is None:
            return
        if step.copied is not None:
            step.copied.synchronize()  # long over: somebody has sampled from the step's logits
        selected = step.selected[: len(step.rows)].transpose(0, 1)  # [L, R, K]
        if self.runner.selector.anchor_of is not None:
            selected = selected[list(self.runner.selector.anchor_of)]
        if self._writer.num_steps == 0 and (selected == NOT_WRITTEN).any():
            raise RuntimeError(
                "the steps do not fill the recorder's tap: make the TraceRecorder before the "
                "DecodeStep, whose CUDA graphs do what was asked for when they were captured"
            )
        _, num_requests, _ = self._writer.step_shape
        rows = torch.tensor(step.rows)
        positions = torch.full(self._writer.step_shape, -1, dtype=torch.int32)
        positions.index_copy_(1, rows, selected)
        seq_lens = torch.zeros(num_requests, dtype=torch.int32)
        seq_lens[rows] = torch.tensor(step.seq_lens, dtype=torch.int32)
        if step.counters is not None:
            last = self._writer.num_steps
            self._after = {n: after for n, after in self._after.items() if n == last}
            self._after[last + 1] = step.counters.clone()
        self._writer.append(positions, seq_lens)


def _about(runner: Runner, settings: Mapping[str, Any]) -> dict[str, str]:
    """What the file says of the runner: its settings, and its cache's B."""
    selector = runner.selector
    known = {
        "top_k": selector.top_k,
        "dtype": str(runner.model.dtype).removeprefix("torch."),
        "anchor_of": selector.anchor_of,
    }
    about = {"settings": json.dumps({**settings, **known})}
    sizes = getattr(runner.cache, "device_buffer_sizes", None)  # per layer; full KV has none
    if sizes is not None:
        size = sizes[0] if len(set(sizes)) == 1 else list(sizes)
        about["device_buffer_size"] = json.dumps(size)
    return about
