"""What a dialect has to define; the defaults are those of most databases."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from django.core.checks import CheckMessage
from django.db import DatabaseError, Error
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ...messages import warning

Shape = Callable[..., str]
"""Makes a part of a statement from its parts."""

TABLE = "dblocks_distributedlock"
FLOOR = "dblocks_tokenfloor"


def gevent_waits() -> bool:
    """Tell whether gevent has put its own waits in the place of the sockets'."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("socket"))


class Dialect:
    """What is true of most databases."""

    name: str
    #: Rows can be locked one by one; without, the database has one writer, and pruning
    #: can't pass over the rows that are at work.
    has_row_locks = True
    #: ``UPDATE … RETURNING`` exists; without, the reply to a statement is kept on the
    #: connection, where code that runs in between replaces it.
    returns_rows = True
    #: Django is faster with values by name than by position.
    fills_by_name = False
    #: The server has locks that last as long as a session and are handed on in order.
    has_session_locks = True
    #: The shortest wait for a session lock, in seconds, that the server can count.
    shortest_queueing = 0.0
    #: Seconds for which a request is repeated if the database asks for that, also
    #: where the caller's wait is shorter.
    patience = 1.0
    #: Pruning rests that many times as long as each of its batches took.
    prune_rests = 1
    #: Moments have a time zone.
    has_zones = False
    #: A unique index on key and version lets the guard hold off take-overs, but let
    #: renewals through.
    has_guard_index = False
    #: Driver options, with limits, by which renewals give up a silent server.
    short_waits: Mapping[str, int] = {}
    #: Driver options that a system check wants to be set.
    network_timeouts: tuple[str, ...] = ()
    #: A collation under which text is equal only when its code points are.
    exact_collation: str | None = None
    #: One that knows upper and lower case, where the exact one doesn't.
    letters_collation: str | None = None
    #: A transaction's snapshot can hide a row as it is now from a locking read.
    snapshots_hide_rows = False
    #: The server is a node of a cluster that compares what its nodes have written when
    #: a transaction commits, and tells no node of another one's row locks.
    certifies = False
    #: Rows stay locked even if they turned out not to match, or if the savepoint in
    #: which they were locked is rolled back.
    keeps_row_locks = False
    #: Lets the session stand idle in a transaction for as long as others need it.
    may_idle = ""

    # Clocks

    now: str
    #: Takes a moment and seconds: the moment that many seconds later.
    after: Shape
    #: Seconds from the database's now to a moment; negative when past.
    seconds_until: Shape
    #: A moment to be selected, without a time zone.
    utc: Shape = "{}".format

    # Statements

    table = f'"{TABLE}"'
    key = '"key"'
    #: The table, where rows of given keys are asked for or written.
    by_key = table
    greatest = "GREATEST"
    #: Precedes an update that must not wait for a row.
    at_once = ""
    #: Makes the reply to a renewal ``asked`` if a holder of its rows is to finish.
    tells_requests = ""
    asked = 0
    insert_unless_there: Shape = "INSERT INTO {} ON CONFLICT DO NOTHING".format
    share = "FOR SHARE"
    strength = "FOR UPDATE"
    pin_prefix = ""
    #: A list of rows of values, as it stands after ``IN``.
    rows: Shape = "{}".format
    integer: Shape = "%({})s".format
    seconds: Shape = "%({})s".format
    #: A new version that the reply carries back.
    next_version: Shape = "{}".format
    #: Narrows a condition to rows that no transaction has locked.
    unlocked: Shape = "{}".format
    #: The same, but a guard may have pinned the row: for a change that keeps the
    #: version.
    unlocked_or_pinned: Shape | None = None
    #: Changes one row that no transaction has locked, if possible the ``first``.
    update_any: Shape = (
        f"UPDATE {table} SET {{}} WHERE {key} = (SELECT {key} FROM {table} WHERE {{}} "
        f"ORDER BY CASE {key} WHEN %(first)s THEN 0 ELSE 1 END LIMIT 1)"
    ).format
    #: One hold of a permit. Where rows can't be returned, it makes the reply carry the
    #: version of the permit's row as it was before, and the permit's number.
    first_hold = "1"
    #: One hold of each of several keys. Where rows can't be returned, it makes the
    #: reply carry the moment of the grant, as :attr:`microseconds` of it.
    timed_hold = "1"
    microseconds: Shape = "{}".format
    #: Of three conditions: the key is free; it has been free for long; and, needed only
    #: without the second, nobody has the session lock of that name, so nobody queues.
    yields: Shape = "{}".format
    #: The name of the session lock of a row's key, as :meth:`session_lock_name` makes
    #: it; ``%(database)s`` is the database's.
    gate_of_key = ""
    #: Changes at most ``n`` rows, and passes over locked ones.
    update_unlocked: Shape = f"UPDATE {table} SET {{}} WHERE {{}}".format
    #: Changes exactly ``n`` rows or none; without ``RETURNING``, perhaps fewer.
    all_or_none: Shape
    #: Deletes the rows of ``n`` keys.
    delete: Shape = f"DELETE FROM {table} WHERE {{}}".format

    #: What a grant returns besides its version, for :meth:`note_session`.
    session: tuple[str, ...] = ()

    def note_session(self, connection: Connection, session: Any) -> None:
        """Learn which session of the server a statement ran in."""

    def cursor(self, connection: Connection) -> Any:
        """Return a cursor for what runs again and again."""
        return connection.cursor()

    # Errors, and the codes that tell them

    #: The database's own code of an error.
    code: Callable[[BaseException], object]
    transient: frozenset[object] = frozenset()
    #: Of these, the codes of collisions, which come without a wait.
    collisions: frozenset[object] = frozenset()
    stale_snapshot: object
    wait_over: frozenset[object] = frozenset()
    taken: frozenset[object] = frozenset()

    def is_transient(self, error: BaseException) -> bool:
        """Tell whether the database asks for the statement to be repeated."""
        return self.code(error) in self.transient

    def is_collision(self, error: BaseException) -> bool:
        """Tell whether a statement was given up at once in favour of another's."""
        return self.code(error) in self.collisions

    def is_stale_snapshot(self, error: BaseException) -> bool:
        """Tell whether the row changed after the transaction's snapshot."""
        return self.code(error) == self.stale_snapshot

    def has_ended_transaction(
        self, connection: Connection, error: BaseException
    ) -> bool:
        """Tell whether an error in a transaction has rolled back all of it."""
        return False

    def is_lost(self, error: BaseException) -> bool:
        """Tell whether the error means that the connection is gone."""
        return False

    def is_unsent(self, error: BaseException) -> bool:
        """Tell whether the connection was gone before the statement was run."""
        return False

    def is_undone(self, error: BaseException) -> bool:
        """Tell whether a statement with this error has certainly changed nothing."""
        # An interrupt's arguments may look like a code.
        failed = isinstance(error, DatabaseError)
        return failed and self.is_transient(error) and not self.is_lost(error)

    def is_wait_over(self, error: BaseException) -> bool:
        """Tell whether a bounded wait for a row's lock ran out."""
        return self.code(error) in self.wait_over

    def is_cut_off(self, error: BaseException) -> bool:
        """Tell whether a statement took longer than it may, or was cancelled."""
        return False

    def is_busy(self, error: BaseException) -> bool:
        """Tell whether SQLite's one writer is, or was, somebody else."""
        return not self.has_row_locks and self.is_transient(error)

    def means_taken(self, error: BaseException) -> bool:
        """Tell whether a statement that must not wait for long met a locked row."""
        return self.code(error) in self.taken

    # Sessions

    def sits_out(self, connection: Connection) -> float:
        """Return the seconds for which a statement waits for others by itself."""
        return 1.0

    def keeps_readers_out(self, connection: Connection) -> bool:
        """Tell whether others can't even read while a transaction is open."""
        return False

    def close(self, connection: Connection) -> None:
        """Close a connection for good."""
        connection.close()

    def harms_after_fork(self, connection: Connection) -> bool:
        """Tell whether a forked child must close an inherited connection, and may."""
        return False

    def limit(
        self, connection: Connection, patience: float | None, waited: float
    ) -> AbstractContextManager[object] | None:
        """Return what bounds how long a statement waits for the one writer, if need be.

        ``patience`` and ``waited``: for how many seconds it may be repeated, and has
        been.
        """
        return None

    def pause(self, attempt: int) -> float:
        """Return the seconds to pause after that many attempts."""
        return random.uniform(0.005, 0.03)

    def isolation(self, connection: Connection) -> str | None:
        """The configured isolation level of transactions, if it isn't the lowest."""
        return None

    def session_isolation(self, connection: Connection) -> str | None:
        """The isolation level of the session's transactions."""
        return None

    def bounded(
        self, connection: Connection, limit: float | None
    ) -> AbstractContextManager[None]:
        """Bound how long a statement waits, in fractions of a second."""
        return nullcontext()

    def making_rows(self, connection: Connection) -> AbstractContextManager[object]:
        """Bound how long an insert waits for a transaction that has locked a gap."""
        return nullcontext()

    def database(self, connection: Connection) -> str:
        """The database's name, which is a part of a session lock's."""
        return str(connection.settings_dict["NAME"])

    #: The name of a key's session lock.
    session_lock_name: Callable[[Connection, str], str | int]

    def has_relied_on_sessions(self, connection: Connection) -> bool:
        """Tell whether session locks exclude others on this server."""
        return True

    def ask_session(
        self, connection: Connection, sql: str, params: Sequence[str | int] = ()
    ) -> Any:
        """Return the first value of a statement that is about its own session."""
        return ask(connection, sql, params)[0]

    def waits_for_all(self, connection: Connection) -> bool:
        """Tell whether a wait for the server stops all greenlets of the process."""
        return False

    #: Waits that many seconds for a session lock of that name; tells if it was had.
    take_session_lock: Callable[[Connection, str | int, float], bool]
    #: Tries to take a session lock of that name, without waiting, and frees it.
    try_session_lock: str
    free_session_lock: str
    #: Frees all of the session's: a wait that timed out may have been granted as well.
    free_session_locks: str
    #: The waiters for session locks: each lock's name, and how many wait for it.
    queues: str
    #: Returns those of some names whose session locks somebody has.
    taken_session_locks: Callable[[Connection, Sequence[str | int]], set[str | int]]
    #: Tries a native lock that needs no table; it ends with the connection.
    try_migration_lock: Callable[[Connection], bool]

    # Checks

    def findings(self, connection: Connection) -> Iterator[CheckMessage]:
        """Yield what is wrong with the server or the table."""
        return iter(())

    def ask_of_key(self, connection: Any, sql: str) -> Any:
        """Return what the server's catalog has of the lock table's column ``key``."""
        row = ask(connection, sql, [TABLE])
        if row is None:
            # A catalog may leave out what its reader has no right to.
            raise DatabaseError("its user may not read it, or it has no column 'key'")
        return row

    def check_collation(self, alias: str, collation: object) -> Iterator[CheckMessage]:
        if collation != self.exact_collation:
            yield warning(
                "W003",
                f"The key column in {alias!r} has the collation {collation!r}, under "
                f"which different keys may be one lock.",
                f"Change the column's collation to {self.exact_collation!r}.",
            )


@lru_cache(maxsize=1024)
def digest(prefix: str, key: str) -> bytes:
    return hashlib.sha256(f"{prefix}\0{key}".encode()).digest()


def send(cursor: Any, sql: str, params: Any, fetch: str | None = None) -> Any:
    """Run a statement on a cursor; return what that method of the cursor fetches.

    An error leaves without Django's frames. One of these refers to the error, which
    refers to the frame: until the garbage collector finds the two, all callers' frames
    would live on, and with them leases that nobody else refers to.
    """
    try:
        cursor.execute(sql, params)
        return None if fetch is None else getattr(cursor, fetch)()
    except Error as error:
        raise error.with_traceback(None)  # noqa: B904


def ask(connection: Connection, sql: str, params: Any = None) -> Any:
    """Return the first row that a statement returns."""
    with connection.cursor() as cursor:
        return send(cursor, sql, params, "fetchone")
