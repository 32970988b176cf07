"""One caller's wait for rows of keys, on every database."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

from django.apps import apps
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ... import clock
from ...exceptions import LockTimeout
from ...signals import log_timeout
from ...validation import RowWait
from ..values import FOREVER, Grant, Reading
from . import several_rows

LONGEST_PAUSE = 0.1
"""Seconds between looks at a key that has been leased for a long time."""


class WaitOver(Exception):
    """The wait for the row's lock ran out."""


class Wait:
    """One caller's wait for the rows of some keys.

    Attributes:
        keys: In the order in which all callers lock them.
        key: The one that is taken, as far as known.
        may_pin: The transaction may have kept a row locked that it didn't get.
    """

    def __init__(self, keys: Sequence[str], how: RowWait) -> None:
        self.keys = keys
        self.key = keys[0]
        self.how = how
        self.may_pin = False
        self.started = clock.monotonic()
        self.give_up = self.started + (FOREVER if how.timeout is None else how.timeout)

    def of(self, key: str) -> Wait:
        """Return the same wait for one of the keys."""
        one = copy(self)
        one.keys, one.key = [key], key
        return one

    @property
    def left(self) -> float:
        return max(0.0, self.give_up - clock.monotonic())

    def taken(self, seen: Mapping[str, Reading]) -> Reading:
        """Return the reading of the key that stays taken for longest, and note it."""
        free = Reading()
        self.key = max(self.keys, key=lambda key: seen.get(key, free).remaining)
        return seen.get(self.key, free)

    def pause(self, longest: float) -> None:
        """Sleep between two looks at a lease: longer, the longer it has lasted."""
        mean = min(max(0.005, (clock.monotonic() - self.started) / 10), LONGEST_PAUSE)
        pause = random.uniform(0.5, 1.5) * mean
        time.sleep(min(pause, self.left, max(longest, 0.001)))

    def refuse(self, seen: Reading | None) -> None:
        """Raise ``LockTimeout``, unless a taken key is to be skipped."""
        error = self.timed_out(seen)
        if not self.how.skip:
            raise error

    def timed_out(self, seen: Reading | None) -> LockTimeout:
        leased = seen if seen is not None and seen.remaining > 0 else Reading()
        error = leased.as_timeout(self.key, self.how.backend, self.how.timeout)
        log_timeout(error, clock.monotonic() - self.started)
        return error


def rows_of(connection: Connection) -> Any:
    return apps.get_model("dblocks", "DistributedLock").objects.using(connection.alias)


def end_overdue(connection: Connection, rows: Mapping[str, Any]) -> None:
    """End the grants of overdue holders, whose guards would still let them commit."""
    grants = [Grant(r.key, r.owner, r.version) for r in rows.values() if r.owner]
    several_rows.undo(connection, grants)
