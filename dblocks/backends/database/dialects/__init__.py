"""All that differs between databases: clocks, shapes of statements, errors, limits.

There is one :class:`Dialect` for each kind of database. Nothing else in dblocks asks a
connection for its vendor.
"""

from __future__ import annotations

from typing import Any

from django.db import NotSupportedError
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from .base import FLOOR, TABLE, Dialect, ask, send
from .mysql import MariaDB, MySQL, SnapshotMariaDB
from .postgresql import PostgreSQL
from .sqlite import SQLite

__all__ = ["FLOOR", "TABLE", "Dialect", "ask", "of", "send"]

_DIALECTS: dict[str, Dialect] = {"sqlite": SQLite(), "postgresql": PostgreSQL()}
_LOOKALIKES = {
    "CockroachDB": "CockroachDB",
    "-YB-": "YugabyteDB",
    "TiDB": "TiDB",
    "Vitess": "Vitess",
}
"""Parts of the version by which servers that imitate another one are known."""

_PLACE = "host", "port", "unix_socket", "read_default_file", "read_default_group"
"""Options of MySQL's drivers that may say where the server is."""

_servers: dict[tuple[str, ...], Dialect] = {}


def of(connection: Connection) -> Dialect:
    """Return the dialect of a connection's database; asks each MySQL server once.

    Raises:
        NotSupportedError: dblocks can't keep locks in such a database.
    """
    known: Dialect | None = connection.__dict__.get("_dblocks_dialect")
    if known is None:
        known = _find(connection)
        # Before it is connected, nothing is known about its server.
        if connection.connection is not None:
            connection.__dict__["_dblocks_dialect"] = known
    return known


def known(connection: Connection) -> Dialect:
    """Return the dialect as far as it is known, without asking a server."""
    found: Dialect | None = connection.__dict__.get("_dblocks_dialect")
    if found is None:
        found = _DIALECTS.get(connection.vendor) or _servers.get(_server(connection))
    return found or MySQL()


def _find(connection: Connection) -> Dialect:
    if connection.vendor == "postgresql":
        _refuse_lookalike(_postgresql_version(connection))
    if connection.vendor in _DIALECTS:
        return _DIALECTS[connection.vendor]
    if connection.vendor != "mysql":
        raise _not_supported(connection.display_name)
    server = _server(connection)
    if server not in _servers:
        _servers[server] = _ask(connection)
    return _servers[server]


def _server(connection: Connection) -> tuple[str, ...]:
    settings = connection.settings_dict
    place = [settings[name] for name in ("ENGINE", "HOST", "PORT")]
    place += [settings["OPTIONS"].get(name) for name in _PLACE]
    return tuple(map(str, place))


def _postgresql_version(connection: Any) -> str:
    """Return what the server said about itself when the connection was made."""
    if connection.connection is None:
        return ""
    status = connection.connection.info.parameter_status
    names = "crdb_version", "server_version"
    return " ".join(filter(None, map(status, names)))


def _refuse_lookalike(version: str) -> None:
    for mark, name in _LOOKALIKES.items():
        if mark in version:
            raise _not_supported(name)


def _not_supported(name: str) -> NotSupportedError:
    return NotSupportedError(
        f"dblocks can't keep locks in {name}: use MySQL, MariaDB, PostgreSQL or "
        f"SQLite, or another backend of DBLOCKS."
    )


def _ask(connection: Any) -> Dialect:
    _refuse_lookalike(connection.mysql_server_info)
    wsrep_on = ask(connection, "SHOW VARIABLES LIKE 'wsrep_on'")
    in_cluster = wsrep_on is not None and wsrep_on[1].upper() == "ON"
    kind = MySQL
    if connection.mysql_is_mariadb:
        row = ask(connection, "SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")
        kind = SnapshotMariaDB if row else MariaDB
    return kind(in_cluster=in_cluster)
