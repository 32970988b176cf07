"""Keeps forks apart from what this process does in SQLite.

A forked child keeps for ever what other threads had of SQLite's locks at that moment:
one of its mutexes, or the record that this process has the file's write lock.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper as Connection
from django.db.backends.signals import connection_created

from ... import clock, forks
from . import dialects

PATIENCE = 1.0
"""Seconds for which a fork waits until dblocks' other threads have left SQLite.

They wait twice as long for a fork that has begun: it may be waiting for one of them,
with a mutex of the project's that both need.
"""

PAUSE = 0.001
"""Seconds between looks at whether a fork is over, or may begin."""

#: The threads that are about to fork this process.
_forking: set[int] = set()

#: Connections to SQLite, dblocks' own and Django's of all threads.
_files: weakref.WeakValueDictionary[int, Connection] = weakref.WeakValueDictionary()


class Busy(list[Connection]):
    """The connections on which operations of a thread are under way.

    In a forked child those operations' frames outlive their thread, and keep this.
    """

    everyones: weakref.WeakValueDictionary[int, Busy] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        super().__init__()
        self.everyones[id(self)] = self

    def add(self, connection: Connection) -> None:
        """Note an operation under way; in SQLite, once no other thread forks."""
        self.append(connection)
        if not _forking or dialects.known(connection).has_row_locks:
            return
        give_up = clock.monotonic() + 2 * PATIENCE
        while _forking - {threading.get_ident()} and clock.monotonic() < give_up:
            self.remove(connection)
            time.sleep(PAUSE)
            self.append(connection)

    def is_in_file(self) -> bool:
        """Tell whether its thread may be in SQLite."""
        return any(not dialects.known(each).has_row_locks for each in self)


@contextmanager
def noted(connection: Connection) -> Iterator[None]:
    """Have forks wait while a connection is being closed.

    This doesn't wait for a fork itself: the garbage collector may be closing it.
    """
    busy = Busy()
    busy.append(connection)
    try:
        yield
    finally:
        busy.clear()


def in_files(besides: Busy | None = None) -> bool:
    """Tell whether dblocks may be in SQLite in any thread, or in any but one."""
    everyones = [ref() for ref in Busy.everyones.valuerefs()]
    return any(b.is_in_file() for b in everyones if b is not None and b is not besides)


def others_use_files(mine: Iterable[Connection]) -> bool:
    """Tell whether there are connections to SQLite besides these.

    A connection that isn't open counts: another thread may have been opening it.
    """
    return not {*_files} <= {*map(id, mine)}


def forget(connection: Connection) -> None:
    """Note that no thread uses a connection any more, closed as it is.

    It may live on until the garbage collector comes.
    """
    _files.pop(id(connection), None)


def _forget_ended() -> None:
    """Forget what is closed and was of threads that have ended: nobody opens it."""
    running = sys._current_frames()
    # As a list made in one step: other threads open and close connections meanwhile.
    each: Any
    for each in [ref() for ref in _files.valuerefs()]:
        if each is None or each.connection is not None:
            continue
        if each._thread_ident not in running:
            forget(each)


def begin_anew() -> None:
    """Forget the parent's threads, in a forked child."""
    Busy.everyones.clear()
    _forking.clear()


def keep_out(mine: threading.local) -> None:
    """Have forks wait for what other threads do; ``mine.busy`` is a thread's own."""

    def before() -> None:
        _forking.add(threading.get_ident())
        _forget_ended()
        give_up = clock.monotonic() + PATIENCE
        while in_files(besides=mine.busy) and clock.monotonic() < give_up:
            time.sleep(PAUSE)

    def in_parent() -> None:
        _forking.discard(threading.get_ident())

    forks.around(before, in_parent)


def _note(connection: Connection, **kwargs: Any) -> None:
    if not dialects.known(connection).has_row_locks:
        _files[id(connection)] = connection


connection_created.connect(_note)
