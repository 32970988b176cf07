"""What is different on PostgreSQL."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from django.core.checks import CheckMessage
from django.db import DatabaseError, InterfaceError, OperationalError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from .base import TABLE, Dialect, ask, digest, gevent_waits, send

PREPARE_AFTER = 5
"""Grants on one connection after which the server keeps the plans of what follows."""

PLAN_GONE = frozenset({"26000", "0A000"})

GRACE = 250
"""Milliseconds by which a statement may outlast its wait for a row's lock."""

# lock_timeout counts anew for each transaction that a statement waits for. A shorter
# statement_timeout of the session's own stays.
_BOUND = """
SELECT current_setting('lock_timeout'), current_setting('statement_timeout'),
    set_config('lock_timeout', %s, true),
    set_config('statement_timeout', COALESCE(EXTRACT(EPOCH FROM LEAST(
        NULLIF(current_setting('statement_timeout')::interval, '0'), %s::interval
    )) * 1000, 0)::bigint::text, true)
"""
_UNBOUND = """
SELECT set_config('lock_timeout', %s, true), set_config('statement_timeout', %s, true)
"""


@cache
def _preparing_cursor() -> type[Any]:
    """Return psycopg's cursor, for statements that the server plans only once.

    Django switches that off for the whole connection, because a pooler may give the
    next transaction another session, and its own cursor binds values on the client.
    """
    # Imported only here, where psycopg made the connection: it is large, and projects
    # with another driver may have it installed.
    from psycopg import Cursor

    class PreparingCursor(Cursor[Any]):
        def execute(self, sql: Any, params: Any = None) -> Any:  # type: ignore[override]
            raw: Any = self.connection
            before, raw.prepare_threshold = raw.prepare_threshold, 0
            try:
                return super().execute(sql, params, prepare=True)
            except Exception as error:
                if getattr(error, "sqlstate", None) not in PLAN_GONE:
                    raise
                # The plan was discarded, or made for columns of another type.
                raw._dblocks_grants = -math.inf
                return super().execute(sql, params, prepare=False)
            finally:
                raw.prepare_threshold = before

    return PreparingCursor


def _own_session(connection: Any) -> int:
    """Return the session to which the driver believes that it is connected.

    A pooler gives it a number of its own.
    """
    # The driver closes a connection whose statement it can't cancel on an interrupt.
    with connection.wrap_database_errors:
        session: int = connection.connection.info.backend_pid
    return session


