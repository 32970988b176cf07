"""What the admin and the commands ask about a lock table as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.db import connections

from dblocks.backends.database import session_locks
from dblocks.conf import backends
from dblocks.models import DistributedLock


def database(alias: str) -> str | None:
    """Return the database with a backend's lock table; ``None`` if it has no table."""
    backend = backends[alias]
    return backend.using if backend.has_table else None


def is_missing(using: str) -> bool:
    """Tell whether a database answers and has no lock table."""
    table = DistributedLock._meta.db_table
    return table not in connections[using].introspection.table_names()


def waiters(using: str, keys: Iterable[str]) -> Mapping[str, int]:
    """Return how many wait for each key, where the server tells."""
    return session_locks.waiters(connections[using], keys)
