"""Exceptions that a signal's handler raises anywhere, in the bookkeeping too."""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest
from django.db import connections

from dblocks import Lease, Lock
from dblocks.acquisition import Acquisition
from dblocks.conf import backends
from dblocks.renewal import timekeeper
from tests.timing import DEADLINE

Locks = Callable[..., Lock]


def test_exception_after_the_grant(
    lock: Locks, key: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was granted to a call that failed is not renewed, whenever garbage goes."""

    def fail(*args: object) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(Acquisition, "_tell_acquired", fail)
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            with suppress(RuntimeError):
                lock().acquire(timeout=0)
        assert timekeeper.holder(backends[backend], key) is None
    finally:
        gc.enable()


def test_interrupt_as_the_timekeepers_mutex_is_taken(lock: Locks, key: str) -> None:
    """An interrupt just after the mutex was taken leaves it free for those to come."""

    def interrupt(frame: FrameType, event: str, argument: object) -> Any:
        if event == "call":
            mine = frame.f_locals.get("self") is timekeeper._condition
            return interrupt if mine else None
        if event == "return" and frame.f_code.co_name == "__enter__":
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    leases: list[Lease] = []
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with suppress(KeyboardInterrupt):
            leases.append(lock().acquire(timeout=0))
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
    for lease in leases:
        lease.release()
