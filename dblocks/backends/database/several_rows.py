"""Several keys at once: granted all or none, released in one statement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db import DatabaseError
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ..values import Grant, Granted, Request
from . import dialects, statements, table
from .connections import ReplyLost
from .execution import Values, execute, fetch, new_versions


def take(
    connection: Connection, request: Request, keys: Sequence[str]
) -> list[Granted] | None:
    """Grant several keys that are free, all or none of them.

    Where one statement does that, missing rows are made, free, and the grant is tried
    again, unless one of the keys is taken. The rows stay even if that is refused.

    Args:
        request: For whom, and how; its own key doesn't matter.
    """
    granted = _take(connection, request, keys)
    if granted is not None or not dialects.of(connection).returns_rows:
        return granted
    seen = table.read_all(connection, keys)
    missing = [key for key in keys if key not in seen]
    if not missing or any(it.remaining > 0 for it in seen.values()):
        return None
    table.make_rows(connection, missing)
    return _take(connection, request, keys)


def _take(
    connection: Connection, request: Request, keys: Sequence[str]
) -> list[Granted] | None:
    dialect = dialects.of(connection)
    sql, values = table.granting(connection, request, "grant_all", len(keys))
    values |= table.numbered(keys)
    values["database"] = dialect.database(connection)
    try:
        if dialect.returns_rows:
            granted = new_versions(connection, sql, values)
        else:
            granted = _new_versions(connection, sql, values, len(keys), request)
    except DatabaseError as error:
        if not dialect.means_taken(error):
            raise
        return None
    return _complete(connection, request, keys, granted)


def _new_versions(
    connection: Connection, sql: str, values: Values, size: int, request: Request
) -> dict[str, int]:
    """:func:`new_versions` without ``RETURNING``."""
    changed, moment = execute(connection, sql, values)
    if not changed:
        return {}
    # An explicit owner may have had some of the keys before; any other has what the
    # statement granted, also if it was repeated.
    versions = statements.on(connection).versions(size, at_once=request.explicit)
    granted = dict(fetch(connection, versions, {**values, "moment": moment}))
    # Unless somebody who presents the owner got one in the same microsecond. Then whose
    # is which isn't known, and the holds count until the lease lapses.
    is_known = not request.explicit or len(granted) <= changed
    return granted if is_known else {}


def take_again(
    connection: Connection, request: Request, keys: Sequence[str]
) -> list[Granted] | None:
    """:func:`take`, after an attempt that may have been carried out."""
    if request.explicit:
        return None
    values = {"owner": request.owner, **table.numbered(keys)}
    versions = statements.on(connection).versions(len(keys))
    granted = dict(fetch(connection, versions, values))
    return _complete(connection, request, keys, granted)


def _complete(
    connection: Connection, request: Request, keys: Sequence[str], granted: Any
) -> list[Granted] | None:
    """Return the grants, or undo them if some are missing."""
    # Only these: undoing the others might wait for a row that a transaction has locked.
    grants = [Grant(key, request.owner, granted[key]) for key in keys if key in granted]
    if len(grants) == len(keys):
        return [Granted(grant, request.max_hold) for grant in grants]
    undo_holds(connection, request, grants)
    return None


def undo_holds(
    connection: Connection, request: Request, grants: Sequence[Grant]
) -> None:
    """Release the hold of each grant that a request has got, and that nobody uses.

    Others may present the same explicit owner and share the grant. If it asks again
    after a failure, the holds are subtracted.
    """
    try:
        undo(connection, grants, count=None)
    except DatabaseError as error:
        if dialects.known(connection).is_undone(error):
            for grant in grants:
                request.returns(grant, 1)
        raise


def undo(
    connection: Connection, grants: Sequence[Grant], count: int | None = 0
) -> None:
    """End grants that nobody uses, or with ``None`` release one hold; none cools.

    Later grants of the same owner stay, because a repeated undo may come late.
    """
    if grants:
        sql = statements.on(connection).undo(len(grants))
        execute(connection, sql, {"count": count, **table.all_slots(grants)})


def release(
    connection: Connection, grants: Sequence[Grant], count: int | None = None
) -> set[Grant]:
    """:func:`.table.release` for several grants; return those that were current."""
    sql = statements.on(connection).release_all(len(grants), count == 0)
    values = {"count": count, **table.all_slots(grants)}
    if dialects.of(connection).returns_rows:
        released = set(fetch(connection, sql, values, again=True))
        return {grant for grant in grants if (grant.key, grant.version) in released}
    changed, _ = execute(connection, sql, values)
    if changed == len(grants):
        return set(grants)
    try:
        seen = table.read_all(connection, [grant.key for grant in grants])
    except DatabaseError:
        # The release is done: repeated as it is, it could give back one hold more.
        raise ReplyLost("Which of the grants were current is not known.") from None
    return {
        grant
        for grant in grants
        if grant.key in seen
        and seen[grant.key].version == grant.version
        and seen[grant.key].owner in {"", grant.owner}
    }


def release_again(
    connection: Connection,
    grants: Sequence[Grant],
    count: int | None,
    deadline: float,
) -> set[Grant]:
    """:func:`release`, after an attempt that may have been carried out."""
    return {g for g in grants if table.release_again(connection, g, count, deadline)}
