"""What happened to one key, and whether two had it at once."""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple


class Grant(NamedTuple):
    """One stay, by ``time.monotonic()``: one clock for all processes of a machine."""

    who: int
    wanted: float
    granted: float
    leaving: float
    left: float


def overlaps(grants: Iterable[Grant], permits: int = 1) -> int:
    """Return how many began while all that may have the key certainly had it.

    A stay lasts from when the lock was had to when its release was begun, so that an
    overlap can't be an effect of the measurement.
    """
    count = 0
    inside: list[float] = []
    for grant in sorted(grants, key=lambda grant: grant.granted):
        while inside and inside[0] <= grant.granted:
            heappop(inside)
        count += len(inside) >= permits
        heappush(inside, grant.leaving)
    return count


def hand_offs(grants: Iterable[Grant]) -> list[float]:
    """Return the seconds from each release to the grant of one that was waiting."""
    ordered = sorted(grants, key=lambda grant: grant.granted)
    return [
        after.granted - before.leaving
        for before, after in pairwise(ordered)
        if after.who != before.who and after.wanted < before.leaving
    ]


def fairness(served: Iterable[int]) -> float:
    """Return least-served by most-served."""
    counts = list(served)
    return min(counts) / max(counts) if max(counts) else 0.0
