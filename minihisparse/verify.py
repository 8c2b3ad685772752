"""Full-HBM and HiSparse side by side: the same prompts, layer by layer, compared to the bit.

Two runners share one model. Both prefill the same prompts; then each decode step runs layer by
layer in both, with the same tokens, and everything that they compute is compared: the records of
the prompt, the selected positions, the attention output, the hidden state, the logits, and the
newest record, which write-through has put on the device of one and into the host pool of the other.

Only the cache differs, so any difference is HiSparse's fault; `Difference` says where it began.

On a GPU each runner replays its CUDA graph, which nobody can stop in the middle: then the logits
are compared, and the newest record of every layer. `--enforce-eager` looks at every layer there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minihisparse.batch import Batch
from minihisparse.decode_step import DecodeStep
from minihisparse.gpu_cache import bits
from minihisparse.runner import LayerResult, Runner
from minihisparse.stats import Timings, Workspace


@dataclass(frozen=True)
class Difference:
    """The first thing that was not equal. step 0 is the prefill; layer -1 are the logits."""

    step: int
    layer: int
    what: str
    max_abs_diff: float

    def __str__(self) -> str:
        where = "logits" if self.layer < 0 else f"layer {self.layer}"
        return f"step {self.step}, {where}: {self.what} differs by up to {self.max_abs_diff:.3e}"


class Lockstep:
    """Runs two runners over the same requests and compares them.

    first_difference: None while everything was equal. max_abs_diff: over all logits; inf if one
    of two is no number. use_graphs: whether steps are replayed, and compared as wholes.
    timings: per runner, "full" and "hisparse", each timed alone. tokens: per request, greedy.
    enable_prefix_sharing: in both, with the requests before; so both compute the same chunks.
    """

    def __init__(
        self,
        full: Runner,
        hisparse: Runner,
        check_integrity: bool = True,
        *,
        enforce_eager: bool = False,
        enable_prefix_sharing: bool = True,
        use_tqdm: bool = False,
    ) -> None:
        self.runners = {"full": full, "hisparse": hisparse}
        self.use_graphs = full.model.device.type == "cuda" and not enforce_eager
        if self.use_graphs:
            self._graphs = {
                name: DecodeStep(runner, progress=use_tqdm) for name, runner in self.runners.items()
            }
        self.check_integrity = check_integrity
        self.enable_prefix_sharing = enable_prefix_sharing
        self.first_difference: Difference | None = None
        self.max_abs_diff = 0.0
        self.device = full.model.device
        self.timings = {name: Timings() for name in self.runners}
        self.workspaces = {name: Workspace(self.device) for name in self.runners}
        self.tokens: list[list[int]] = []
        self.num_steps = 0

    @property
    def exact(self) -> bool:
        return self.first_difference is None

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        progress: Callable[[], object] = lambda: None,
    ) -> Iterator[list[int]]:
        """Yields the next token of each request [R]; stops after `max_new_tokens`, or when every
        request has met one of `stop_ids`. Raises AssertionError: a cache's invariant is broken;
        ValueError: nothing to run, or a cache refuses a prompt. progress: called after each layer
        of each prefill, in each runner.
        """
        _check_arguments(prompts, max_new_tokens)
        admitted: list[tuple[Runner, int]] = []
        try:
            rows, last = [], []
            for prompt in prompts:  # in turns: a prompt is shared once it is prefilled
                rows.append(self._admit(prompt, max_new_tokens, admitted))
                last.append(self._prefill(rows[-1], prompt, progress))
            self.tokens = [[token] for token in last]
            yield last
            done = [token in stop_ids for token in last]
            while len(self.tokens[0]) < max_new_tokens and not all(done):
                seq_lens = [len(p) + len(t) for p, t in zip(prompts, self.tokens, strict=True)]
                last = self._decode(last, Batch.make(rows, seq_lens, self.device))
                for tokens, token in zip(self.tokens, last, strict=True):
                    tokens.append(token)
                done = [d or t in stop_ids for d, t in zip(done, last, strict=True)]
                yield last
        finally:
            for runner, row in admitted:
                runner.release(row)

    def _admit(
        self, prompt: Sequence[int], max_new_tokens: int, admitted: list[tuple[Runner, int]]
    ) -> int:
        """Admits a request to both runners; notes each in `admitted`, whatever happens next."""
        num_tokens = len(prompt) + max_new_tokens
        shared = prompt if self.enable_prefix_sharing else None
        for runner in self.runners.values():
            admitted.append((runner, runner.admit(num_tokens, shared)))
        rows = [row for _, row in admitted[-2:]]
        if rows[0] != rows[1]:
            raise AssertionError(f"the two caches gave different request rows: {rows}")
        return rows[0]

    def _prefill(self, row: int, prompt: Sequence[int], progress: Callable[[], object]) -> int:
        ids = torch.tensor(prompt, device=self.device)
        logits = {}
        for name, runner in self.runners.items():
            start = self._now()
            with self.workspaces[name].measure():
                logits[name] = runner.prefill(row, ids, progress)
            self.timings[name].ttft_ms.append(1e3 * (self._now() - start))
        for layer in range(self.runners["full"].num_layers):
            positions = torch.arange(len(prompt), device=self.device)
            self._compare_history(0, layer, torch.full_like(positions, row), positions)
        self._compare(0, -1, "next-token logits of the prompt", *logits.values())
        return int(logits["full"].argmax())

    def _decode(self, token_ids: list[int], batch: Batch) -> list[int]:
        self.num_steps += 1
        if self.use_graphs:
            logits = self._replay(token_ids, batch)
        else:
            logits = self._layer_by_layer(token_ids, batch)
        self._compare(self.num_steps, -1, "logits", *logits.values())
        if self.check_integrity:
            cache = self.runners["hisparse"].cache
            lens = [0] * cache.max_requests
            for row, seq_len in zip(
                batch.req_pool_indices.tolist(), batch.seq_lens.tolist(), strict=True
            ):
                lens[row] = seq_len
            cache.check_integrity(lens)
        return logits["full"].argmax(dim=-1).tolist()

    def _replay(self, token_ids: list[int], batch: Batch) -> dict[str, Tensor]:
        """A whole step in each runner, by its graph; the logits [R, V] of each."""
        rows, seq_lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        logits = {}
        for name, graph in self._graphs.items():
            start = self._now()
            logits[name] = graph(token_ids, rows, seq_lens)
            self.timings[name].add_step(self._now() - start, len(token_ids))
        for layer in range(self.runners["full"].num_layers):
            self._compare_history(self.num_steps, layer, batch.req_pool_indices, batch.positions)
        return logits

    def _layer_by_layer(self, token_ids: list[int], batch: Batch) -> dict[str, Tensor]:
        """A step in each runner, with everything compared after each layer; the logits [R, V]."""
        step = self.num_steps
        seconds = dict.fromkeys(self.runners, 0.0)
        hidden = {}
        for name, runner in self.runners.items():
            hidden[name] = runner.embed(torch.tensor(token_ids, device=self.device))
        for layer in range(self.runners["full"].num_layers):
            results: dict[str, LayerResult] = {}
            for name, runner in self.runners.items():
                start = self._now()
                results[name] = runner.decode_layer(layer, hidden[name], batch)
                seconds[name] += self._now() - start
                hidden[name] = results[name].hidden
            for what in ("positions", "attention", "hidden"):
                pair = (getattr(result, what) for result in results.values())
                self._compare(step, layer, what, *pair)
            self._compare_history(step, layer, batch.req_pool_indices, batch.positions)
        logits = {}
        for name, runner in self.runners.items():
            start = self._now()
            logits[name] = runner.logits(hidden[name])
            seconds[name] += self._now() - start
            self.timings[name].add_step(seconds[name], len(token_ids))
        return logits

    def _compare_history(self, step: int, layer: int, rows: Tensor, positions: Tensor) -> None:
        """The host pool's records against those that FullCache holds on the device; rows, positions
        [N].
        """
        full, host = self.runners["full"].cache, self.runners["hisparse"].cache.host
        on_device = full.slot_records(layer)[full.first_slot[rows] + positions]
        in_pool = host.read(layer, host.host_rows_of(rows, positions))
        self._compare(step, layer, "a record in the host pool", on_device, in_pool)

    def _compare(self, step: int, layer: int, what: str, full: Tensor, hisparse: Tensor) -> None:
        if torch.equal(bits(full), bits(hisparse)):
            return
        apart = (full.double() - hisparse.double()).abs()  # nan: no number, or inf - inf
        diff = apart.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
        if layer < 0:
            self.max_abs_diff = max(self.max_abs_diff, diff)
        if self.first_difference is None:
            self.first_difference = Difference(step, layer, what, diff)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def _check_arguments(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if not prompts:
        raise ValueError("there are no prompts to compare")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens: got {max_new_tokens}, expected an integer >= 1")
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {index}: it is empty; a prompt needs at least one token")
