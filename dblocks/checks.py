"""System checks: what can be wrong with a deployment, before it goes wrong.

Each has a section in ``docs/checks.md``. Errors concern the settings alone. What
concerns a database is a warning and tagged ``database``, so that the first ``migrate``
isn't stopped by the table that it is about to make. Without ``--database`` nothing is
asked of a server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from django.apps.config import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.connection import ConnectionDoesNotExist

from .backends.base import BaseBackend
from .backends.database import DatabaseBackend
from .backends.locmem import LocMemBackend
from .conf import backends
from .fields import exact_collation

SHORT_LEASE = 1.0


def register() -> None:
    """Register the checks with Django."""
    checks.register(check_settings)
    checks.register(check_deployment)
    checks.register(check_connections, checks.Tags.database)
    checks.register(check_databases, checks.Tags.database)


def _hint(text: str, check: str) -> str:
    return f"{text} (docs/checks.md#dblocks{check.lower()})"


def _error(check: str, message: str, hint: str) -> checks.Error:
    return checks.Error(message, hint=_hint(hint, check), id=f"dblocks.{check}")


def _warning(check: str, message: str, hint: str) -> checks.Warning:
    return checks.Warning(message, hint=_hint(hint, check), id=f"dblocks.{check}")


def _backends() -> Iterator[BaseBackend]:
    """Yield the backends that can be made; the others are ``check_settings``'s."""
    try:
        aliases = list(backends.settings)
    except ImproperlyConfigured:
        return
    for alias in aliases:
        try:
            yield _make(alias)
        except (ImproperlyConfigured, ConnectionDoesNotExist):
            continue


def _make(alias: str) -> BaseBackend:
    backend = backends[alias]
    if isinstance(backend, DatabaseBackend):
        connections[backend.using]
    return backend


