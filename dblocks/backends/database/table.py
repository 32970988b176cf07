"""The lock table: the verbs of one row.

The row is the truth: a key is free when ``expires_at`` is in the database's past. A
grant raises ``version``, the fencing token, and nothing lowers it. Every write is one
conditional statement of :mod:`.statements`, on the connection that the caller gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ... import clock
from ...permits import apart
from ..values import FOREVER, Grant, Granted, Reading, Renewal, Renewed, Request
from . import batches, dialects, statements, transactions
from .execution import Values, changes, execute, fetch, inserted, new_version, write
from .fields import as_utc

ENOUGH = 0.95
"""The part of a lease's remaining time for which its row must last. The rest, at most
half of the lease's margin, allows for small delays and differences of clocks."""

WITHOUT_SNAPSHOT = {None, "read committed", "read uncommitted"}
"""The isolation levels at which each statement sees what is committed."""

LOOKS = 3
"""How often a grant whose reply was lost is looked for: a single look may be late."""

INSTANT = 0.01
"""Seconds for which a co-owner's own statement may have the row locked."""


def take(connection: Connection, request: Request) -> Granted | Reading:
    """Grant a free key, or count one more hold of the explicit owner that has it.

    An overdue reading means that a transaction has the row locked, or that others queue
    for it.
    """
    for _attempt in range(3):
        granted = grant(connection, request, request.key)
        if granted is None:
            seen = read(connection, request.key)
            if seen is not None:
                return join(connection, request, seen)
            try:
                granted = create(connection, request, request.key)
            except GapLocked:
                break
        if granted is not None:
            return Granted(granted, request.max_hold)
        ensure_floor(connection)
    # The row can't be made now, or it exists and the caller's snapshot can't see it.
    return Reading(version=0, remaining=1.0)


def grant(connection: Connection, request: Request, key: str) -> Grant | None:
    """Grant a free row: that of the request's key, or of one of its permits."""
    sql, values = granting(connection, request, "grant")
    values["key"] = key
    try:
        version = new_version(connection, sql, values)
    except DatabaseError as error:
        if not _is_taken(connection, error):
            raise
        return None
    return None if version is None else Grant(key, request.owner, version)


def _is_taken(connection: Connection, error: DatabaseError) -> bool:
    """Tell whether a statement only met a locked row, and the transaction goes on."""
    is_taken = dialects.known(connection).means_taken(error)
    return is_taken and not transactions.was_ended(connection, error)


def create(connection: Connection, request: Request, key: str) -> Grant | None:
    """Insert a row that is granted; ``None`` if it exists already.

    Raises:
        GapLocked: It can't be inserted now.
    """
    cools, ends = bool(request.hold_at_least), request.max_hold < FOREVER
    sql = statements.on(connection).create(cools, ends)
    values = {"key": key, **_terms(request)}
    version = _made(connection, new_version, sql, values)
    return None if version is None else Grant(key, request.owner, version)


class GapLocked(Exception):
    """A transaction has locked the gap into which a key's row would be inserted."""


def _made(
    connection: Connection, insert: Callable[..., Any], sql: str, values: Values
) -> Any:
    try:
        with dialects.of(connection).making_rows(connection):
            return inserted(connection, insert, sql, values)
    except DatabaseError as error:
        if _is_taken(connection, error):
            raise GapLocked(str(error)) from error
        raise


def granting(
    connection: Connection, request: Request, name: str, *size: int
) -> tuple[str, Values]:
    """Return a statement that grants to a caller that needn't yield, and its values."""
    dialect = dialects.of(connection)
    queued = request.queued or not dialect.has_session_locks
    values = _terms(request)
    if not queued:
        # Those who wait for a permit queue for the lock's own key.
        values["gate"] = dialect.session_lock_name(connection, apart(request.key)[0])
    make = getattr(statements.of(dialect), name)
    how = bool(request.hold_at_least), request.max_hold < FOREVER
    return make(*size, queued, *how), values


def _terms(request: Request) -> Values:
    return {
        "owner": request.owner,
        "lease": min(request.lease, request.max_hold),
        "holder": request.holder,
        "note": request.note,
        "hold_at_least": request.hold_at_least,
        "max_hold": request.max_hold,
    }


def numbered(keys: Sequence[str]) -> Values:
    return {f"key{number}": key for number, key in enumerate(keys)}


def join(connection: Connection, request: Request, seen: Reading) -> Granted | Reading:
    """Count one more hold of the request's explicit owner, if it has the key."""
    if seen.owner != request.owner or seen.remaining <= 0:
        return seen
    grant = Grant(request.key, request.owner, seen.version)
    if not request.explicit:
        # This request was granted and its reply lost, if the row lasts for its lease;
        # otherwise the row is of an earlier request of the owner's.
        for _look in range(LOOKS):
            age = clock.monotonic() - request.sent
            seen = read(connection, request.key) or Reading()
            if seen.is_of(grant) and _lasts(seen, request.lease, age):
                return Granted(grant, min(request.max_hold, seen.limit + age))
        return seen
    forfeited = request.forfeits(grant)
    values = {"lease": request.lease, "count": None, "forfeited": forfeited}
    try:
        for pause in (0.0, INSTANT):
            time.sleep(pause)
            if _reentered(connection, grant, values):
                return Granted(grant, seen.limit, again=True)
    except DatabaseError as error:
        if dialects.known(connection).is_undone(error):
            request.returns(grant, forfeited)
        raise
    request.returns(grant, forfeited)
    return read(connection, request.key) or Reading()


