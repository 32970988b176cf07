"""What is different on SQLite."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.checks import CheckMessage
from django.db import OperationalError
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ...messages import warning
from .base import Dialect


class SQLite(Dialect):
    """One file, one writer, no server."""

    name = "sqlite"
    has_row_locks = False
    has_session_locks = False
    short_waits = {"timeout": 0}
    # Its own wait looks ever more seldom, ten times a second in the end, and never
    # finds the gap between two writers at work.
    pauses = 0.001, 0.005
    # It has no queue in which the other writers would get ahead of pruning.
    prune_rests = 5
    _format = "'%%Y-%%m-%%d %%H:%%M:%%f000'"
    now = f"STRFTIME({_format}, 'NOW')"
    # Rounded: days in a double are some 40 µs off, and 20 s would be 20.00001.
    seconds_until = "ROUND((JULIANDAY({}) - JULIANDAY('NOW')) * 86400.0, 3)".format
    greatest = "MAX"
    share = ""
    strength = ""
    rows = "VALUES {}".format
    stale_snapshot = "SQLITE_BUSY_SNAPSHOT"

    def after(self, moment: str, seconds: str) -> str:
        moment = "'NOW'" if moment == self.now else moment
        return (
            f"STRFTIME({self._format}, {moment}, PRINTF('%%+.6f seconds', {seconds}))"
        )

    def is_transient(self, error: BaseException) -> bool:
        return isinstance(error, OperationalError) and "locked" in str(error)

    def code(self, error: BaseException) -> object:
        return getattr(error.__cause__, "sqlite_errorname", "")

    def findings(self, connection: Connection) -> Iterator[CheckMessage]:
        version: tuple[int, ...] = connection.Database.sqlite_version_info  # type: ignore[attr-defined]
        if version < (3, 35):
            yield warning(
                "W007",
                f"SQLite {'.'.join(map(str, version))} is too old for locks.",
                "dblocks needs SQLite 3.35 or newer (UPDATE … RETURNING).",
            )
