"""How much of each fault: little in the tests, much in ``python -m tests.faults``."""

from __future__ import annotations

import os
import random
from typing import TypeVar

from tests.support.timing import scaled

N = TypeVar("N", int, float)

FULL = os.environ.get("DBLOCKS_FAULTS") == "full"

#: Printed by every failure; ``python -m tests.faults --seed N`` runs it again.
SEED = int(
    os.environ.get("DBLOCKS_FAULTS_SEED") or random.SystemRandom().randrange(10**6)
)

#: Factor for the full counts: ``--duration`` scales them.
SHARE = float(os.environ.get("DBLOCKS_FAULTS_SHARE") or 1.0)

#: Seconds that a machine which has other work adds to a moment.
LATE = 0.75 if FULL else scaled(0.75)
#: Seconds between two looks of a waiter at a key that has been taken for long.
POLL = 0.1


def pick(quick: N, full: N) -> N:
    """Return what this run has in place of the other; ``--duration`` keeps it."""
    return full if FULL else quick


def counts(quick: N, full: N) -> N:
    """Return the count for this run."""
    if not FULL:
        return quick
    kind = type(full)
    return max(quick, kind(full * SHARE))