def check_settings(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """E001: every backend in ``DBLOCKS`` can be made as it is configured."""
    messages: list[checks.CheckMessage] = []
    hint = "Correct the setting DBLOCKS."
    try:
        aliases = list(backends.settings)
    except ImproperlyConfigured as error:
        return [_error("E001", str(error), hint)]
    for alias in aliases:
        try:
            _make(alias)
        except (ImproperlyConfigured, ConnectionDoesNotExist) as error:
            messages.append(_error("E001", str(error), hint))
    return messages


def check_deployment(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """W006, W008 and W009: what the settings and the process tell."""
    messages: list[checks.CheckMessage] = []
    for backend in _backends():
        messages += _check_backend(backend)
    uwsgi: Any = sys.modules.get("uwsgi")
    options = getattr(uwsgi, "opt", {})
    if uwsgi is not None and not {"enable-threads", b"enable-threads"} & set(options):
        messages.append(
            _warning(
                "W006",
                "uWSGI runs no threads here: leases are not renewed.",
                "Start uWSGI with --enable-threads.",
            )
        )
    return messages


def _check_backend(backend: BaseBackend) -> Iterator[checks.CheckMessage]:
    alias = backend.alias
    if backend.lease < SHORT_LEASE:
        yield _warning(
            "W008",
            f"DBLOCKS[{alias!r}]: a LEASE of {backend.lease:g} s is for tests only.",
            "A busy machine misses such a renewal: use 10 s or more.",
        )
    if isinstance(backend, LocMemBackend) and "test" not in sys.argv[1:2]:
        yield _warning(
            "W009",
            f"DBLOCKS[{alias!r}] keeps its locks in the memory of this process.",
            "Use LocMemBackend in tests only: other processes don't see its locks.",
        )


def check_connections(
    app_configs: Sequence[AppConfig] | None = None,
    databases: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[checks.CheckMessage]:
    """W004 and W005: what the settings tell of the lock's database."""
    messages: list[checks.CheckMessage] = []
    for backend in _backends():
        if isinstance(backend, DatabaseBackend) and (
            databases is None or backend.using in databases
        ):
            messages += _check_connection(backend)
    return messages


def _check_connection(backend: DatabaseBackend) -> Iterator[checks.CheckMessage]:
    alias = backend.alias
    if backend.options.get("using") is None:
        from .models import DistributedLock

        read = router.db_for_read(DistributedLock)
        write = router.db_for_write(DistributedLock)
        if read != write:
            yield _warning(
                "W005",
                f"DBLOCKS[{alias!r}]: the router reads locks from {read!r} and writes "
                f"them to {write!r}.",
                "A replica lags behind: name the primary in OPTIONS={'using': …}.",
            )
    missing = _missing_timeouts(connections[backend.using])
    if missing:
        yield _warning(
            "W004",
            f"The database {backend.using!r} has no network timeout: "
            f"{', '.join(missing)}.",
            "Without them a lock operation may hang on a dead connection: set them in "
            "DATABASES[…]['OPTIONS'].",
        )


def _missing_timeouts(connection: BaseDatabaseWrapper) -> list[str]:
    options = connection.settings_dict.get("OPTIONS", {})
    if connection.vendor == "mysql":
        wanted = ["connect_timeout", "read_timeout", "write_timeout"]
    elif connection.vendor == "postgresql":
        wanted = ["connect_timeout", "tcp_user_timeout"]
    else:
        wanted = []
    if options.get("service") or "read_default_file" in options:
        return []
    return [name for name in wanted if not options.get(name)]


def check_databases(
    app_configs: Sequence[AppConfig] | None = None,
    databases: Sequence[str] | None = None,
    **kwargs: Any,
) -> list[checks.CheckMessage]:
    """W001 to W003 and W007: what the lock's database tells."""
    messages: list[checks.CheckMessage] = []
    wanted = set(databases or ())
    for backend in _backends():
        if isinstance(backend, DatabaseBackend) and backend.using in wanted:
            wanted.discard(backend.using)
            try:
                messages += _check_database(connections[backend.using])
            except Error as error:
                messages.append(
                    _warning(
                        "W001",
                        f"The lock table in {backend.using!r} can't be read: {error}",
                        "See that the database can be reached, and run migrate.",
                    )
                )
    return messages


def _check_database(connection: BaseDatabaseWrapper) -> Iterator[checks.CheckMessage]:
    from .models import DistributedLock

    table = DistributedLock._meta.db_table
    if table not in connection.introspection.table_names():
        yield _warning(
            "W001",
            f"The lock table is missing in the database {connection.alias!r}.",
            "Run manage.py migrate.",
        )
        return
    if connection.vendor == "mysql":
        yield from _check_mysql(connection, table)
    elif connection.vendor == "sqlite":
        version: tuple[int, ...] = connection.Database.sqlite_version_info  # type: ignore[attr-defined]
        if version < (3, 35):
            yield _warning(
                "W007",
                f"SQLite {'.'.join(map(str, version))} is too old for locks.",
                "dblocks needs SQLite 3.35 or newer (UPDATE … RETURNING).",
            )
    elif connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT collation_name FROM information_schema.columns "
                "WHERE table_name = %s AND column_name = 'key' "
                "AND table_schema = ANY (current_schemas(false))",
                [table],
            )
            yield from _check_collation(connection, cursor.fetchone()[0])


def _check_mysql(
    connection: BaseDatabaseWrapper, table: str
) -> Iterator[checks.CheckMessage]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT t.engine, c.collation_name FROM information_schema.tables t "
            "JOIN information_schema.columns c USING (table_schema, table_name) "
            "WHERE t.table_schema = DATABASE() AND t.table_name = %s "
            "AND c.column_name = 'key'",
            [table],
        )
        engine, collation = cursor.fetchone()
    if engine != "InnoDB":
        yield _warning(
            "W002",
            f"The lock table in {connection.alias!r} is kept by {engine}, which has no "
            f"transactions.",
            f"Run ALTER TABLE {table} ENGINE=InnoDB.",
        )
    yield from _check_collation(connection, collation)
    version: tuple[int, ...] = connection.mysql_version  # type: ignore[attr-defined]
    mariadb: bool = connection.mysql_is_mariadb  # type: ignore[attr-defined]
    oldest = (10, 6) if mariadb else (8, 0, 11)
    if version < oldest:
        yield _warning(
            "W007",
            f"The server of {connection.alias!r} is too old for locks: "
            f"{'.'.join(map(str, version))}.",
            "dblocks needs MariaDB 10.6 or MySQL 8.0.11 or newer (SKIP LOCKED).",
        )


def _check_collation(
    connection: BaseDatabaseWrapper, collation: str | None
) -> Iterator[checks.CheckMessage]:
    exact = exact_collation(connection)
    if collation != exact:
        yield _warning(
            "W003",
            f"The key column in {connection.alias!r} has the collation {collation!r}, "
            f"under which different keys may be one lock.",
            f"Change the column's collation to {exact!r}.",
        )
