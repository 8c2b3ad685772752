"""What a sparse selector is: which positions a decode step reads, and nothing of where KV lives.

    selector.admit(row, num_tokens)                 room for a request's state; refused: ValueError
    selector.copy_prefix(row, prefix)               its prompt begins as another's: no computation
    selector.write_prompt(layer, row, first, inputs)    each chunk of its prompt, layer by layer
    selector.write(layer, inputs, batch)            each step: the newest token of each request
    positions = selector.select(layer, inputs, batch)   each step: [R, K] int32
    selector.release(row)

A selector keeps its own state on the device and answers, per request and layer, with one list of K
positions: ascending, unique, -1 at the end. One list serves all heads, because a record holds the K
and V of all KV heads. Ties go to the lowest position, so the same state always gives the same list.

The state lies in units of one or several positions; a request owns a range of them.

    Quest   page bounds, no training          quest.py
    DSA     index keys, a trained indexer     indexer.py
    NSA     compressed KV of blocks, trained  nsa.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from minihisparse.attention import Branches
from minihisparse.batch import Batch
from minihisparse.extents import ExtentPool
from minihisparse.model import AttentionInputs
from minihisparse.prefix import Prefix


@dataclass(frozen=True)
class SelectorSize:
    """Device bytes of a selector's state, before it is made; for `plan_capacity`.

    unit_tokens: positions of a unit. unit_bytes: of a unit, all layers. row_bytes: per request row,
    whatever its length. fixed_bytes: once.
    """

    unit_tokens: int
    unit_bytes: int
    row_bytes: int
    fixed_bytes: int = 0

    def units(self, num_tokens: int) -> int:
        """Units that num_tokens positions take."""
        return -(-num_tokens // self.unit_tokens)


class Selector(ABC):
    """top_k: K. extents: who owns which units of the state. anchor_of: per layer the anchor whose
    selection it uses (`anchors.py`); None: every layer selects.
    """

    unit_name = "units"  # for messages
    unit_tokens = 1
    anchor_of: tuple[int, ...] | None = None
    selects_in_shared_layers = False  # whether `select` can be asked there, to compare

    def __init__(
        self,
        *,
        top_k: int,
        unit_tokens: int,
        num_units: int | None,
        max_requests: int,
        max_model_len: int,
        device: torch.device,
    ) -> None:
        """num_units: of all requests together; None: for max_requests of max_model_len tokens."""
        self.top_k = top_k
        self.unit_tokens = unit_tokens
        if num_units is None:
            num_units = -(-max_model_len // unit_tokens) * max_requests
        self.extents = ExtentPool(num_units, max_requests, device)

    @property
    @abstractmethod
    def state_bytes(self) -> int:
        """Device bytes, all request rows."""

    @abstractmethod
    def write_prompt(
        self, layer: int, row: int, first_position: int, inputs: AttentionInputs
    ) -> None:
        """Takes in a chunk of a prompt: positions first_position, first_position + 1, ..."""

    @abstractmethod
    def write(self, layer: int, inputs: AttentionInputs, batch: Batch) -> None:
        """Takes in the newest token of each of R requests."""

    @abstractmethod
    def select(self, layer: int, inputs: AttentionInputs, batch: Batch) -> Tensor:
        """The positions that the newest tokens of R requests read, [R, K] int32.

        Called after `write`. On a GPU the next call overwrites them.
        """

    def branches(
        self, layer: int, inputs: AttentionInputs, positions: Tensor, batch: Batch
    ) -> Branches | None:
        """How attention is split up, given what `select` answered; None: one softmax over it."""
        return None

    def admit(self, row: int, num_tokens: int) -> None:
        """Takes units for `num_tokens` positions. Raises ValueError, changing nothing, if there
        are not enough of them.
        """
        num_units = -(-num_tokens // self.unit_tokens)
        if not self.extents.allocate(row, num_units):
            raise ValueError(
                f"the selector's state has {self.extents.num_free} of {self.extents.num_units} "
                f"{self.unit_name} free, {num_units} in one piece are needed for {num_tokens} "
                "tokens; raise --hbm-budget-gib, or lower --max-new-tokens"
            )

    def copy_prefix(self, row: int, prefix: Prefix) -> None:
        """Copies the state of the first tokens of another request, a whole number of units, to
        `row`. From then on the other may end.
        """
        num_units = prefix.num_tokens // self.unit_tokens
        for state in self.unit_state:
            source, target = (self.extents.extent_of(r)[0] for r in (prefix.row, row))
            state[:, target : target + num_units] = state[:, source : source + num_units]

    @property
    def unit_state(self) -> tuple[Tensor, ...]:
        """The state, [layers, units, ...] each: all there is of a whole unit."""
        return ()

    def release(self, row: int) -> None:
        self.extents.release(row)

    @property
    def longest_request(self) -> tuple[int, str, str]:
        """Tokens that a request can have while no other has any; where, and the flag that helps."""
        return self.extents.num_units * self.unit_tokens, "the selector's state", "--hbm-budget-gib"
