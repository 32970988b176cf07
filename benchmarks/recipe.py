"""The published recipe of a lock table with a version, as one would write it in Django.

It reads the row, decides in the program and writes with a check of the version, each
statement on a connection of its own, and tries again every 100 ms.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from django.db import IntegrityError, connection

from benchmarks.models import RecipeLock

RETRY_EVERY = 0.1

T = TypeVar("T")


def _on_new_connection(statement: Callable[[], T]) -> T:
    try:
        return statement()
    finally:
        connection.close()


def _find(key: str) -> RecipeLock | None:
    rows = RecipeLock.objects.filter(lock_key=key)
    row: RecipeLock | None = _on_new_connection(rows.first)
    return row


def _change(row: RecipeLock, *, request_id: str, count: int, timeout: int) -> bool:
    unchanged = RecipeLock.objects.filter(pk=row.pk, version=row.version)
    return bool(
        _on_new_connection(
            lambda: unchanged.update(
                request_id=request_id,
                lock_count=count,
                timeout=timeout,
                version=row.version + 1,
            )
        )
    )


def _create(key: str) -> None:
    try:
        _on_new_connection(lambda: RecipeLock.objects.create(lock_key=key))
    except IntegrityError:
        return  # somebody else was first; the next look finds it


def _milliseconds() -> int:
    return int(time.time() * 1000)


def _attempt(key: str, request_id: str, lock_timeout: float) -> bool:
    """Look once and do what the row asks for; return whether the lock was taken."""
    row = _find(key)
    if row is None:
        _create(key)
        row = _find(key)
        if row is None:
            return False
    overdue = row.request_id and row.timeout < _milliseconds()
    if overdue and _change(row, request_id="", count=0, timeout=0):
        row = _find(key)
        if row is None:
            return False
    if row.request_id not in {"", request_id}:
        return False
    until = _milliseconds() + int(lock_timeout * 1000)
    return _change(row, request_id=request_id, count=row.lock_count + 1, timeout=until)


def lock(key: str, request_id: str, *, lock_timeout: float, get_timeout: float) -> bool:
    """Take the lock for ``lock_timeout`` seconds; wait ``get_timeout`` at most."""
    give_up = time.monotonic() + get_timeout
    while not _attempt(key, request_id, lock_timeout):
        if time.monotonic() > give_up:
            return False
        time.sleep(RETRY_EVERY)
    return True


def unlock(key: str, request_id: str) -> None:
    """Count down; at the last one the row is reset."""
    row = _find(key)
    if row is None or row.request_id != request_id:
        return
    if row.lock_count > 1:
        _change(
            row, request_id=request_id, count=row.lock_count - 1, timeout=row.timeout
        )
    else:
        _change(row, request_id="", count=0, timeout=0)


class RecipeTimeout(Exception):
    """The lock stayed taken."""


class Recipe:
    """The recipe as a context manager."""

    def __init__(self, key: str, *, lock_timeout: float, get_timeout: float) -> None:
        self.key = key
        self.lock_timeout = lock_timeout
        self.get_timeout = get_timeout
        self.request_id = uuid.uuid4().hex

    def __enter__(self) -> None:
        if not lock(
            self.key,
            self.request_id,
            lock_timeout=self.lock_timeout,
            get_timeout=self.get_timeout,
        ):
            raise RecipeTimeout(self.key)

    def __exit__(self, *exc_info: object) -> None:
        unlock(self.key, self.request_id)
