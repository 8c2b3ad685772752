"""Replay: what would another cache have fetched? A recorded trace of selections, any policy, any B.

What was selected does not depend on where records live, so one trace tells the hits and misses of
every cache: users choose B with it (the paper's Figure 6). The policies, shortest memory first:

    last_step   keeps the last step's selection and nothing else (Figure 6's B = K)
    random      evicts any slot
    fifo        evicts what was fetched first
    clock       fifo, but what was used since the hand last passed is spared once
    lfu         evicts what was used in the fewest steps since it was fetched; then as lru
    lru         evicts what was used least recently
    engine      the engine's rule (`kernels/resolve.py`), number for number: lru, but hits rank
                above what was just fetched, and Resolve changes nothing while S <= B
    belady      evicts what is needed again last: no policy misses less; it needs the future

The rules that all of them share:

    A step selects a set. All of it must be resident at once: no policy evicts what the step uses.
    The newest position S - 1 is on the device anyway: a hit, without a slot once S > B. One step
    later it is in no slot, like any position that was never fetched. (While S <= B it gets slot
    S - 1, by write-through.)
    A request's first step has S - 1 tokens before it, its prompt: up to B of them begin in slots
    0, 1, ...; of a longer prompt nothing is resident (the engine's rule). A slot that holds nothing
    is taken before one that does.
    While S <= B every position is resident and nothing misses; all policies but engine take note
    of what is used.
    A request ends where its row has seq_len 0, or a seq_len that is not one more than before.

Shapes: steps, layers, requests, K as in `trace.py`; B slots, which may differ by layer.
Cost: per step, layer and request O(B), with a sort of O(B log B) for random, lfu and belady.
Memory, per thread: a copy of one request's positions in one layer (belady: two), and 4 bytes (8)
for each of its S positions.

Threads take one layer each; the policies are compiled (`replay_policies.py`). It deliberately does
not know models, records or bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from minihisparse.replay_policies import POLICIES, replay_request
from minihisparse.trace import Trace


@dataclass(frozen=True)
class ReplayResult:
    """hits, misses: [steps, layers] int64, all requests together; device_buffer_size: by layer.

    Their sum is the number of selected positions, whatever the policy.
    """

    policy: str
    device_buffer_size: tuple[int, ...]
    hits: Tensor
    misses: Tensor

    def miss_rate(self, warmup_steps: int = 0) -> float:
        """Misses over selected positions, of all layers, the first `warmup_steps` left out.

        0.0 if nothing was selected. Raises ValueError if no step is left.
        """
        hits, misses = self._counts(warmup_steps)
        return int(misses.sum()) / max(1, int((hits + misses).sum()))

    def layer_miss_rates(self, warmup_steps: int = 0) -> list[float]:
        """The same for each layer."""
        hits, misses = self._counts(warmup_steps)
        return (misses / (hits + misses).clamp(min=1)).tolist()

    def _counts(self, warmup_steps: int) -> tuple[Tensor, Tensor]:
        """Hits and misses [layers] of the steps that count."""
        if not 0 <= warmup_steps < len(self.hits):
            raise ValueError(f"warmup_steps {warmup_steps} is not in 0..{len(self.hits) - 1}")
        return self.hits[warmup_steps:].sum(0).double(), self.misses[warmup_steps:].sum(0).double()


def replay(
    trace: Trace,
    policy: str,
    device_buffer_size: int | Sequence[int],
    *,
    seed: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> ReplayResult:
    """Runs a trace through one of POLICIES with B slots per request and layer.

    device_buffer_size: B, or one for each layer. seed: of the policy random; each request and layer
    has random numbers of its own, so the result depends on nothing else. progress: called after
    each layer. Uses torch.get_num_threads() threads.
    Raises ValueError: an unknown policy; B < K; not as many B as layers.
    """
    steps, num_layers, _, top_k = trace.positions.shape
    if policy not in POLICIES:
        raise ValueError(f"policy {policy!r} is not one of: {', '.join(POLICIES)}")
    one = isinstance(device_buffer_size, Integral)
    sizes = [device_buffer_size] * num_layers if one else device_buffer_size
    sizes = tuple(int(size) for size in sizes)
    if len(sizes) != num_layers:
        raise ValueError(f"--device-buffer-size: {len(sizes)} sizes for {num_layers} layers")
    if min(sizes) < top_k:
        raise ValueError(
            f"--device-buffer-size {min(sizes)} is less than the trace's K = {top_k}: all "
            "positions of a step must be resident at once"
        )
    positions, seq_lens = trace.positions.numpy(), trace.seq_lens.numpy()
    requests = requests_of(seq_lens)
    counts = np.zeros((2, num_layers, steps), dtype=np.int64)

    def replay_layer(layer: int) -> None:
        for row, start, end in requests:
            replay_request(
                POLICIES.index(policy),
                np.ascontiguousarray(positions[start:end, layer, row]),
                np.ascontiguousarray(seq_lens[start:end, row]),
                sizes[layer],
                request_seed(seed, layer, row, start),
                counts[0, layer, start:end],
                counts[1, layer, start:end],
            )

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        for _ in threads.map(replay_layer, range(num_layers)):
            progress()
    hits, misses = torch.from_numpy(counts).transpose(1, 2).contiguous()
    return ReplayResult(policy, sizes, hits, misses)


def requests_of(seq_lens: np.ndarray) -> list[tuple[int, int, int]]:
    """The requests in seq_lens [steps, rows]: each one's row, first step, and step after its last.

    A request that comes and goes without a gap, one longer than the last by chance, is not seen.
    """
    requests = []
    for row, lens in enumerate(seq_lens.T.astype(np.int64)):
        breaks = np.flatnonzero(np.diff(lens) != 1) + 1
        for start, end in zip([0, *breaks], [*breaks, len(lens)], strict=True):
            start += int(lens[start] == 0)  # 0, 1: the second is one more than no request
            if start < end:
                requests.append((row, int(start), int(end)))
    return requests


def request_seed(seed: int, layer: int, row: int, start: int) -> int:
    """The seed of one request in one layer."""
    return int(np.random.SeedSequence([seed, layer, row, start]).generate_state(1)[0])
