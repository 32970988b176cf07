"""All that differs between databases: clocks, statements' shapes, errors, limits.

One :class:`Dialect` for each kind of database. Nothing else in dblocks asks a
connection for its vendor.
"""

from __future__ import annotations

from typing import Any

from django.db import NotSupportedError
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from .base import FLOOR, TABLE, Dialect, ask
from .mysql import MariaDB, MySQL, SnapshotMariaDB
from .postgresql import PostgreSQL
from .sqlite import SQLite

__all__ = ["FLOOR", "TABLE", "Dialect", "ask", "of"]

_DIALECTS: dict[str, Dialect] = {"sqlite": SQLite(), "postgresql": PostgreSQL()}
_servers: dict[tuple[str, str, str], Dialect] = {}


def of(connection: Connection) -> Dialect:
    """Return the dialect of a connection's database; asks each MySQL server once.

    Raises:
        NotSupportedError: dblocks can't keep locks in such a database.
    """
    known: Dialect | None = connection.__dict__.get("_dblocks_dialect")
    if known is None:
        known = connection.__dict__["_dblocks_dialect"] = _find(connection)
    return known


def known(connection: Connection) -> Dialect:
    """Return the dialect as far as it is known, without asking a server."""
    found: Dialect | None = connection.__dict__.get("_dblocks_dialect")
    asked = _DIALECTS.get(connection.vendor) or _servers.get(_server(connection))
    return found or asked or MySQL()


def _find(connection: Connection) -> Dialect:
    if connection.vendor in _DIALECTS:
        return _DIALECTS[connection.vendor]
    if connection.vendor != "mysql":
        raise NotSupportedError(
            f"dblocks can't keep locks in {connection.display_name}: use MySQL, "
            f"MariaDB, PostgreSQL or SQLite, or another backend of DBLOCKS."
        )
    server = _server(connection)
    if server not in _servers:
        _servers[server] = _ask(connection)
    return _servers[server]


def _server(connection: Connection) -> tuple[str, str, str]:
    settings = connection.settings_dict
    return settings["ENGINE"], settings["HOST"], settings["PORT"]


def _ask(connection: Any) -> Dialect:
    wsrep_on = ask(connection, "SHOW VARIABLES LIKE 'wsrep_on'")
    in_cluster = wsrep_on is not None and wsrep_on[1].upper() == "ON"
    kind = MySQL
    if connection.mysql_is_mariadb:
        row = ask(connection, "SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")
        kind = SnapshotMariaDB if row else MariaDB
    return kind(in_cluster=in_cluster)
