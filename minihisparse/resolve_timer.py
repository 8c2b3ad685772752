"""The time of Resolve inside a decode step: two events per layer, which a CUDA graph records too.

It deliberately does not know what Resolve does; `bench resolve` measures it alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minihisparse.batch import Batch
from minihisparse.decode_step import DecodeStep
from minihisparse.runner import Runner


class ResolveTimer:
    """Puts events around each layer's `resolve` of a runner, whose steps are captured afterwards.

    All graphs record the same events, so a DecodeStep should have one size only. microseconds: of
    each layer of each step that ran in `around`.
    """

    def __init__(self, runner: Runner) -> None:
        """Raises ValueError without a GPU."""
        check_device(runner.model.device)
        self.microseconds: list[float] = []
        self._events = [
            [torch.cuda.Event(enable_timing=True, external=True) for _ in range(2)]
            for _ in range(runner.num_layers)
        ]
        resolve = runner.cache.resolve

        def timed(layer: int, positions: Tensor, batch: Batch) -> Tensor:
            start, end = self._events[layer]
            start.record()
            slots = resolve(layer, positions, batch)
            end.record()
            return slots

        runner.cache.resolve = timed

    def around(self, step: DecodeStep) -> Callable[..., Tensor]:
        """The same step; each call waits for its end and notes its layers' times."""

        def run(*inputs) -> Tensor:
            logits = step(*inputs)
            torch.cuda.synchronize(step.device)
            self.microseconds += [1e3 * start.elapsed_time(end) for start, end in self._events]
            return logits

        return run


def check_device(device: torch.device) -> None:
    """Raises ValueError if there is no GPU to time."""
    if device.type != "cuda":
        raise ValueError(f"--resolve-latency needs a GPU; this is device {device}")
