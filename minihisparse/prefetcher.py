"""Prefetch for layers that share a selection: plan once, then copy while other layers work.

An anchor layer selects and resolves; the shared layers after it use the same positions. They are in
lockstep, so the anchor's miss plan is theirs too, known before they begin. A copy-only kernel on a
side stream replays it into one after the other; each waits for its own copy only.

    main stream   anchor: Resolve | attention, mlp | shared 1: attention, mlp | shared 2: attention
                             |                     ^ wait                     ^ wait
    side stream              '-> replay into 1, event | replay into 2, event --'

    slots = cache.resolve(anchor, positions, batch)
    prefetcher.start(anchor, batch)              forks the side stream
    cache.write_through(shared, records, batch)  each shared layer: its newest record
    prefetcher.wait(shared)                      before its attention
    prefetcher.slots(shared)                     the anchor's, [R, K] int32
    prefetcher.join()                            ends a step, and comes before anything is released

Upstream names: anchor and shared layers, miss plan. Nothing is predicted: what is copied is exactly
what the layer would have fetched itself, so outputs are the same bits with and without.

Why no copy meets another access to the same bytes:

- The plan and the slots are overwritten by the next Resolve. It is the next anchor's; by then all
  layers of this group have been waited for: `start` refuses if not, `join` sees to the last group.
- The write-through of a shared layer may run beside the replay into it. While S <= B there is no
  miss, so the plan is empty; afterwards the newest record goes to slot B, which no plan has. Its
  host row is that of position S - 1, which is never a miss in that step.
- The attention of the step before has read the slots that are filled now: it is older on the main
  stream than the fork.

In a CUDA graph the side stream is forked and joined inside the capture, and events are graph edges.
On a CPU there are no streams: `wait` copies, as late as it may.

Cost: per shared layer a launch and record_bytes per miss on the bus, as without prefetch; no
Resolve, no memory but events. It deliberately does not know how a plan is made or replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minihisparse.batch import Batch
from minihisparse.gpu_cache import HiSparseCache


class Prefetcher:
    """Replays the plans of a cache's anchors into their shared layers, ahead of time."""

    def __init__(self, cache: HiSparseCache) -> None:
        """For a cache with `anchor_of`; without shared layers there is nothing to do."""
        self.cache = cache
        self._shared: dict[int, list[int]] = {anchor: [] for anchor in set(cache.anchor_of)}
        for layer, anchor in enumerate(cache.anchor_of):
            if layer != anchor:
                self._shared[anchor].append(layer)
        self._anchor: int | None = None  # of the last start
        self._waiting: list[int] = []  # shared layers of its group, not waited for
        self._batch: Batch | None = None  # its tensors must live until all have been
        self._stream: torch.cuda.Stream | None = None
        if cache.device.type == "cuda" and cache.has_shared_layers and not cache.skip_io:
            # Of high priority: the few blocks of a copy should not queue behind the main stream's.
            self._stream = torch.cuda.Stream(cache.device, priority=-1)
            self._fork, *self._copied = (torch.cuda.Event() for _ in range(cache.num_layers + 1))
            for event in (self._fork, *self._copied):
                event.record(self._stream)  # exists from its first record on: not in a capture

    def start(self, anchor: int, batch: Batch) -> None:
        """Begins to fetch for the shared layers of a group, right after `resolve` of its anchor.

        Raises ValueError if the layer is no anchor, RuntimeError if a shared layer of the group
        before has not been waited for.
        """
        if anchor not in self._shared:
            raise ValueError(f"layer {anchor} is no anchor")
        if self._waiting:
            raise RuntimeError(
                f"nobody has waited for the records of layers {self._waiting}, whose plan the "
                f"Resolve of layer {anchor} has overwritten"
            )
        self._anchor, self._waiting, self._batch = anchor, list(self._shared[anchor]), batch
        if self._stream is None or not self._waiting:
            return
        main = torch.cuda.current_stream(self.cache.device)
        self._fork.record(main)
        self._stream.wait_event(self._fork)
        with torch.cuda.stream(self._stream):
            for layer in self._waiting:
                self.cache.replay(layer, batch)
                self._copied[layer].record(self._stream)

    def wait(self, layer: int) -> None:
        """Lets the current stream wait until the layer's records are there; nobody else waits.

        Raises RuntimeError if nothing was started for the layer, or it has been waited for.
        """
        if layer not in self._waiting:
            raise RuntimeError(
                f"nothing is under way for layer {layer}: start its anchor, layer "
                f"{self.cache.anchor_of[layer]}, before, and wait once"
            )
        if self._stream is not None:
            torch.cuda.current_stream(self.cache.device).wait_event(self._copied[layer])
        else:
            self.cache.replay(layer, self._batch)
        self._waiting.remove(layer)
        if not self._waiting:
            self._batch = None

    def slots(self, layer: int) -> Tensor:
        """The slots [R, K] int32 of a layer's selection: those of its anchor.

        Valid until the next `resolve`. Raises RuntimeError if its anchor was not started last.
        """
        anchor = self.cache.anchor_of[layer]
        if anchor != self._anchor:
            raise RuntimeError(f"layer {layer}: its anchor, layer {anchor}, was not started last")
        return self.cache.top_k_device_locs

    def join(self) -> None:
        """Waits for whatever is under way. For the end of a step, also of one that was broken off:
        before the next `resolve`, and before a request row is released.
        """
        for layer in list(self._waiting):
            self.wait(layer)
        self._anchor = None
