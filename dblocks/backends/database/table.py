"""The lock table: the one module that writes it.

The row is the truth: a key is free when ``expires_at`` is in the database's past. A
grant raises ``version``, the fencing token, and nothing lowers it. Every write is one
conditional statement of :mod:`.statements`, on the connection that the caller gives.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any

from django.apps import apps
from django.db import DatabaseError, transaction
from django.db.backends.base.base import BaseDatabaseWrapper as Connection
from django.db.models import F, Value
from django.db.models.functions import Greatest

from ... import clock
from ..values import FOREVER, Grant, Granted, Reading, Renewal, Renewed, Request
from . import dialects, statements
from .execution import Values, changes, execute, fetch, inserted, new_version, write
from .fields import as_utc

_BATCH_SIZES = 1, 16, 250
"""How many leases one statement renews; fewer fill up the next larger size."""


def _texts(connection: Connection) -> statements.Statements:
    return statements.of(dialects.of(connection))


@cache
def _model(name: str) -> Any:
    # The table is below the models, which can be imported once the apps are loaded.
    return apps.get_model("dblocks", name)


def _acquire(connection: Connection, request: Request) -> Grant | Reading:
    """Grant a key to an owner, or read who has it.

    A reading that is overdue means that a transaction has the row locked, or that
    others queue for it.
    """
    dialect = dialects.of(connection)
    text = statements.of(dialect)
    cools, ends = bool(request.hold_at_least), request.max_hold < FOREVER
    queued = request.queued or not dialect.has_session_locks
    values: dict[str, object] = {
        "key": request.key,
        "owner": request.owner,
        "lease": min(request.lease, request.max_hold),
        "holder": request.holder,
        "note": request.note,
        "hold_at_least": request.hold_at_least,
        "max_hold": request.max_hold,
    }
    if not queued:
        values["gate"] = dialect.session_lock_name(connection, request.key)
    for _attempt in range(3):
        version = None
        try:
            version = new_version(connection, text.grant(queued, cools, ends), values)
        except DatabaseError as error:
            if not dialect.means_taken(error):
                raise
        if version is None:
            seen = read(connection, request.key)
            if seen is not None:
                return seen
            create = text.create(cools, ends)
            version = inserted(connection, new_version, create, values)
        if version is not None:
            return Grant(request.key, request.owner, version)
        ensure_floor(connection)
    # The row is there and the snapshot of the caller's transaction can't see it.
    return Reading(version=0, remaining=1.0)


def take(connection: Connection, request: Request) -> Granted | Reading:
    """Grant a free key, or count one more hold of the explicit owner that has it."""
    seen = _acquire(connection, request)
    if isinstance(seen, Grant):
        return Granted(seen, request.max_hold)
    if seen.owner != request.owner or seen.remaining <= 0:
        return seen
    grant = Grant(request.key, request.owner, seen.version)
    if not request.explicit:
        # Granted before, and the reply was lost.
        return Granted(grant, seen.limit)
    forfeited = request.forfeits(grant)
    values = {"lease": request.lease, "count": None, "forfeited": forfeited}
    if _reentered(connection, grant, values):
        return Granted(grant, seen.limit, again=True)
    return read(connection, request.key) or Reading()


def reenter(connection: Connection, renewal: Renewal, count: int | None) -> Renewed:
    """Count one more hold of a grant; not where a transaction has its row locked."""
    grant, lease = renewal
    values = {"lease": lease, "count": count, "forfeited": 0}
    if _reentered(connection, grant, values):
        return Renewed({grant})
    reason = (read(connection, grant.key) or Reading()).reason_for(grant)
    return Renewed(lost={grant: reason} if reason else {})


def _reentered(connection: Connection, grant: Grant, values: Values) -> bool:
    try:
        return write(connection, "reenter", grant, **values)
    except DatabaseError as error:
        if dialects.of(connection).means_taken(error):
            return False
        raise


def read(connection: Connection, key: str) -> Reading | None:
    """Read a row without locking it; ``None`` when the key has none."""
    rows = fetch(connection, _texts(connection).read, {"key": key})
    return _reading(rows[0]) if rows else None


def _reading(row: Sequence[Any]) -> Reading:
    owner, holder, note, version, acquired_at, remaining, limit = row
    since, limit = as_utc(acquired_at), FOREVER if limit is None else float(limit)
    return Reading(owner, holder, note, version, since, float(remaining), limit)


def release(connection: Connection, grant: Grant, count: int | None = None) -> bool:
    """Give back one hold, or all but ``count``; whether the grant was current."""
    # The shorter one, where the last hold is given back by who knows it to be that.
    name = "free" if count == 0 else "release"
    return write(connection, name, grant, count=count)


def release_again(
    connection: Connection, grant: Grant, count: int | None, deadline: float
) -> bool:
    """The same after an attempt that may have been carried out."""
    if count is None:
        # Counting down twice would free the lock under a co-owner.
        raise DatabaseError(
            f"The answer to the release of {grant.key!r} was lost; whether its "
            f"holds were counted down is not known."
        )
    if release(connection, grant, count):
        return True
    seen = read(connection, grant.key)
    if count or seen is None or seen.is_forced_from(grant):
        return False
    # Before the deadline the grant can't have run out: what ended it is the release
    # whose reply was lost.
    freed = (seen.owner, seen.version) == ("", grant.version)
    return freed or clock.monotonic() < deadline


def force_release(connection: Connection, key: str, version: int) -> bool:
    """End a grant over its holder's head; whether it was current."""
    return write(connection, "force_release", Grant(key, "", version))


