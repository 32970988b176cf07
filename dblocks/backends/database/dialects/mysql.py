"""What is different on MySQL and MariaDB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from django.core.checks import CheckMessage
from django.db import Error, InterfaceError
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ....permits import MAX_PERMITS, SEPARATOR
from ...messages import warning
from .base import TABLE, Dialect, Shape, ask, digest, gevent_waits
from .galera import clock_findings

FOUND_ROWS = 2
"""Django's ``client_flag``, which a project's own replaces."""

NAMES_AT_ONCE = 500
"""Session locks that one statement asks for."""


def _rolls_back_on_timeout(connection: Connection) -> bool:
    """Tell whether a lock wait timeout ends the whole transaction."""
    return bool(ask(connection, "SELECT @@innodb_rollback_on_timeout")[0])


class MySQL(Dialect):
    """MySQL; what MariaDB doesn't do differently holds for it too."""

    name = "mysql"
    returns_rows = False
    short_waits = {"connect_timeout": 5, "read_timeout": 5, "write_timeout": 5}
    network_timeouts = ("connect_timeout", "read_timeout", "write_timeout")
    exact_collation = "utf8mb4_0900_bin"
    now = "UTC_TIMESTAMP(6)"
    table = f"`{TABLE}`"
    key = "`key`"
    # Otherwise a small table may be read as a whole: InnoDB locks whatever it passes,
    # and waits for what others have locked.
    by_key = f"{table} FORCE INDEX (PRIMARY)"
    # INSERT IGNORE would hide every other error as well.
    insert_unless_there: Shape = "INSERT INTO {}".format
    # The spelling that MariaDB knows too.
    share = "LOCK IN SHARE MODE"
    # GET_LOCK() rounds its timeout to whole seconds, and half a second to none.
    shortest_queueing = 1.0
    oldest: tuple[int, ...] = (8, 0, 11)

    def __init__(self, *, in_cluster: bool = False) -> None:
        # Galera replicates what is written, and neither row locks nor session locks.
        self.certifies = in_cluster
        self.has_session_locks = not in_cluster

    after = "({} + INTERVAL {} SECOND)".format
    seconds_until = f"(TIMESTAMPDIFF(MICROSECOND, {now}, {{}}) / 1e6)".format
    next_version = "LAST_INSERT_ID({})".format
    # A subquery on the table that is updated must be materialized.
    unlocked = (
        f"{key} = (SELECT * FROM (SELECT {key} FROM {table} WHERE {{}} "
        f"FOR UPDATE SKIP LOCKED) AS locked)"
    ).format
    first_hold = (
        f"LAST_INSERT_ID((version + 1) * {MAX_PERMITS} + SUBSTRING_INDEX("
        f"{table}.{key}, CHAR({ord(SEPARATOR)} USING utf8mb4), -1)) * 0 + 1"
    )
    microseconds = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {})".format
    timed_hold = f"LAST_INSERT_ID({microseconds(now)}) * 0 + 1"
    asked = 2**62
    tells_requests = (
        f"hold_count = hold_count + LAST_INSERT_ID(CASE WHEN release_requested_at "
        f"IS NULL THEN LAST_INSERT_ID() ELSE {asked} END) * 0, "
    )
    yields = "{} AND ({} OR IS_FREE_LOCK({}))".format
    gate_of_key = (
        f"CONCAT('dblocks:', LEFT(SHA2(CONCAT(%(database)s, CHAR(0), {key}), 256), 40))"
    )

    def update_unlocked(self, change: str, which: str, n: int) -> str:
        # Only this shape never waits for a row. The optimizer must find the unlocked
        # rows first and come to the others by the primary key, or it locks what it
        # passes, and the LIMIT keeps the derived table from being merged, without
        # SKIP LOCKED, into the update.
        rows = f"SELECT {self.key} FROM {self.by_key} WHERE {which} LIMIT {n}"
        due = f"({rows} FOR UPDATE SKIP LOCKED) AS due"
        return (
            f"UPDATE {due} STRAIGHT_JOIN {self.by_key} "
            f"ON {self.table}.{self.key} = due.{self.key} SET {change}"
        )

    all_or_none = update_unlocked

    def update_any(self, change: str, which: str) -> str:
        # Unordered: a sort would lock every row, also those that others could take.
        return self.update_unlocked(change, which, 1)

    # The order serves as by_key does: a DELETE takes no hint of an index.
    delete = f"DELETE FROM {table} WHERE {{}} ORDER BY {key} LIMIT {{}}".format

    transient = frozenset({1020, 1205, 1213, 3058, 3572})
    collisions = frozenset({1020, 1213})
    stale_snapshot = 1020
    wait_over = frozenset({1205, 1969, 3024, 3572})
    taken = frozenset({1205})
    _LOST = frozenset({1053, 1927, 2006, 2013, 2014, 2055, 4031})

    def code(self, error: BaseException) -> object:
        return error.args[0] if error.args else None

    def has_ended_transaction(
        self, connection: Connection, error: BaseException
    ) -> bool:
        return self.code(error) == 1205 and _rolls_back_on_timeout(connection)

    def is_lost(self, error: BaseException) -> bool:
        return isinstance(error, InterfaceError) or self.code(error) in self._LOST

    def is_unsent(self, error: BaseException) -> bool:
        # Not 2013, with which the statement may have been sent. The empty error is the
        # drivers' for a connection that they know to be closed.
        closed = isinstance(error, InterfaceError) and error.args == (0, "")
        return closed or self.code(error) in {2006, 4031}

    def isolation(self, connection: Any) -> str | None:
        # Django sets it when it connects.
        level: str | None = getattr(connection, "isolation_level", None)
        level = level or "repeatable read"
        return level if level in {"repeatable read", "serializable"} else None

    keeps_row_locks = True

    def session_isolation(self, connection: Any) -> str | None:
        level: str | None = connection.isolation_level
        if level is None:
            # MySQL has transaction_isolation alone, and old MariaDB tx_isolation.
            row = ask(
                connection,
                "SHOW SESSION VARIABLES WHERE variable_name "
                "IN ('transaction_isolation', 'tx_isolation')",
            )
            level = str(row[-1]).lower().replace("-", " ")
        return level

    def bounded(
        self, connection: Connection, limit: float | None
    ) -> AbstractContextManager[None]:
        if limit is None:
            return nullcontext()

        def execute_limited(execute: Any, sql: str, *rest: Any) -> Any:
            return execute(self.limited(sql, max(limit, 0.001)), *rest)

        return connection.execute_wrapper(execute_limited)

    def making_rows(self, connection: Connection) -> AbstractContextManager[object]:
        # MySQL can't be told for one statement, so this costs three more. At the
        # other levels the project's own transactions lock no gaps.
        if self.isolation(connection) is None:
            return nullcontext()
        return self._short_lock_wait(connection)

    @contextmanager
    def _short_lock_wait(self, connection: Connection) -> Iterator[None]:
        (before,) = ask(connection, "SELECT @@SESSION.innodb_lock_wait_timeout")
        change = "SET SESSION innodb_lock_wait_timeout = %s"
        try:
            ask(connection, change, [1])
            yield
        except BaseException:
            # PyMySQL closes the connection where an interrupt ends the insert, which
            # must not become a database error.
            with suppress(Error):
                ask(connection, change, [before])
            raise
        ask(connection, change, [before])

    def database(self, connection: Connection) -> str:
        name = super().database(connection)
        if name:
            return name
        # A configuration file of the driver names it.
        known = connection.__dict__
        if "_dblocks_database" not in known:
            (known["_dblocks_database"],) = ask(connection, "SELECT DATABASE()")
        return str(known["_dblocks_database"])

    def session_lock_name(self, connection: Connection, key: str) -> str:
        # Names belong to the whole server, ignore case and have at most 64 characters.
        return f"dblocks:{digest(self.database(connection), key).hex()[:40]}"

    def waits_for_all(self, connection: Any) -> bool:
        # All drivers but PyMySQL wait in C, which gevent can't interrupt.
        return gevent_waits() and connection.Database.__name__ != "pymysql"

    def take_session_lock(
        self, connection: Connection, name: str | int, seconds: float
    ) -> bool:
        if self.shortest_queueing:
            seconds = int(seconds)
        return bool(ask(connection, "SELECT GET_LOCK(%s, %s)", [name, seconds])[0])

    def try_migration_lock(self, connection: Connection) -> bool:
        database = digest("migrate", self.database(connection)).hex()
        return self.take_session_lock(connection, f"dblocks{database[:40]}", 0)

    try_session_lock = "SELECT GET_LOCK(%s, 0)"
    free_session_lock = "SELECT RELEASE_LOCK(%s)"
    free_session_locks = "SELECT RELEASE_ALL_LOCKS()"
    queues = (
        "SELECT REGEXP_SUBSTR(info, 'dblocks:[0-9a-f]{40}'), COUNT(*) "
        "FROM information_schema.processlist WHERE state = 'User lock' GROUP BY 1"
    )

    def taken_session_locks(
        self, connection: Connection, names: Sequence[str | int]
    ) -> set[str | int]:
        taken: set[str | int] = set()
        for start in range(0, len(names), NAMES_AT_ONCE):
            batch = names[start : start + NAMES_AT_ONCE]
            asked = ", ".join(["IS_USED_LOCK(%s)"] * len(batch))
            sessions = ask(connection, f"SELECT {asked}", batch)
            taken |= {n for n, session in zip(batch, sessions, strict=True) if session}
        return taken

    def limited(self, sql: str, seconds: float) -> str:
        """Return a ``SELECT`` that runs for no longer; fractions of a second count."""
        hint = f"SELECT /*+ MAX_EXECUTION_TIME({max(1, round(seconds * 1000))}) */"
        return sql.replace("SELECT", hint, 1)

    def findings(self, connection: Any) -> Iterator[CheckMessage]:
        engine, collation = self.ask_of_key(
            connection,
            "SELECT t.engine, c.collation_name FROM information_schema.tables t "
            "JOIN information_schema.columns c USING (table_schema, table_name) "
            "WHERE t.table_schema = DATABASE() AND t.table_name = %s "
            "AND c.column_name = 'key'",
        )
        if engine != "InnoDB":
            yield warning(
                "W002",
                f"The lock table in {connection.alias!r} is kept by {engine}, which "
                f"has no transactions.",
                f"Run ALTER TABLE {TABLE} ENGINE=InnoDB.",
            )
        yield from self.check_collation(connection.alias, collation)
        if _rolls_back_on_timeout(connection):
            yield warning(
                "W016",
                f"After a lock wait timeout, the server of {connection.alias!r} rolls "
                f"back the whole transaction, and later statements begin another.",
                "Switch innodb_rollback_on_timeout off.",
            )
        if not connection.get_connection_params()["client_flag"] & FOUND_ROWS:
            yield warning(
                "W018",
                f"The server of {connection.alias!r} counts the rows that an UPDATE "
                f"changed, not those that it found.",
                "Add CLIENT.FOUND_ROWS of the driver to the client_flag in OPTIONS.",
            )
        if self.certifies:
            yield from clock_findings(connection)
        if connection.mysql_version < self.oldest:
            yield warning(
                "W007",
                f"The server of {connection.alias!r} is too old for locks: "
                f"{'.'.join(map(str, connection.mysql_version))}.",
                "dblocks needs MariaDB 10.6 or MySQL 8.0.11 or newer (SKIP LOCKED).",
            )