class PostgreSQL(Dialect):
    """PostgreSQL."""

    name = "postgresql"
    has_zones = True
    has_guard_index = True
    short_waits = {"connect_timeout": 5, "tcp_user_timeout": 5000}
    network_timeouts = ("connect_timeout", "tcp_user_timeout")
    exact_collation = "C"
    letters_collation = "default"
    # Not the transaction's clock: a lease taken two seconds into a transaction would be
    # two seconds short. Within one statement all uses agree.
    now = "STATEMENT_TIMESTAMP()"
    # Conflicts only with an update of the columns of a unique index. The version is in
    # one here: take-overs wait and renewals don't.
    strength = "FOR KEY SHARE"

    after = "({} + MAKE_INTERVAL(secs => {}))".format
    seconds_until = f"EXTRACT(EPOCH FROM {{}} - {now})::double precision".format
    # A timestamptz arrives in the session's time zone, ambiguous in the hour that
    # daylight saving repeats.
    utc = "({} AT TIME ZONE 'UTC')".format
    # With server-side binding a number's type must be known.
    integer = "%({})s::bigint".format
    seconds = "%({})s::double precision".format
    unlocked = (
        f'"key" = (SELECT "key" FROM "{TABLE}" WHERE {{}} FOR UPDATE SKIP LOCKED)'
    ).format
    # After a stronger lock the update would count as one of the version: the holder's
    # own guard would fail in a transaction whose snapshot is older.
    unlocked_or_pinned = (
        f'"key" = (SELECT "key" FROM "{TABLE}" WHERE {{}} '
        f"FOR NO KEY UPDATE SKIP LOCKED)"
    ).format
    update_any = (
        f'UPDATE "{TABLE}" SET {{}} WHERE "key" = (SELECT "key" FROM "{TABLE}" '
        f"WHERE {{}} "
        f'ORDER BY CASE "key" WHEN %(first)s THEN 0 ELSE 1 END '
        f"LIMIT 1 FOR UPDATE SKIP LOCKED)"
    ).format
    # The session lock is taken only for the statement, whose commit frees it. It must
    # not be tried for a key that isn't free: hence the CASE.
    yields = (
        "CASE WHEN {} THEN {} OR PG_TRY_ADVISORY_XACT_LOCK({}::bigint) ELSE FALSE END"
    ).format
    gate_of_key = (
        "('x' || ENCODE(SUBSTRING(SHA256(DECODE('64626c6f636b7300', 'hex') "
        "|| CONVERT_TO(\"key\", 'UTF8')) FROM 1 FOR 8), 'hex'))::bit(64)"
    )

    def update_unlocked(self, change: str, which: str, n: int) -> str:
        rows = f"SELECT {self.key} FROM {self.table} WHERE {which}"
        rows += " FOR NO KEY UPDATE SKIP LOCKED"
        # Not IN, which may become a join that runs the subquery again for each row.
        return f"UPDATE {self.table} SET {change} WHERE {self.key} = ANY(ARRAY({rows}))"

    def all_or_none(self, change: str, which: str, n: int) -> str:
        rows = f"SELECT {self.key} FROM {self.table} WHERE {which}"
        return (
            # The version is a part of a unique index, so a weaker lock would not pass
            # over a row that a guard has pinned, and the update would wait for it.
            f"WITH due AS MATERIALIZED ({rows} FOR UPDATE SKIP LOCKED) "
            f"UPDATE {self.table} SET {change} "
            f"WHERE {self.key} = ANY(ARRAY(SELECT {self.key} FROM due)) "
            f"AND (SELECT COUNT(*) FROM due) = {n}"
        )

    session = ("PG_BACKEND_PID()",)

    def note_session(self, connection: Connection, session: Any) -> None:
        raw: Any = connection.connection
        if not hasattr(raw, "prepare_threshold"):
            return
        # Behind a pooler, the statement ran in another session than the one that the
        # driver knows, and the next statement may run in a third.
        direct = session == _own_session(connection)
        raw._dblocks_grants = getattr(raw, "_dblocks_grants", 0) + 1 if direct else 0

    def cursor(self, connection: Any) -> Any:
        connection.close_if_health_check_failed()
        known = getattr(connection.connection, "_dblocks_grants", 0) >= PREPARE_AFTER
        # Django logs statements with their values, which a prepared one doesn't have.
        # In a transaction, one that is gone would end all of it.
        if not known or connection.queries_logged or connection.in_atomic_block:
            return connection.cursor()
        return connection._prepare_cursor(_preparing_cursor()(connection.connection))

    transient = frozenset({"40001", "40P01", "55P03"})
    collisions = frozenset({"40001", "40P01"})
    stale_snapshot = "40001"
    wait_over = frozenset({"55P03"})
    _LOST = frozenset({"57P01", "57P02", "57P05", "25P03", "25P04"})

    def code(self, error: BaseException) -> str | None:
        cause = error.__cause__
        return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)

    def is_lost(self, error: BaseException) -> bool:
        state = self.code(error)
        if state is not None:
            return state in self._LOST or state.startswith("08")
        # libpq's own errors, about the connection, have no state.
        return isinstance(error, (OperationalError, InterfaceError))

    def is_unsent(self, error: BaseException) -> bool:
        # With these codes the server never ends a session between a commit and its
        # reply. The texts are the drivers' for a connection known to be closed.
        state = self.code(error)
        if state is not None:
            return state in {"57P01", "57P05", "25P03", "25P04"}
        return str(error) in {"the connection is closed", "connection already closed"}

    def is_cut_off(self, error: BaseException) -> bool:
        return self.code(error) == "57014"

    def isolation(self, connection: Any) -> str | None:
        # psycopg2 numbers the levels differently.
        level = getattr(connection, "isolation_level", None)
        name = getattr(level, "name", "").replace("_", " ").lower()
        return name if name in {"repeatable read", "serializable"} else None

    snapshots_hide_rows = True
    # The second one exists from PostgreSQL 17 on.
    may_idle = (
        "SELECT set_config(name, '0', true) FROM pg_settings WHERE name IN "
        "('idle_in_transaction_session_timeout', 'transaction_timeout')"
    )

    def session_isolation(self, connection: Connection) -> str | None:
        return str(ask(connection, "SHOW transaction_isolation")[0])

    @contextmanager
    def bounded(self, connection: Connection, limit: float | None) -> Iterator[None]:
        milliseconds = 0 if limit is None else max(1, round(limit * 1000))
        in_all = None if limit is None else f"{milliseconds + GRACE}ms"
        # The savepoint keeps the transaction usable after a wait that ran out; rolling
        # back to it undoes the settings.
        with transaction.atomic(using=connection.alias):
            before = ask(connection, _BOUND, [f"{milliseconds}ms", in_all])[:2]
            yield
            ask(connection, _UNBOUND, before)

    def session_lock_name(self, connection: Connection, key: str) -> int:
        return int.from_bytes(digest("dblocks", key)[:8], "big", signed=True)

    def has_relied_on_sessions(self, connection: Connection) -> bool:
        session = ask(connection, "SELECT PG_BACKEND_PID()")[0]
        return bool(session == _own_session(connection))

    def ask_session(
        self, connection: Connection, sql: str, params: Sequence[str | int] = ()
    ) -> Any:
        # A pooler may run any transaction in a session that is somebody else's.
        own = f"{sql} WHERE PG_BACKEND_PID() = %s"
        row = ask(connection, own, [*params, _own_session(connection)])
        if row is None:
            raise InterfaceError("The statement came to a session of somebody else's.")
        return row[0]

    def take_session_lock(
        self, connection: Connection, name: str | int, seconds: float
    ) -> bool:
        limit = f"{max(1, math.ceil(seconds * 1000))}ms"
        try:
            # The timeout ends with the statement in any case.
            self.ask_session(
                connection,
                "SELECT CASE WHEN SET_CONFIG('lock_timeout', %s, true) <> '' "
                "THEN PG_ADVISORY_LOCK(%s) END",
                [limit, name],
            )
        except DatabaseError as error:
            if self.is_wait_over(error):
                return False
            raise
        return True

    def try_migration_lock(self, connection: Connection) -> bool:
        # A pooler may change the session between two transactions.
        connection.ensure_connection()
        connection.set_autocommit(False)
        number = self.session_lock_name(connection, "migrate")
        return bool(
            ask(connection, "SELECT pg_try_advisory_xact_lock(%s)", [number])[0]
        )

    def waits_for_all(self, connection: Any) -> bool:
        # psycopg2 waits in C, unless something like psycogreen waits for it.
        if connection.Database.__name__ != "psycopg2" or not gevent_waits():
            return False
        extensions = import_module("psycopg2.extensions")
        return bool(extensions.get_wait_callback() is None)

    try_session_lock = "SELECT pg_try_advisory_lock(%s)"
    free_session_lock = "SELECT pg_advisory_unlock(%s)"
    free_session_locks = "SELECT pg_advisory_unlock_all()"
    _advisory_locks = (
        "SELECT (classid::bigint << 32) | objid::bigint, COUNT(*) FROM pg_locks "
        "WHERE locktype = 'advisory' AND objsubid = 1 AND {} AND database = "
        "(SELECT oid FROM pg_database WHERE datname = CURRENT_DATABASE()) GROUP BY 1"
    ).format
    queues = _advisory_locks("NOT granted")

    def taken_session_locks(
        self, connection: Connection, names: Sequence[str | int]
    ) -> set[str | int]:
        with connection.cursor() as cursor:
            taken = send(cursor, self._advisory_locks("granted"), None, "fetchall")
        return {name for name, _ in taken}.intersection(names)

    def findings(self, connection: Connection) -> Iterator[CheckMessage]:
        row = self.ask_of_key(
            connection,
            "SELECT collation_name FROM information_schema.columns "
            "WHERE table_name = %s AND column_name = 'key' "
            "AND table_schema = ANY (current_schemas(false))",
        )
        yield from self.check_collation(connection.alias, row[0])