def reenter(connection: Connection, renewal: Renewal, count: int | None) -> Renewed:
    """Count one more hold of a grant, unless a transaction has its row locked."""
    grant = renewal.grant
    values = {"lease": renewal.lease, "count": count, "forfeited": 0}
    if _reentered(connection, grant, values):
        return Renewed({grant})
    reason = (read(connection, grant.key) or Reading()).reason_for(grant)
    return Renewed(lost={grant: reason} if reason else {})


def _reentered(connection: Connection, grant: Grant, values: Values) -> bool:
    try:
        return write(connection, "reenter", grant, **values)
    except DatabaseError as error:
        if _is_taken(connection, error):
            return False
        raise


def read(connection: Connection, key: str) -> Reading | None:
    """Read a row without locking it; ``None`` when the key has none."""
    return read_all(connection, [key]).get(key)


def read_all(connection: Connection, keys: Sequence[str]) -> dict[str, Reading]:
    """Read several rows; omit those that don't exist."""
    seen: dict[str, Reading] = {}
    for batch in batches.divided(keys, batches.READ):
        slots = batches.filled_up(batch, batches.READ)
        text = statements.on(connection).read_all(len(slots))
        for key, *row in fetch(connection, text, numbered(slots)):
            seen[key] = _reading(row)
    return seen


def _reading(row: Sequence[Any]) -> Reading:
    owner, holder, note, version, acquired_at, remaining, limit = row
    since, limit = as_utc(acquired_at), FOREVER if limit is None else float(limit)
    return Reading(owner, holder, note, version, since, float(remaining), limit)


def is_locked(connection: Connection, key: str) -> bool:
    """Tell whether another transaction has a row locked; not on SQLite."""
    return not fetch(connection, statements.on(connection).lockable, {"key": key})


def release(connection: Connection, grant: Grant, count: int | None = None) -> bool:
    """Release one hold, or all but ``count``; tell whether the grant was current."""
    # The shorter statement, if the caller knows that this is the last hold.
    name = "free" if count == 0 else "release"
    return write(connection, name, grant, count=count)


def release_again(
    connection: Connection, grant: Grant, count: int | None, deadline: float
) -> bool:
    """:func:`release`, after an attempt that may have been carried out."""
    if count is None:
        # Subtracting twice would free a lock that a co-owner holds.
        raise DatabaseError(
            f"The answer to the release of {apart(grant.key)[0]!r} was lost; whether "
            f"its holds were counted down is not known."
        )
    if release(connection, grant, count):
        return True
    seen = read(connection, grant.key)
    if count or seen is None or seen.is_forced_from(grant):
        return False
    # Before the deadline the grant can't have run out: the release whose reply was lost
    # must have ended it.
    freed = (seen.owner, seen.version) == ("", grant.version)
    return freed or clock.monotonic() < deadline


def force_release(connection: Connection, grant: Grant) -> bool:
    """End a grant without its holder's consent; tell whether it was current.

    A grant with an empty owner is cooling, and is ended too.
    """
    return write(connection, "force_release", grant)


def request_release(connection: Connection, grant: Grant) -> bool:
    """Note that the holder is asked to finish; tell whether the grant was held."""
    return write(connection, "request", grant)


def pin(connection: Connection, grants: Sequence[Grant]) -> list[Grant]:
    """Verify grants in the current transaction, and keep others off until its end.

    Returns the grants that are not current.
    """
    more = beyond(connection, [grant.key for grant in grants])
    asked = [*grants, *[grants[0]._replace(key=key) for key in more]]
    sql = statements.on(connection).pin(len(asked))
    pinned = set(fetch(connection, sql, all_slots(asked)))
    missing = [grant for grant in grants if (grant.key, grant.version) not in pinned]
    if not missing and dialects.of(connection).certifies:
        touch_current(connection, grants)
    return missing


def beyond(connection: Connection, keys: Sequence[str]) -> list[str]:
    """Return keys to ask for as well, so that only rows that match stay locked.

    In a search for several keys InnoDB unlocks a row that turns out not to match; with
    "key = …" it doesn't. With snapshots it unlocks neither, nor the gap behind the row.
    """
    dialect = dialects.of(connection)
    if not dialect.keeps_row_locks:
        return []
    unlocks = dialect.session_isolation(connection) in WITHOUT_SNAPSHOT
    return [f"{keys[0]}\0"] if unlocks else []


def touch_current(connection: Connection, grants: Sequence[Grant]) -> bool:
    """Write the rows of grants with next to no change; tell whether all are current."""
    sql = statements.on(connection).touch_current(len(grants))
    return execute(connection, sql, all_slots(grants))[0] == len(grants)