class MariaDB(MySQL):
    """MariaDB."""

    name = "mariadb"
    exact_collation = "utf8mb4_nopad_bin"
    shortest_queueing = 0.0
    oldest = (10, 6)
    may_idle = (
        "SET SESSION idle_transaction_timeout = 0, "
        "idle_readonly_transaction_timeout = 0, idle_write_transaction_timeout = 0"
    )
    unlocked = "{}".format

    def __init__(self, *, in_cluster: bool = False) -> None:
        super().__init__(in_cluster=in_cluster)
        # A lock on the whole table, such as a backup's, is waited out for a second: it
        # may last only an instant.
        self.at_once = self._setting("innodb_lock_wait_timeout=0, lock_wait_timeout=1")
        # Another transaction may have locked the gap in which the row is made. A
        # shorter limit of the session's own would turn that wait into an error.
        self._briefly = self._setting(
            "innodb_lock_wait_timeout=1, lock_wait_timeout=1, max_statement_time=0"
        )

    def insert_unless_there(self, into: str) -> str:
        return f"{self._briefly}INSERT INTO {into}"

    def _setting(self, assignment: str) -> str:
        """Return what sets a variable for the one statement that follows."""
        # A node of a cluster repeats a statement that lost a conflict, with the
        # variable set already, and would leave the session with that value.
        repeats = "wsrep_retry_autocommit=0, " if self.certifies else ""
        return f"SET STATEMENT {repeats}{assignment} FOR "

    def all_or_none(self, change: str, which: str, n: int) -> str:
        return f"{self.at_once}UPDATE {self.by_key} SET {change} WHERE {which}"

    def limited(self, sql: str, seconds: float) -> str:
        return f"{self._setting(f'max_statement_time={seconds:.6f}')}{sql}"

    making_rows = Dialect.making_rows


class SnapshotMariaDB(MariaDB):
    """MariaDB with ``innodb_snapshot_isolation``, which 11.6 switches on.

    At REPEATABLE READ a locking read then fails where the row changed after the
    snapshot, as a renewal changes it. The guard reads what is committed now.
    """

    def __init__(self, *, in_cluster: bool = False) -> None:
        super().__init__(in_cluster=in_cluster)
        self.pin_prefix = self._setting("innodb_snapshot_isolation=OFF")
