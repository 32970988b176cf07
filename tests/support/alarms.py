"""Alarms at any moment of a block, and none after it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Arm = Callable[[float], None]


@contextmanager
def alarms(handle: Callable[[FrameType | None], object]) -> Iterator[Arm]:
    """Have a function called by SIGALRM while the block goes on.

    The block, and the function too, orders the next alarm by calling what this gives
    with a number of seconds. A signal that still comes while the block ends does
    nothing, and orders nothing.
    """
    goes_on = True

    def arm(seconds: float) -> None:
        if goes_on:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    def alarm(number: int, frame: FrameType | None) -> None:
        if goes_on:
            handle(frame)

    previous = signal.signal(signal.SIGALRM, alarm)
    try:
        yield arm
    finally:
        goes_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