def touch(connection: Connection, keys: Sequence[str]) -> None:
    """Write rows without changing them."""
    execute(connection, statements.on(connection).touch(len(keys)), numbered(keys))


def renew(
    connection: Connection,
    renewals: Iterable[Renewal],
    *,
    wait: bool = False,
    overdue: bool = False,
) -> Renewed:
    """Extend grants, a few hundred of one length in a statement; say which are lost.

    Rows that a transaction has locked are skipped, except with ``wait``: one pinned row
    must not make all leases of a process lapse. Overdue leases are extended only if the
    caller says so, knowing that nobody else can see the row.
    """
    alike: dict[float, list[Grant]] = {}
    for grant, lease in renewals:
        alike.setdefault(lease, []).append(grant)
    outcome = Renewed()
    for lease, grants in alike.items():
        for batch in batches.divided(grants, batches.RENEWED):
            _renew_batch(connection, outcome, batch, lease, wait, overdue)
    rest = [g for each in alike.values() for g in each if g not in outcome.extended]
    seen = read_all(connection, [grant.key for grant in rest])
    for grant in rest:
        reason = seen.get(grant.key, Reading()).reason_for(grant)
        if reason is not None:
            outcome.lost[grant] = reason
    return outcome


def all_slots(grants: Sequence[Grant]) -> Values:
    return {
        f"{name}{number}": value
        for number, grant in enumerate(grants)
        for name, value in zip(grant._fields, grant, strict=True)
    }


def _renew_batch(
    connection: Connection,
    outcome: Renewed,
    grants: Sequence[Grant],
    lease: float,
    *how: bool,
) -> None:
    slots = batches.filled_up(grants, batches.RENEWED)
    values = {"lease": lease, **all_slots(slots)}
    dialect = dialects.of(connection)
    sql = statements.of(dialect).renew(len(slots), *how)
    if dialect.returns_rows:
        rows = fetch(connection, sql, values)
        asked = [row for row in rows if row[2] is not None]
        outcome.extended |= _those_in(rows, grants)
    else:
        extended, told = _extended(connection, sql, values, grants, lease)
        outcome.extended |= extended
        requested = statements.of(dialect).requested(len(slots))
        # At least one holder is asked; or the reply is an earlier renewal's here.
        asked = fetch(connection, requested, values) if told == dialect.asked else []
    outcome.requested |= _those_in(asked, grants)


def _those_in(rows: Sequence[tuple[Any, ...]], grants: Sequence[Grant]) -> set[Grant]:
    # By version too: the same key may be the successor's row, in the same batch.
    versions = {(key, version) for key, version, *_ in rows}
    return {grant for grant in grants if (grant.key, grant.version) in versions}


def _extended(
    connection: Connection,
    sql: str,
    values: Values,
    grants: Sequence[Grant],
    lease: float,
) -> tuple[set[Grant], int | None]:
    """Extend grants without ``RETURNING``; return them, and what the reply tells."""
    sent = clock.monotonic()
    changed, told = execute(connection, sql, values)
    if changed == len(grants):
        return set(grants), told
    if len(grants) == 1:
        return set(), told
    # The count doesn't say which rows are gone or locked, and hundreds may be released
    # at the same time. A row that lasts a lease from when this was sent is extended.
    age = clock.monotonic() - sent
    seen = read_all(connection, [grant.key for grant in grants])
    return {
        grant
        for grant in grants
        if (it := seen.get(grant.key)) is not None
        and it.is_of(grant)
        and _lasts(it, lease, age)
    }, told


def _lasts(seen: Reading, lease: float, age: float) -> bool:
    """Tell whether a row lasts for a lease that was requested ``age`` seconds ago."""
    return seen.remaining >= ENOUGH * min(lease - age, seen.limit)


def ensure_floor(connection: Connection) -> None:
    """Insert the floor's row if a flush of the database removed it."""
    inserted(connection, changes, statements.on(connection).create_floor, {})


def ensure_rows(connection: Connection, keys: Sequence[str]) -> dict[str, Reading]:
    """Read several keys, and insert free rows for those that have none.

    Raises:
        GapLocked: One of them can't be inserted now.
    """
    while True:
        seen = read_all(connection, keys)
        missing = [key for key in keys if key not in seen]
        if not missing:
            return seen
        make_rows(connection, missing)


def make_rows(connection: Connection, keys: Sequence[str]) -> None:
    """Insert free rows; in one statement, unless that could make inserts deadlock.

    Raises:
        GapLocked: One of them can't be inserted now.
    """
    # In InnoDB an insert that finds its row there locks it, and perhaps the gap.
    together = dialects.of(connection).returns_rows
    for group in [keys] if together else [[key] for key in keys]:
        create = statements.on(connection).create_free(len(group))
        if not _made(connection, changes, create, numbered(group)):
            ensure_floor(connection)


def make_older(connection: Connection, seconds: float) -> None:
    """Move all times into the past, as if that much time had passed; for tests."""
    execute(connection, statements.on(connection).make_older, {"ago": -seconds})
