"""Prefix sharing: which request already has the beginning of a new prompt.

    prefix = prefixes.find(prompt_ids, unit_tokens)   whom to share with, how many tokens; or None
    prefixes.admit(row, prompt_ids, prefix)           the new request has a row, and the prefix's KV
    prefixes.first_position(row)                      where its prefill starts
    prefixes.complete(row, num_tokens)                it is prefilled: others may share with it
    prefixes.remove(row)

What is shared, and with whom (`Runner` puts it together):

- With requests that are prefilled and have not ended; nothing is kept for later ones, so where a
  whole batch ends in one step the next one starts anew. Of a request only the prompt: the KV of an
  answer was computed with sparse attention, that of a prompt was not.
- Host pages that are common as a whole are shared by reference count (`HostPool`). A page that is
  common in part is copied, so whoever writes is alone on the page. The pool's size stays: more
  requests find room in it, or a smaller one (`--host-to-device-ratio`) does.
- What is on the device is private. FullCache's records and the selector's state are copied when the
  request is admitted: a copy, no computation. From then on the other request may end at any moment.
- The prefix ends with a whole unit of the selector's state (Quest's page, NSA's block), because the
  state of half a unit is not there to be copied; and at least one token is left, for its logits.

Bits: the rest of the prompt is prefilled in other chunks than the whole would be. So the last bits
of its KV may depend on who else runs, as they do on the batch's size. Both caches cut alike: given
the same requests in the same order, they still agree to the bit.

Cost: the token ids of each running request; per admission a comparison with them, and the copies.
It does not know where KV lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MIN_TOKENS = 16  # a shorter prefix is not worth the copies


class Prefix(NamedTuple):
    """The first `num_tokens` tokens of the prompt of the request in `row`."""

    row: int
    num_tokens: int


class Prefixes:
    """The prompts of the requests that run, by request row.

    Counters of prefills: num_requests; num_sharing, of these with a prefix of another's;
    num_computed and num_shared, tokens of their prompts that were computed and not.
    """

    def __init__(self, min_tokens: int = MIN_TOKENS) -> None:
        self.min_tokens = min_tokens
        self.reset_counters()
        self._prompts: dict[int, np.ndarray] = {}
        self._first: dict[int, int] = {}
        self._complete: set[int] = set()

    def reset_counters(self) -> None:
        self.num_requests = self.num_sharing = self.num_computed = self.num_shared = 0

    def find(self, prompt_ids: Sequence[int], unit_tokens: int = 1) -> Prefix | None:
        """The longest prefix that is there already, of the lowest row that has it.

        It is a multiple of `unit_tokens`, and shorter than the prompt.
        """
        ids, best = np.asarray(prompt_ids), None
        for row in sorted(self._complete):
            other = self._prompts[row]
            length = min(len(ids) - 1, len(other))
            differs = np.flatnonzero(ids[:length] != other[:length])
            common = int(differs[0]) if len(differs) else length
            common -= common % unit_tokens
            if common >= self.min_tokens and (best is None or common > best.num_tokens):
                best = Prefix(row, common)
        return best

    def admit(self, row: int, prompt_ids: Sequence[int], prefix: Prefix | None) -> None:
        """Notes the prompt of a new request in `row`, which shares `prefix`."""
        self._prompts[row] = np.array(prompt_ids)
        self._first[row] = prefix.num_tokens if prefix else 0

    def first_position(self, row: int) -> int:
        """The first position that the row's prefill computes; 0 where nothing is shared."""
        return self._first.get(row, 0)

    def complete(self, row: int, num_tokens: int) -> None:
        """The row's prompt of `num_tokens` is prefilled. Who was admitted without its prompt is
        counted, but not shared with.
        """
        if row in self._prompts:
            self._complete.add(row)
        first = self.first_position(row)
        self.num_requests += 1
        self.num_sharing += first > 0
        self.num_shared += first
        self.num_computed += num_tokens - first

    def remove(self, row: int) -> None:
        """The row's request has ended, at whatever moment."""
        self._prompts.pop(row, None)
        self._first.pop(row, None)
        self._complete.discard(row)

    def clear(self) -> None:
        """Nobody who runs now can be shared with any more."""
        self._complete.clear()
