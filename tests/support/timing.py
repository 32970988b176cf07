"""Bounded waiting: who waits for something says what for, and how long at most.

``DBLOCKS_TEST_SLOWNESS=3`` gives a slow or busy machine three times as long: deadlines,
slack, and the short leases that a busy machine would miss a renewal of.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")

SLOWNESS = float(os.environ.get("DBLOCKS_TEST_SLOWNESS", "1"))


def scaled(seconds: float) -> float:
    """A short time, longer on a slow machine: a lease, or a bound that goes with it."""
    return seconds * SLOWNESS


#: No step of a test lasts longer than this, however slow the machine.
DEADLINE = scaled(15.0)
#: What a loaded machine may add to a moment that the contract names.
SLACK = scaled(1.0)
STEP = 0.01
EXCUSED = 3
"""How many times a bound the time without a processor may add to it.

Many threads that poll wait for each other: their waits together exceed any bound.
"""


def starved(process: int | str = "self") -> float:
    """Seconds for which threads of a process were ready to run and had no processor.

    Linux counts them for each thread that lives; of threads together it is the most by
    which a busy machine can have made a process late.
    """
    nanoseconds = 0
    for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError):
            nanoseconds += int(path.read_text().split()[1])
    return nanoseconds / 1e9


def excused(before: float, bound: float) -> float:
    """Return by how much a bound may be exceeded: the time without a processor.

    Args:
        before: What :func:`starved` has returned when the time began.
    """
    return min(max(0.0, starved() - before), EXCUSED * bound)


def eventually(
    predicate: Callable[[], T], *, within: float = DEADLINE, what: str = "the condition"
) -> T:
    """Return the predicate's first true result; fail when there is none in time.

    The time without a processor doesn't count, within limits.
    """
    until, before = time.monotonic() + within, starved()
    while True:
        if result := predicate():
            return result
        now = time.monotonic()
        if now > until and now > until + excused(before, within):
            pytest.fail(f"{what} did not come true within {within:g} s")
        time.sleep(STEP)


def always(
    predicate: Callable[[], object], *, during: float, what: str = "the condition"
) -> None:
    """Ask again and again for that many seconds; fail at the first false answer."""
    started = time.monotonic()
    while (elapsed := time.monotonic() - started) < during:
        if not predicate():
            pytest.fail(f"{what} was no longer true after {elapsed:.2f} s")
        time.sleep(STEP)


def quickest(action: Callable[[], object]) -> float:
    """Return the seconds that the quickest of three calls takes.

    A server that waits for a processor delays one of them, hardly all.
    """
    took = []
    for _ in range(3):
        began = time.monotonic()
        action()
        took.append(time.monotonic() - began)
    return min(took)


@contextmanager
def takes(at_least: float = 0.0, at_most: float = DEADLINE) -> Iterator[None]:
    """The block's duration in seconds lies between these two.

    Of what is longer, the time without a processor doesn't count, within limits.
    """
    started, before = time.monotonic(), starved()
    yield
    elapsed = time.monotonic() - started
    without = excused(before, at_most)
    assert at_least <= elapsed <= at_most + without, (
        f"took {elapsed:.3f} s, at most {without:.3f} s of it without a processor"
    )
