"""Counting what a process sends to its servers, on all of its connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from redis.connection import AbstractConnection


class Sent(NamedTuple):
    """One statement, or command of Redis: when, and by which thread."""

    at: float
    thread: int


_COUNTED = [
    (CursorWrapper, "execute"),
    (CursorWrapper, "executemany"),
    (BaseDatabaseWrapper, "_commit"),
    (BaseDatabaseWrapper, "_rollback"),
    (AbstractConnection, "send_packed_command"),
]


@contextmanager
def statements() -> Iterator[list[Sent]]:
    """Collect the statements, commits, rollbacks and commands sent in the block.

    What a driver sends by itself isn't seen, such as the ``BEGIN`` of a transaction.
    """
    sent: list[Sent] = []

    def counted(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            sent.append(Sent(time.monotonic(), threading.get_ident()))
            return original(self, *args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in _COUNTED:
            original = getattr(owner, name)
            stack.enter_context(patch.object(owner, name, counted(original)))
        yield sent
