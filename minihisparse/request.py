"""A request on its way through the engine, and what the user gets back.

Upstream names: RequestOutput and CompletionOutput are vLLM's; `out["text"]` is SGLang's.
A request knows its tokens and its text; it deliberately does not know caches or models.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from minihisparse.sampling import SamplingParams
from minihisparse.tokenizer import Detokenizer


@dataclass
class Request:
    """One prompt and what has been generated for it.

    index: its place in the caller's list. row: its request row in the cache, -1 while it has none.
    finish_reason: None while it runs; "stop" (EOS, a stop id or a stop string), "length",
        "error" (`error` says why), or "abort" (the caller stopped listening).
    unread: tokens that the caller has not seen yet.
    """

    index: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    generator: torch.Generator | None = None
    detokenizer: Detokenizer | None = None
    row: int = -1
    output_ids: list[int] = field(default_factory=list)
    text: str = ""
    delta: str = ""
    finish_reason: str | None = None
    error: str | None = None
    arrival: float = field(default_factory=time.perf_counter)
    token_times: list[float] = field(default_factory=list)
    unread: deque[Delta] = field(default_factory=deque)
    _stop_ids: frozenset[int] | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def max_tokens(self) -> int:
        """The most positions it can ever need."""
        return len(self.prompt_ids) + self.params.max_new_tokens

    def append(self, token_id: int, eos_token_ids: Iterable[int]) -> None:
        """Takes the next token, and leaves a Delta in `unread` for whoever listens."""
        self._append(token_id, eos_token_ids)
        self.unread.append(Delta(self.index, self.delta, token_id, self.finish_reason))

    def _append(self, token_id: int, eos_token_ids: Iterable[int]) -> None:
        """Sets `delta`, the text that became final, and `finish_reason`."""
        self.token_times.append(time.perf_counter())
        self.output_ids.append(token_id)
        self.delta = ""
        if self._stop_ids is None:
            self._stop_ids = self.params.stop_ids(eos_token_ids)
        if token_id in self._stop_ids:
            self.finish("stop")
            return
        if self.detokenizer is not None:
            self.delta = self.detokenizer.add(token_id)
            self.text += self.delta
            if self.detokenizer.stopped:
                self.finish_reason = "stop"
                return
        if len(self.output_ids) == self.params.max_new_tokens:
            self.finish("length")

    def finish(self, reason: str, error: str | None = None) -> None:
        """Ends the request; text that was held back is added to `delta`, up to a stop string."""
        self.finish_reason, self.error = reason, error
        if self.detokenizer is not None:
            rest = self.detokenizer.finish()
            self.delta += rest
            self.text += rest
            if reason == "length" and self.detokenizer.stopped:
                self.finish_reason = "stop"

    def output(self) -> RequestOutput:
        completion = CompletionOutput(self.text, list(self.output_ids), self.finish_reason)
        times = [self.arrival, *self.token_times]
        gaps = [1e3 * (after - before) for before, after in zip(times, times[1:], strict=False)]
        return RequestOutput(
            self.prompt,
            self.prompt_ids,
            [completion],
            self.error,
            ttft_ms=gaps[0] if gaps else None,
            itl_ms=gaps[1:],
        )


@dataclass(frozen=True)
class CompletionOutput:
    """Generated text and ids; the ids include a closing EOS, the text does not."""

    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclass(frozen=True)
class RequestOutput:
    """The result of one prompt.

    error: why the request was refused, else None. ttft_ms: time to the first token, queueing
    included, None if there was none. itl_ms: the times between tokens.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    error: str | None
    ttft_ms: float | None
    itl_ms: list[float]

    def __getitem__(self, key: str) -> str | list[int]:
        """`out["text"]` and `out["token_ids"]`."""
        if key not in ("text", "token_ids"):
            raise KeyError(f"{key!r}; a RequestOutput has 'text' and 'token_ids'")
        return getattr(self.outputs[0], key)


@dataclass(frozen=True)
class Delta:
    """One more token of one request; the texts of a request's deltas add up to its final text."""

    index: int
    text: str
    token_id: int
    finish_reason: str | None
