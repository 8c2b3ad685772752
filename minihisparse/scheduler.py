"""Continuous batching: requests join and leave between steps, first come, first served.

    scheduler.add(request)        to the end of the queue
    scheduler.step()              admit, prefill and decode once; every running request gets a token
    scheduler.abort(request)      at any moment; what it held is free again

A request is admitted when every budget has room for the longest that it can become: a request row,
KV (host pages, or device slots of FullCache), and pages of the selector's state. Of these only host
pages can be shared with a running request (`prefix.py`); they are there already. So nothing can run
out half-way. The queue is never overtaken: a long request waits until it fits and so does everybody
behind it. What does not even fit alone is refused, with the budget that is short and the flag that
helps.

One bad request harms nobody: if its logits are no numbers, or the device's memory does not suffice
for its prompt, it ends with an error and the others go on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import torch

from minihisparse.batch import Batch
from minihisparse.decode_step import DecodeStep
from minihisparse.events import LayerEvent, explain, tokens_of
from minihisparse.request import Request
from minihisparse.runner import Runner
from minihisparse.sampling import NO_TOKEN, mask_stop_ids, sample
from minihisparse.stats import Timings, Workspace

MAX_PREFILL_TOKENS = 8192


class _Aborted(Exception):
    """The request that is being prefilled is no longer wanted."""


class Scheduler:
    """The requests of one runner.

    waiting: in the order of arrival. running: admitted and prefilled, one token per step each.
    """

    def __init__(
        self,
        runner: Runner,
        decode: DecodeStep,
        max_prefill_tokens: int | None = None,
        *,
        enable_prefix_sharing: bool = True,
    ) -> None:
        """max_prefill_tokens: once so many have been prefilled, it is the others' turn to decode;
        None: 8192. Raises ValueError if it is less than 1. enable_prefix_sharing: a prompt that
        begins as that of a running request is prefilled from there on (`prefix.py`).
        """
        if max_prefill_tokens is None:
            max_prefill_tokens = MAX_PREFILL_TOKENS
        if max_prefill_tokens < 1:
            raise ValueError(f"--max-prefill-tokens {max_prefill_tokens} is less than 1")
        self.max_prefill_tokens = max_prefill_tokens
        self.enable_prefix_sharing = enable_prefix_sharing
        self.runner = runner
        self.decode = decode
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.workspace = Workspace(runner.model.device)
        self.timings = Timings()
        self._eos = runner.model.config.eos_token_ids
        self._prefilling: Request | None = None
        self._open_step: Iterator[LayerEvent] | None = None  # somebody looks at its layers
        self._has_prefilled = False  # in the last step
        self._is_full = False  # the next in the queue was refused, and nobody has left since

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Ends a request wherever it is, in the middle of its prefill too; nothing if it ended."""
        self._finish_open_step()  # the request may take part in it
        if request.finished:
            return
        request.finish("abort")
        if request is not self._prefilling:  # which looks at it after each layer
            self._forget(request)

    def step(self) -> None:
        """Prefills waiting requests that fit, or decodes one token for each running one: in turns,
        so that neither waits for long.
        """
        self._finish_open_step()
        if not self._prefill_some():
            active = list(self.running)
            start = time.perf_counter()
            self._append(active, self.decode(*self._inputs(active)))
            self.timings.add_step(time.perf_counter() - start, len(active))

    def step_layers(self) -> Iterator[LayerEvent]:
        """The same as `step`, but stops after each layer; the next one runs when asked for.

        What else is asked of the scheduler meanwhile runs the rest of the step first, unseen.
        """
        self._finish_open_step()
        if not self._prefill_some():
            self._open_step = self._layers(list(self.running))
            yield from self._open_step

    def _layers(self, active: list[Request]) -> Iterator[LayerEvent]:
        runner, start = self.runner, time.perf_counter()
        token_ids, rows, seq_lens = self._inputs(active)
        batch = Batch.make(rows, seq_lens, runner.model.device)
        hidden = runner.embed(torch.tensor(token_ids, device=runner.model.device))
        for layer in range(runner.num_layers):
            if runner.cache.has_own_tables(layer):
                before = tokens_of(runner.cache, layer, batch)
            result = runner.decode_layer(layer, hidden, batch)
            hidden = result.hidden
            step, indices = max(len(r.output_ids) for r in active), [r.index for r in active]
            event = explain(
                runner.cache, batch, result, before, step=step, layer=layer, indices=indices
            )
            stopped = time.perf_counter()
            yield event
            start += time.perf_counter() - stopped  # looking takes no time of the engine's
        self._append(active, runner.logits(hidden))
        self.timings.add_step(time.perf_counter() - start, len(active))

    def _finish_open_step(self) -> None:
        step, self._open_step = self._open_step, None
        for _ in step or ():
            pass

    def _inputs(self, active: list[Request]) -> tuple[list[int], list[int], list[int]]:
        """Newest tokens, request rows and lengths."""
        return (
            [r.output_ids[-1] for r in active],
            [r.row for r in active],
            [len(r.prompt_ids) + len(r.output_ids) for r in active],
        )

    def _prefill_some(self) -> bool:
        """Admits and prefills what may come next; False if it is time to decode."""
        num_tokens = 0
        if self._has_prefilled and self.running:
            self._has_prefilled = False
            return False
        while self.waiting and not self._is_full and num_tokens < self.max_prefill_tokens:
            request = self.waiting[0]
            try:
                shared = request.prompt_ids if self.enable_prefix_sharing else None
                request.row = self.runner.admit(request.max_tokens, shared)
            except ValueError as error:
                if self.running:
                    self._is_full = True  # somebody will leave
                    break
                self.waiting.popleft()
                request.finish("error", f"prompt {request.index}: {error}")
                continue
            self.waiting.popleft()
            num_tokens += len(request.prompt_ids)
            num_tokens -= self.runner.prefixes.first_position(request.row)
            self._prefill(request)
        self._has_prefilled = num_tokens > 0
        return self._has_prefilled or not self.running

    def _prefill(self, request: Request) -> None:
        """Runs a prompt and adds the request to `running`, unless it ends at once."""
        self._prefilling = request

        def stop_if_aborted() -> None:
            if request.finished:
                raise _Aborted

        self.running.append(request)
        try:
            ids = torch.tensor(request.prompt_ids, device=self.runner.model.device)
            with self.workspace.measure():
                logits = self.runner.prefill(request.row, ids, stop_if_aborted)
            stop_if_aborted()
        except _Aborted:
            self._forget(request)
            return
        except torch.OutOfMemoryError as error:
            problem = f"no device memory for a prompt of {len(request.prompt_ids)} tokens"
            request.finish(
                "error",
                f"prompt {request.index}: {problem} ({_first_line(error)}); lower "
                "--hbm-budget-gib or --max-running-requests",
            )
            self._forget(request)
            return
        except BaseException:  # Ctrl-C, or a fault of ours
            request.finish("abort")
            self._forget(request)
            raise
        finally:
            self._prefilling = None
        self._append([request], logits[None])
        self.timings.ttft_ms.append(1e3 * (time.perf_counter() - request.arrival))

    def _append(self, active: list[Request], logits: torch.Tensor) -> None:
        """Samples the next token of each request from logits [R, V]; finished ones leave."""
        params = [r.params for r in active]
        logits = mask_stop_ids(logits, params, [len(r.output_ids) for r in active], self._eos)
        tokens = sample(logits, params, [r.generator for r in active])
        for request, token in zip(active, tokens, strict=True):
            if request.finished:  # aborted while the step ran
                continue
            if token == NO_TOKEN:
                request.finish(
                    "error",
                    f"prompt {request.index}: after {len(request.output_ids)} new tokens its "
                    "largest logit is no finite number: the model's output overflowed, or every "
                    "token is forbidden; try --dtype fp32",
                )
            else:
                request.append(token, self._eos)
            if request.finished:
                self._forget(request)

    def _forget(self, request: Request) -> None:
        """Removes a request that has ended, and gives back what it holds."""
        self._is_full = False
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
        if request.row >= 0:
            row, request.row = request.row, -1
            self.runner.release(row)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
