"""What a child process finds of a lease that its parent holds."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from typing import Any

import django
from django.db import connections

PR_SET_PDEATHSIG = 1

#: The parent's leases; empty where a child begins anew.
HELD: list[Any] = []


def begin() -> None:
    """Set Django up for the test's databases."""
    django.setup()
    for alias, name in json.loads(os.environ["DBLOCKS_TEST_NAMES"]).items():
        # A test may have others for a while.
        if alias in connections.settings:
            connections.settings[alias]["NAME"] = name


def begin_with_a_parent() -> None:
    """Begin, and end when the process that made this one does, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    begin()


def look(key: str, length: float) -> dict[str, Any]:
    """Try what can be done with what was inherited, and with the parent's key."""
    from dblocks import LeaseLost, distributed_lock

    found: dict[str, Any] = {"process": os.getpid(), "inherited": len(HELD)}
    for lease in HELD:
        found |= {"held": lease.held, "reason": lease.lost_reason}
        try:
            lease.check()
        except LeaseLost as error:
            found["check"] = error.reason
        found["released"] = lease.release()
    found["obtained"] = distributed_lock(key).try_acquire() is not None
    own = distributed_lock(f"{key}:{os.getpid()}", lease=length)
    with own.acquire(timeout=5) as lease:
        found["own"] = lease.held
    return found
