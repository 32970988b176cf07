"""What the command ``locks`` asks: a lock table, or an engine that has none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import DatabaseError, InterfaceError, NotSupportedError, connections
from django.db.models import Q

from ..backends.base import BaseBackend
from ..backends.database import session_locks
from ..conf import DEFAULT_ALIAS
from ..models import DistributedLock, LockQuerySet
from ..permits import span
from .rendering import FREE, AnyLock
from .selection import Selection
from .statuses import (
    bad_usage,
    database_failure,
    failure,
    find_backend,
    misconfigured,
)

PATIENCE = 10.0
"""Seconds for which a server that is away is waited for before a lock is forced."""


class Table:
    """The lock table of a database."""

    #: What its methods raise when it can't be reached, or can't do what is asked.
    errors: tuple[type[Exception], ...] = (DatabaseError, InterfaceError)

    def __init__(self, using: str) -> None:
        self._locks: LockQuerySet = DistributedLock.objects.using(using)

    def failure(self, error: Exception) -> CommandError:
        """Turn one of its errors into a line and an exit status."""
        return database_failure(error, self._locks.db)

    def find(self, selection: Selection) -> list[AnyLock]:
        """Return the locks that are selected, in no order."""
        rows: Any = self._locks.with_state()
        if (key := selection.key) is not None:
            first, end = span(key)
            rows = rows.filter(Q(key=key) | Q(key__gte=first, key__lt=end))
        if selection.state is not None:
            rows = rows.filter(state=selection.state)
        if selection.prefix:
            rows = rows.filter(key__startswith=selection.prefix)
        if selection.holder is not None:
            rows = rows.exclude(owner="")
        return [row for row in rows if row in selection]

    def waiting(self, locks: Collection[AnyLock]) -> Mapping[str, int]:
        """Return by key how many wait for these locks, where anybody is known to."""
        keys = {lock.lock_key for lock in locks}
        return session_locks.waiters(connections[self._locks.db], keys)

    def force_release(self, lock: AnyLock, **how: Any) -> bool:
        """Release the grant that was found; tell whether it was still current.

        It isn't if its holder has released it since, even if the key still cools.
        """
        # If the holder releases the key, the version stays, and the row may cool.
        same: LockQuerySet = self._locks.filter(owner=lock.owner)
        return same.force_release(
            lock.lock_key, permit=lock.permit, version=lock.version, **how
        )

    def request_release(self, lock: AnyLock, **how: Any) -> bool:
        """Ask the holder of the grant that was found; tell whether it is held."""
        return self._locks.request_release(
            lock.lock_key, permit=lock.permit, version=lock.version, **how
        )

    def count_stale(self, age: float) -> int:
        """Count the locks that :meth:`prune` would delete."""
        return self._locks.stale(age).count()

    def prune(self, age: float, progress: Callable[[int], object]) -> int:
        """Delete the rows that have been free or expired for ``age`` seconds."""
        return self._locks.prune(age, progress=progress)


class Engine:
    """A backend that keeps its locks elsewhere; with the methods of :class:`Table`."""

    errors: tuple[type[Exception], ...]

    def __init__(self, backend: BaseBackend) -> None:
        self._backend = backend
        self.errors = (*backend.errors, NotSupportedError)

    def failure(self, error: Exception) -> CommandError:
        if isinstance(error, NotSupportedError):
            return bad_usage(error)
        return failure(error, self._backend)

    def find(self, selection: Selection) -> list[AnyLock]:
        entries = self._backend.entries(selection.key)
        return [entry for entry in entries if entry in selection]

    def waiting(self, locks: Collection[AnyLock]) -> Mapping[str, int]:
        # Each answer may take a round trip, and nobody waits for long for a free key.
        keys = {lock.lock_key for lock in locks if lock.state != FREE}
        numbers = {key: self._backend.waiters(key).number for key in keys}
        return {key: number for key, number in numbers.items() if number}

    def force_release(self, lock: AnyLock, **how: Any) -> bool:
        if not self._has_owner(lock):
            return False
        return self._backend.force_release(
            lock.lock_key, permit=lock.permit, version=lock.version, **how
        )

    def request_release(self, lock: AnyLock, **how: Any) -> bool:
        if lock.version is None and not self._has_owner(lock):
            return False
        return self._backend.request_release(
            lock.lock_key, permit=lock.permit, version=lock.version, **how
        )

    def _has_owner(self, lock: AnyLock) -> bool:
        """Look again, just before: the holder may have released, and the token stays.

        A key that begins to cool after this look is released all the same; on an engine
        without fencing tokens, so is another grant.
        """
        # Not entries(), which looks through all keys of a server for those of one.
        seen = self._backend.read_all([lock.key], PATIENCE).get(lock.key)
        return seen is not None and seen.owner == lock.owner

    def _refuse_to_prune(self, *args: object) -> NoReturn:
        raise bad_usage(
            f"the backend {self._backend.alias!r} needs no pruning: it has no lock "
            f"table; --database ALIAS names one"
        )

    count_stale = prune = _refuse_to_prune


Source = Table | Engine
"""Where the locks are that the command shows, releases and prunes."""


def source_of(database: str | None, backend: str | None) -> Source:
    """Return the table of a database, or what a backend keeps its locks in."""
    if database is not None:
        try:
            return Table(database)
        except ImproperlyConfigured as error:
            # The model's manager looks at the default backend first.
            raise misconfigured(error) from error
    engine = find_backend(backend or DEFAULT_ALIAS)
    return Table(engine.using) if engine.has_table else Engine(engine)
