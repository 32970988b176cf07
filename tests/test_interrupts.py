"""Exceptions that a signal's handler raises anywhere, in the bookkeeping too."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from django.db import connections

from dblocks import Lock, locks
from dblocks.holding.registry import Registry, registry
from dblocks.holding.renewal import RenewalScheduler
from tests.support.timing import DEADLINE

Locks = Callable[..., Lock]


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Leave no lease to later tests that only the collector finds, with its frames."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_exception_after_the_grant(
    lock: Locks, key: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was granted to a call that failed is not renewed, whenever garbage goes."""

    def fail(*args: object) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(locks, "_tell_acquired", fail)
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            with pytest.raises(RuntimeError, match="interrupted"):
                lock().acquire(timeout=0)
        assert all(hold.grant.key != key for hold in registry.all())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "function",
    [RenewalScheduler.watch, Registry.add],
    ids=["watched", "registered"],
)
@pytest.mark.parametrize("event", ["call", "return"])
def test_interrupt_in_the_bookkeeping(
    lock: Locks, key: str, function: Any, event: str
) -> None:
    """An interrupt there leaves it at work for those to come."""

    def interrupt(frame: FrameType, what: str, argument: object) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if what == event:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            lock().acquire(timeout=0)
    finally:
        sys.settrace(before)

    def somebody_else() -> None:
        with lock(f"{key}:other").acquire(timeout=0):
            pass
        connections.close_all()

    # Not a fixture's thread, which would be waited for.
    thread = threading.Thread(target=somebody_else, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()
