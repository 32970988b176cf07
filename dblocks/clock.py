"""The local clock that leases are counted by.

Durations are measured by a monotonic clock that also counts the time during
which the machine was suspended, where the system has one: a laptop that slept
for an hour must not believe that its lease of 30 seconds still runs.

Tests that freeze Python's clocks, as with freezegun, don't freeze this one: waits are
measured by it too, and would never end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

_read: Callable[[], float]
if hasattr(time, "CLOCK_BOOTTIME"):
    _read = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
elif sys.platform == "darwin":
    _read = partial(time.clock_gettime, time.CLOCK_MONOTONIC)
else:
    # Not the function itself, which freezegun would replace here too.
    _read = partial(time.monotonic)

monotonic: Callable[[], float] = _read
"""Returns seconds on the local clock; only differences have a meaning."""

_ahead = 0.0


def advance(seconds: float) -> None:
    """Move the clock of this process forward; for tests only."""
    global monotonic, _ahead
    _ahead += seconds
    monotonic = _moved


def _moved() -> float:
    return _read() + _ahead
