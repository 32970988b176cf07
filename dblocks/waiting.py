"""How a waiter learns that a key may be free: it asks, less and less often.

The waits are jittered, so that many waiters don't ask in step, and bounded, because
one that doubles its wait each time starves the one that has waited longest.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

FIRST_POLL = 0.005
LONGEST_POLL = 0.1


def polls() -> Iterator[float]:
    """Yield the seconds to wait before each look at the key."""
    longest = FIRST_POLL
    while True:
        yield random.uniform(0.5, 1.5) * longest
        longest = min(longest * 1.3, LONGEST_POLL)
