"""System checks: what can be wrong with a deployment, before it goes wrong.

Errors concern the settings alone, or a server that can't be used at all. All other
messages about a server are warnings. Checks of servers are tagged ``database``:
``manage.py check --database default`` runs them, after ``migrate`` in a deployment.
Each message has a section in the documentation, where its hint leads.

E001: A backend in ``DBLOCKS`` can't be made as it is configured. The message names the
    alias and the value.
E002: The locks are in a database that isn't supported: neither MariaDB, MySQL,
    PostgreSQL nor SQLite, or a server that only speaks like one of them (CockroachDB,
    YugabyteDB, TiDB, Vitess). Every lock operation raises ``NotSupportedError``.
    Name another database in ``OPTIONS={"using": …}``, or choose another ``BACKEND``.
W001: The lock table is missing, out of date, or can't be read, so lock operations on
    that database fail. Run ``manage.py migrate dblocks``, with ``--database ALIAS``
    where the locks have a database of their own, and see that a router's
    ``allow_migrate()`` lets ``dblocks`` in there.
W002: The lock table has no transactions: the server made it with an engine other than
    InnoDB, where neither the guard nor row locks work.
W003: The key column doesn't compare exactly: under its collation different keys may be
    one lock. A dump restored elsewhere may have changed it.
W004: The driver has no network timeout: on a connection that dies silently a lock
    operation waits until the operating system gives up. Set ``connect_timeout``, and
    ``read_timeout`` and ``write_timeout`` (MySQL, MariaDB) or ``tcp_user_timeout``
    (PostgreSQL), in the database's ``OPTIONS``.
W005: The router reads locks from one database and writes them to another, which the
    first one follows late. Name the primary in ``OPTIONS={"using": …}``.
W006: uWSGI runs no threads, or doesn't tell Python that it has forked, so leases are
    not renewed. Start it with ``--enable-threads`` and ``--py-call-uwsgi-fork-hooks``.
W007: The server or library is too old: dblocks needs MariaDB 10.6, MySQL 8.0.11 or
    SQLite 3.35.
W008: The default lease is shorter than a second, and a busy machine misses its
    renewal.
W009: Locks are kept in the memory of one process. ``LocMemBackend`` is for tests.
W010: A SQLite database has Django's own settings, with which a transaction that has
    read fails, at once, if others write. Set ``"transaction_mode": "IMMEDIATE"`` and
    ``"init_command": "PRAGMA journal_mode=WAL"`` in its ``OPTIONS``.
W011: Redis can't be asked: it doesn't answer, or refuses the user ``INFO``.
W012: Redis may evict locks when its memory is full. Set ``maxmemory-policy
    noeviction``, or give locks a server of their own.
W013: Redis forgets locks that are held when it restarts, because it has no append-only
    file. Set ``appendonly yes``, and ``appendfsync always`` if no grant may be
    forgotten.
W014: Waiters can't queue for session locks, because the database is behind a pooler or
    one of a cluster. Say so with ``OPTIONS={"session_locks": False}``; behind a
    pooler, connect directly if the order of waiters matters.
W015: Two nodes of a Galera cluster have different clocks, by which each judges whether
    a lease is over. Run NTP on all nodes, or send all writes to one.
W016: MySQL or MariaDB rolls back whole transactions after a lock wait timeout. Switch
    ``innodb_rollback_on_timeout`` off.
W017: A connection to SQLite keeps the file for itself, so that leases aren't renewed.
    Take ``PRAGMA locking_mode=EXCLUSIVE`` out of its ``OPTIONS``.
W018: MySQL or MariaDB counts the rows that an ``UPDATE`` changed, not those that it
    found. Add ``CLIENT.FOUND_ROWS`` to the ``client_flag`` in ``OPTIONS``.
W019: ZooKeeper can't be asked: no server of it answers, it refuses this user, or has
    no sessions of the length ``LEASE``.

W001, W004 and W010 to W019 are left out where ``migrate`` and ``test`` check in
passing: the first makes the table, and neither is a deployment.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.utils.connection import ConnectionDoesNotExist

from .backends.base import BaseBackend
from .backends.messages import error, warning
from .conf import backends

ASKED_FOR = {
    f"dblocks.{check}"
    for check in ("W001", "W004", *(f"W0{number}" for number in range(10, 20)))
}
"""Messages for those who ask for checks, not for commands that check in passing."""


def _worth_saying(messages: Iterable[checks.CheckMessage]) -> list[checks.CheckMessage]:
    """Leave out messages that commands which check in passing needn't show."""
    in_passing = sys.argv[1:2] in (["migrate"], ["test"])
    return [m for m in messages if not (in_passing and m.id in ASKED_FOR)]


def _made() -> tuple[list[BaseBackend], list[Exception]]:
    """Return the backends that can be made, and why the others can't."""
    made: list[BaseBackend] = []
    faults: list[Exception] = []
    try:
        aliases = list(backends.settings)
    except ImproperlyConfigured as fault:
        return [], [fault]
    for alias in aliases:
        try:
            backends[alias].check_configured()
            made.append(backends[alias])
        except (ImproperlyConfigured, ConnectionDoesNotExist) as fault:
            faults.append(fault)
    return made, faults


@checks.register
def check_settings(**kwargs: Any) -> list[checks.CheckMessage]:
    """E001: every backend in ``DBLOCKS`` can be made as it is configured."""
    return [error("E001", str(e), "Correct the setting DBLOCKS.") for e in _made()[1]]


@checks.register
def check_deployment(**kwargs: Any) -> Iterator[checks.CheckMessage]:
    """W006, W008 and W009: what the settings and the process tell."""
    for backend in _made()[0]:
        if backend.lease < 1:
            yield warning(
                "W008",
                f"DBLOCKS[{backend.alias!r}]: a LEASE of {backend.lease:g} s is for "
                f"tests only.",
                "A busy machine misses such a renewal: use 10 s or more.",
            )
        yield from backend.check()
    yield from _uwsgi()


def _uwsgi() -> Iterator[checks.CheckMessage]:
    uwsgi: Any = sys.modules.get("uwsgi")
    if uwsgi is None:
        return
    options = {
        option.decode() if isinstance(option, bytes) else option
        for option in getattr(uwsgi, "opt", {})
    }
    if "enable-threads" not in options:
        yield warning(
            "W006",
            "uWSGI runs no threads here: leases are not renewed.",
            "Start uWSGI with --enable-threads.",
        )
    # Without a master the only worker is the process that has loaded the code.
    elif ("master" in options or getattr(uwsgi, "numproc", 2) > 1) and not options & {
        "py-call-uwsgi-fork-hooks",
        "py-call-osafterfork",
        "lazy-apps",
        "lazy",
    }:
        yield warning(
            "W006",
            "uWSGI doesn't tell Python that it has forked: where its master has used "
            "a lock, its workers renew no leases.",
            "Start uWSGI with --py-call-uwsgi-fork-hooks, or with --lazy-apps.",
        )


@checks.register(checks.Tags.database)
def check_connections(
    databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """W004 and W005: what the settings tell of the lock's database."""
    found = (m for b in _made()[0] for m in b.check_connection(databases))
    return _worth_saying(found)


@checks.register(checks.Tags.database)
def check_databases(
    databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """E002, W001 to W003, W007 and W010 to W019: what the locks' server tells."""
    messages: list[checks.CheckMessage] = []
    for backend in _made()[0]:
        # Several backends may be in one database.
        found = backend.check_server(databases or ())
        messages += [message for message in found if message not in messages]
    return _worth_saying(messages)