def pin(connection: Connection, grant: Grant) -> bool:
    """Verify a grant in the current transaction and keep others off until its end."""
    return bool(fetch(connection, _texts(connection).pin, grant._asdict()))


def touch(connection: Connection, key: str) -> bool:
    """Write a row without changing it; whether there is one."""
    return write(connection, "touch", Grant(key, "", None))


def renew(
    connection: Connection,
    renewals: Iterable[Renewal],
    *,
    wait: bool = False,
    overdue: bool = False,
) -> Renewed:
    """Extend grants, a few hundred alike in one statement; say which are lost.

    Rows that a transaction has locked are passed over, unless told to ``wait``: one
    pinned row must not make all leases of a process lapse. Overdue ones are only
    extended if told so, by who knows that nobody else can see the row.
    """
    alike: dict[float, list[Grant]] = {}
    for grant, lease in renewals:
        alike.setdefault(lease, []).append(grant)
    outcome = Renewed()
    for lease, grants in alike.items():
        for batch in _batches(grants):
            outcome.extended |= _renew_batch(connection, batch, lease, wait, overdue)
    rest = [g for each in alike.values() for g in each if g not in outcome.extended]
    seen: dict[str, Reading] = {}
    for batch in _batches(rest):
        values = {f"key{n}": grant.key for n, grant in enumerate(_filled_up(batch))}
        text = _texts(connection).read_all(len(values))
        for key, *row in fetch(connection, text, values):
            seen[key] = _reading(row)
    for grant in rest:
        reason = seen.get(grant.key, Reading()).reason_for(grant)
        if reason is not None:
            outcome.lost[grant] = reason
    return outcome


def _batches(grants: list[Grant]) -> Iterator[list[Grant]]:
    for start in range(0, len(grants), _BATCH_SIZES[-1]):
        yield grants[start : start + _BATCH_SIZES[-1]]


def _filled_up(grants: list[Grant]) -> list[Grant]:
    """Repeat the last one in every slot that is left over."""
    size = next(size for size in _BATCH_SIZES if size >= len(grants))
    return grants + grants[-1:] * (size - len(grants))


def _renew_batch(
    connection: Connection, grants: list[Grant], lease: float, *how: bool
) -> set[Grant]:
    slots = _filled_up(grants)
    values: dict[str, object] = {"lease": lease}
    for number, grant in enumerate(slots):
        for name, value in grant._asdict().items():
            values[f"{name}{number}"] = value
    dialect = dialects.of(connection)
    sql = statements.of(dialect).renew(len(slots), *how)
    if dialect.returns_rows:
        # A key alone may be the row of the successor, which is renewed along.
        renewed = set(fetch(connection, sql, values))
        return {grant for grant in grants if (grant.key, grant.version) in renewed}
    changed, _ = execute(connection, sql, values)
    if changed == len(grants):
        return set(grants)
    if len(grants) == 1:
        return set()
    # The count doesn't say which are gone or locked.
    middle = len(grants) // 2
    halves = grants[:middle], grants[middle:]
    done = [_renew_batch(connection, half, lease, *how) for half in halves]
    return set().union(*done)


def ensure_floor(connection: Connection) -> None:
    """Make the floor's row if a flush of the database removed it."""
    inserted(connection, changes, _texts(connection).create_floor, {})


def ensure_row(connection: Connection, key: str) -> Reading:
    """Read a key, whose row is made, free, if there is none."""
    create = _texts(connection).create_free
    while (seen := read(connection, key)) is None:
        if not inserted(connection, changes, create, {"key": key}):
            ensure_floor(connection)
    return seen


def prune(using: str, stale: Any, keys: Sequence[str]) -> int:
    """Delete those of some rows that are still stale; how many.

    In a transaction of its own that locks only what it deletes, and is repeated if
    the database asks for it.
    """
    connection = transaction.get_connection(using)
    dialect = dialects.of(connection)
    floor = _model("TokenFloor").objects.using(using)
    give_up = time.monotonic() + 1.0
    ensure_floor(connection)
    while True:
        try:
            with transaction.atomic(using=using):
                # The floor first: an insert that waits for it reads the raised one.
                floor.select_for_update().get(pk=1)
                rows = stale.filter(key__in=keys).select_for_update(
                    skip_locked=dialect.has_row_locks
                )
                doomed = dict(rows.values_list("key", "version"))
                if doomed:
                    highest = Value(max(doomed.values()))
                    floor.filter(pk=1).update(value=Greatest(F("value"), highest))
                    locks = _model("DistributedLock")._base_manager.using(using)
                    locks.filter(key__in=doomed)._raw_delete(using)
            return len(doomed)
        except DatabaseError as error:
            over = connection.in_atomic_block or time.monotonic() >= give_up
            if over or not dialect.is_transient(error):
                raise
            time.sleep(random.uniform(0.005, 0.03))


def make_older(connection: Connection, seconds: float) -> None:
    """Move all moments into the past, as if that much time had gone by; for tests."""
    execute(connection, _texts(connection).make_older, {"ago": -seconds})
