"""Contiguous ranges of one pool, given to requests and taken back: where a request's units begin.

FullCache gives out device slots so, and a selector its pages: a request takes what its length
needs, and finding unit i of a request is one addition, `first[row] + i`.

First fit, and neighbouring free ranges become one. A pool may have enough units free and no range
of them that is long enough; then the request waits until others leave.

Cost: 8 bytes per request row on the device. It does not know what a unit is.
"""

from __future__ import annotations

import torch


class ExtentPool:
    """`num_units` units in all; each request row owns one range of them, or none.

    first: [max_requests] int64 on the device, the row's first unit; 0 where it owns none.
    """

    def __init__(self, num_units: int, max_requests: int, device: torch.device) -> None:
        self.num_units = num_units
        self.first = torch.zeros(max_requests, dtype=torch.int64, device=device)
        self._owned: dict[int, tuple[int, int]] = {}  # request row -> (start, end)
        self._free = [(0, num_units)] if num_units else []  # ascending, no two of them touch

    @property
    def num_free(self) -> int:
        return sum(end - start for start, end in self._free)

    @property
    def owners(self) -> set[int]:
        return set(self._owned)

    def extent_of(self, request: int) -> tuple[int, int]:
        """(start, end) of a request row's range; (0, 0) if it owns none."""
        return self._owned.get(request, (0, 0))

    def allocate(self, request: int, num_units: int) -> bool:
        """Gives a request row a range. False, and nothing has changed, if no free one fits.

        Raises ValueError if it owns one already.
        """
        if request in self._owned:
            raise ValueError(f"request row {request} owns a range already; release it first")
        for i, (start, end) in enumerate(self._free):
            if end - start >= num_units:
                rest = start + num_units
                self._free[i : i + 1] = [(rest, end)] if rest < end else []
                self._owned[request] = (start, rest)
                self.first[request] = start
                return True
        return False

    def release(self, request: int) -> None:
        """Takes a request row's range back. Raises ValueError if it owns none."""
        if request not in self._owned:
            raise ValueError(f"request row {request} owns no range")
        extent = self._owned.pop(request)
        self.first[request] = 0
        ranges = sorted([*self._free, extent])
        self._free = [r for r in ranges[:1] if r[0] < r[1]]
        for start, end in ranges[1:]:
            if self._free and self._free[-1][1] == start:
                self._free[-1] = (self._free[-1][0], end)
            elif start < end:
                self._free.append((start, end))

    def check_integrity(self) -> None:
        """Raises AssertionError if a unit is lost, or has two owners, or if `first` disagrees."""
        ranges = sorted([*self._free, *self._owned.values()])
        end = 0
        for start, stop in ranges:
            if start != stop and start != end:
                raise AssertionError(
                    f"units {min(start, end)}..{max(start, end)} are lost or owned twice"
                )
            end = max(end, stop)
        if end != self.num_units:
            raise AssertionError(f"units {end}..{self.num_units} are lost")
        expected = [self.extent_of(row)[0] for row in range(len(self.first))]
        if self.first.tolist() != expected:
            raise AssertionError(
                f"first is {self.first.tolist()}, the owned ranges begin at {expected}"
            )
