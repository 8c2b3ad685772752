"""A B per layer: shares a total of slots out among layers, so that fewest positions miss.

Layers miss very differently at one B, so a slot is worth more in some than in others. Each layer
has at least K. Beyond that, the next slots go where they save most misses each (greedy by marginal
gain). A miss curve may be flat first and fall later, which steps of one slot would never see; so
gains are those of the curve's lower convex hull, where they only shrink. Where the split falls on
corners of the hulls it is optimal for plain LRU; else it is off by part of one stretch.

Layers in lockstep (an anchor and those that share its selection, `anchors.py`) have one B, which
costs a slot in each of them and saves misses in each.

Cost: O(layers * B). It deliberately does not know the engine: a split is a list of numbers.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from minihisparse.replay import replay
from minihisparse.sizing import MissCurves, miss_curves
from minihisparse.trace import Trace


class LayerGroups(NamedTuple):
    """groups: layers in lockstep, an anchor first. declared: by the trace; else they were found."""

    groups: list[list[int]]
    declared: bool


def find_layer_groups(trace: Trace) -> LayerGroups:
    """Which layers share a selection: what the trace declares (its "anchor_of").

    A trace of another engine may not say. Then layers next to each other count that have the same
    positions in every step; those that select for themselves do so in no trace worth sizing on.
    Raises ValueError if the trace declares what it does not have.
    """
    anchor_of = trace.anchor_of
    declared = anchor_of is not None
    groups: list[list[int]] = []
    for layer in range(trace.positions.shape[1]):
        if declared:
            shares = anchor_of[layer] != layer
        else:
            shares = layer > 0 and torch.equal(*trace.positions[:, layer - 1 : layer + 1].unbind(1))
        if shares:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return LayerGroups(groups, declared)


def share_slots(
    curves: MissCurves, total: int, groups: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """B for each layer, at least K and at most curves.largest, `total` in all (or less, if that is
    more than the curves have use for, or what is left is less than a group needs).

    groups: layers in lockstep, each layer in one of them; None: each on its own.
    Raises ValueError if the total is less than K for each layer.
    """
    misses, top_k = curves.layer_misses().numpy(), curves.top_k
    num_layers = len(misses)
    if groups is None:
        groups = [[layer] for layer in range(num_layers)]
    if sorted(layer for group in groups for layer in group) != list(range(num_layers)):
        raise ValueError(f"groups {groups}: expected each of {num_layers} layers in one of them")
    if total < num_layers * top_k:
        raise ValueError(
            f"--total-slots {total} is less than K = {top_k} for each of {num_layers} layers, "
            f"{num_layers * top_k}"
        )
    left = total - num_layers * top_k
    sizes = [top_k] * len(groups)
    hulls = [iter(_hull(misses[list(group), top_k:].sum(0))) for group in groups]
    stretches: list[tuple[float, int, int]] = []  # misses saved per slot (negative), group, slots

    def push(number: int) -> None:
        stretch = next(hulls[number], None)
        if stretch is not None:
            slots, saved = stretch
            gain = saved / (slots * len(groups[number]))
            heapq.heappush(stretches, (-gain, number, slots))

    for number in range(len(groups)):
        push(number)
    while stretches and left:
        _, number, slots = heapq.heappop(stretches)
        taken = min(slots, left // len(groups[number]))
        sizes[number] += taken
        left -= taken * len(groups[number])
        if taken == slots:
            push(number)
    by_layer = [0] * num_layers
    for group, size in zip(groups, sizes, strict=True):
        for layer in group:
            by_layer[layer] = size
    return by_layer


def _hull(misses: np.ndarray) -> list[tuple[int, int]]:
    """The lower convex hull of a curve that does not rise: slots and misses saved, per stretch."""
    # Only where it falls can a corner be.
    corners = [0, *(np.flatnonzero(np.diff(misses)) + 1)]
    hull: list[int] = []
    for i in corners:
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (misses[a] - misses[b]) * (i - a) > (misses[a] - misses[i]) * (b - a):
                break
            hull.pop()
        hull.append(i)
    return [
        (int(b - a), int(misses[a] - misses[b])) for a, b in zip(hull[:-1], hull[1:], strict=True)
    ]


@dataclass(frozen=True)
class PerLayer:
    """What a split gains: miss rates of the engine's own rule on the trace that it is measured on.

    sizes: B per layer. total: of them all. uniform, per_layer: with total // L slots in each layer,
    and with sizes. own: with the sizes that this very trace would have given: the most that can be
    had of it. uniform_size: total // L.
    """

    sizes: list[int]
    total: int
    uniform_size: int
    uniform: float
    per_layer: float
    own: float

    @property
    def saved(self) -> float:
        """Share of the misses, and so of the bytes over the bus, that the split saves."""
        return 1 - self.per_layer / self.uniform if self.uniform else 0.0


def compare_per_layer(
    sized_on: Trace,
    measured_on: Trace,
    total: int,
    *,
    warmup_steps: int = 0,
    groups: Sequence[Sequence[int]] | None = None,
) -> PerLayer:
    """Sizes layers on one trace and counts misses on another, at equal slots and so equal bytes.

    groups: layers in lockstep; None: those that are so in sized_on. warmup_steps: of both, left
    out. Raises ValueError if the traces differ in layers or K, or total is less than K per layer.
    """
    shapes = [tuple(t.positions.shape[i] for i in (1, 3)) for t in (sized_on, measured_on)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "traces of {} layers with K = {} and of {} with K = {} cannot be compared".format(
                *shapes[0], *shapes[1]
            )
        )
    groups = find_layer_groups(sized_on).groups if groups is None else groups
    sizes = share_slots(miss_curves(sized_on, warmup_steps=warmup_steps), total, groups)
    own = share_slots(miss_curves(measured_on, warmup_steps=warmup_steps), total, groups)
    uniform_size = total // len(sizes)

    def rate(size: int | list[int]) -> float:
        return replay(measured_on, "engine", size).miss_rate(warmup_steps)

    return PerLayer(sizes, sum(sizes), uniform_size, rate(uniform_size), rate(sizes), rate(own))
