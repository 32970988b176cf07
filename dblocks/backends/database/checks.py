"""What a system check must say of the database that the locks are in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pkgutil import iter_modules

from django.apps import apps
from django.core.checks import CheckMessage
from django.db import DatabaseError, Error, NotSupportedError, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper as Connection
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from ..base import BaseBackend
from ..messages import error, warning
from . import dialects


def flaw_of_tables(connection: Connection) -> str | None:
    """Return what the tables lack that the migrations make, or ``None``.

    Doesn't look at the tables themselves, which somebody may have locked.
    """
    if dialects.TABLE not in connection.introspection.table_names():
        return "the lock table is missing"
    module, _ = MigrationLoader.migrations_module("dblocks")
    recorder = MigrationRecorder(connection)
    # Not everybody may read the history, and a table may have been made without one.
    with suppress(DatabaseError):
        known = recorder.applied_migrations() if recorder.has_table() else {}
        applied = {name for app, name in known if app == "dblocks"}
        if applied and module and not _names(module) <= applied:
            return "the tables of dblocks are out of date"
    return None


def _names(module: str) -> set[str]:
    """Return the names of the migrations in a package."""
    found = iter_modules(import_module(module).__path__)
    return {each.name for each in found if not each.ispkg and each.name[0] not in "_~"}


class DatabaseChecks(BaseBackend):
    """The part of the engine that answers checks; the dialects say what they find."""

    def check_configured(self) -> None:
        connections[self.using]

    def check_connection(
        self, databases: Sequence[str] | None
    ) -> Iterable[CheckMessage]:
        using, alias = self.using, self.alias
        if databases is not None and using not in databases:
            return
        if self.options.get("using") is None:
            model = apps.get_model("dblocks", "DistributedLock")
            read, write = router.db_for_read(model), router.db_for_write(model)
            if read != write:
                yield warning(
                    "W005",
                    f"DBLOCKS[{alias!r}]: the router reads locks from {read!r} and "
                    f"writes them to {write!r}.",
                    "A replica lags behind: name the primary in OPTIONS={'using': …}.",
                )
        connection = connections[using]
        options = connection.settings_dict.get("OPTIONS", {})
        if options.get("service") or "read_default_file" in options:
            return
        try:
            wanted = dialects.of(connection).network_timeouts
        except NotSupportedError:
            # E002 says so.
            return
        missing = [name for name in wanted if not options.get(name)]
        if missing:
            yield warning(
                "W004",
                f"The database {using!r} has no network timeout: {', '.join(missing)}.",
                "Without them a lock operation may hang on a dead connection: set them "
                "in DATABASES[…]['OPTIONS'].",
            )

    def _has_session_locks(self, connection: Connection) -> bool:
        """Tell whether waiters may queue for session locks, as far as is known."""
        raise NotImplementedError

    def check_server(self, databases: Sequence[str]) -> Iterable[CheckMessage]:
        if self.using not in databases:
            return
        connection = connections[self.using]
        try:
            connection.ensure_connection()
            dialect = dialects.of(connection)
            flaw = flaw_of_tables(connection)
            if flaw is not None:
                yield warning(
                    "W001",
                    f"In the database {connection.alias!r} {flaw}.",
                    f"Run manage.py migrate dblocks --database {connection.alias}.",
                )
                return
            yield from dialect.findings(connection)
            if self._has_session_locks(connection) and not (
                dialect.has_relied_on_sessions(connection)
            ):
                yield warning(
                    "W014",
                    f"Waiters for locks in {self.using!r} can't queue in the server: "
                    f"it is behind a pooler, or one of a cluster.",
                    "They look at the lock from time to time instead, in no order. Say "
                    "so in OPTIONS={'session_locks': False}; behind a pooler, connect "
                    "directly if the order matters.",
                )
        except NotSupportedError as fault:
            yield error(
                "E002",
                f"The database {self.using!r} is not supported: {fault}",
                "Name another one in OPTIONS={'using': …}, or choose another BACKEND.",
            )
        except Error as fault:
            yield warning(
                "W001",
                f"The lock table in {self.using!r} can't be read: {fault}",
                f"See that the database can be reached and its user may read the "
                f"table, and run manage.py migrate dblocks --database {self.using}.",
            )
