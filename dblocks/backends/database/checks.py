"""What a system check must say of the database that the locks are in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from django.apps import apps
from django.core import checks
from django.db import Error, connections, router

from ..messages import warning
from . import dialects

if TYPE_CHECKING:
    from .backend import DatabaseBackend


def check_connection(backend: DatabaseBackend) -> Iterator[checks.CheckMessage]:
    """W004 and W005: what the settings tell."""
    alias = backend.alias
    if backend.options.get("using") is None:
        model = apps.get_model("dblocks", "DistributedLock")
        read, write = router.db_for_read(model), router.db_for_write(model)
        if read != write:
            yield warning(
                "W005",
                f"DBLOCKS[{alias!r}]: the router reads locks from {read!r} and writes "
                f"them to {write!r}.",
                "A replica lags behind: name the primary in OPTIONS={'using': …}.",
            )
    connection = connections[backend.using]
    options = connection.settings_dict.get("OPTIONS", {})
    if options.get("service") or "read_default_file" in options:
        return
    wanted = dialects.of(connection).network_timeouts
    missing = [name for name in wanted if not options.get(name)]
    if missing:
        yield warning(
            "W004",
            f"The database {backend.using!r} has no network timeout: "
            f"{', '.join(missing)}.",
            "Without them a lock operation may hang on a dead connection: set them in "
            "DATABASES[…]['OPTIONS'].",
        )


def check_server(backend: DatabaseBackend) -> Iterator[checks.CheckMessage]:
    """W001 to W003 and W007: what the server tells."""
    connection = connections[backend.using]
    try:
        if dialects.TABLE not in connection.introspection.table_names():
            yield warning(
                "W001",
                f"The lock table is missing in the database {connection.alias!r}.",
                "Run manage.py migrate.",
            )
            return
        yield from dialects.of(connection).findings(connection)
    except Error as error:
        yield warning(
            "W001",
            f"The lock table in {backend.using!r} can't be read: {error}",
            "See that the database can be reached, and run migrate.",
        )
