"""The permits of a lock: grants one of several rows, whichever is free."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ...permits import MAX_PERMITS, row_key, row_keys
from ..values import Grant, Granted, Reading, Request, first_free
from . import dialects, several_rows, table
from .execution import execute, new_versions


def take(connection: Connection, request: Request) -> Granted | Reading:
    """Grant a free permit, or count one more hold of the explicit owner's own.

    A reading describes the permit that will be free first. If it is overdue, a
    transaction has its row locked, or others queue for the key.
    """
    if request.explicit:
        return take_again(connection, request)
    return _take(connection, request)


def take_again(connection: Connection, request: Request) -> Granted | Reading:
    """:func:`take` for an owner that may have a permit already."""
    keys = row_keys(request.key, request.permits)
    in_turn = keys[request.permit :] + keys[: request.permit]
    for attempt in range(3):
        seen = table.read_all(connection, keys)
        mine = owned(seen, request.owner)
        free = [key for key in in_turn if key not in seen or seen[key].remaining <= 0]
        watched = keys if mine is None else [mine]
        if mine is not None:
            one = replace(request, key=mine, permits=1)
            answer = table.join(connection, one, seen[mine])
        elif free:
            # All who present the owner's id begin with the same permit, so the second
            # of them finds that the owner has it.
            answer = take_one(connection, request, free[0])
            if attempt and isinstance(answer, Reading):
                answer = _take_another(connection, request, free[1:], seen)
        else:
            break
        if isinstance(answer, Granted):
            if is_only(connection, request, answer):
                return answer
        elif attempt or (mine is not None and answer.is_had_by(request.owner)):
            # A transaction has it locked, or others queue for the lock.
            break
    return first_free(seen, watched)


def _take_another(
    connection: Connection,
    request: Request,
    free: Sequence[str],
    seen: Mapping[str, Reading],
) -> Granted | Reading:
    """Grant any of several permits, or else make the row of one that has none."""
    known = [key for key in free if key in seen]
    # Always one slot for each permit, so that the statement is always the same.
    slots = known + known[:1] * (request.permits - len(known))
    grant = _grant_any(connection, request, slots, known[0]) if known else None
    if grant is not None:
        return Granted(grant, request.max_hold)
    missing = next((key for key in free if key not in seen), None)
    return Reading() if missing is None else take_one(connection, request, missing)


def is_only(connection: Connection, request: Request, granted: Granted) -> bool:
    """Tell whether the owner has no other permit; otherwise give this one back.

    Another process that presents the owner's id may just have got another permit.
    """
    if granted.again or not request.explicit:
        return True
    keys = row_keys(request.key, request.permits)
    keys.remove(granted.grant.key)
    try:
        seen = table.read_all(connection, keys)
    except BaseException:
        # Nobody receives this permit. If the owner asks again, the hold is subtracted.
        request.returns(granted.grant, 1)
        raise
    if owned(seen, request.owner) is None:
        return True
    several_rows.undo_holds(connection, request, [granted.grant])
    return False


def owned(seen: Mapping[str, Reading], owner: str) -> str | None:
    """Return the row of the permit that an owner has, if it has one."""
    live = (key for key, it in seen.items() if it.owner == owner and it.remaining > 0)
    return next(live, None)


def take_one(connection: Connection, request: Request, key: str) -> Granted | Reading:
    """Grant one permit, if it is free."""
    return table.take(connection, replace(request, key=key, permits=1))


def _take(connection: Connection, request: Request) -> Granted | Reading:
    keys = row_keys(request.key, request.permits)
    for _attempt in range(3):
        first = row_key(request.key, request.permit)
        grant = _grant_any(connection, request, keys, first)
        if grant is None:
            seen = table.read_all(connection, keys)
            missing = [key for key in keys if key not in seen]
            if not missing:
                return first_free(seen, keys)
            # At random, because many callers may begin at the same time.
            try:
                grant = table.create(connection, request, random.choice(missing))
            except table.GapLocked:
                break
        if grant is not None:
            return Granted(grant, request.max_hold)
        table.ensure_floor(connection)
    return Reading(version=0, remaining=1.0)


def _grant_any(
    connection: Connection, request: Request, keys: Sequence[str], first: str
) -> Grant | None:
    if dialects.of(connection).returns_rows:
        sql, values = table.granting(connection, request, "grant_any", len(keys))
        values |= {"first": first, **table.numbered(keys)}
        for key, version in new_versions(connection, sql, values).items():
            return Grant(key, request.owner, version)
        return None
    grant = table.grant(connection, request, first)
    if grant is None:
        sql, values = table.granting(connection, request, "grant_any", len(keys))
        changed, number = execute(connection, sql, values | table.numbered(keys))
        if changed and number is not None:
            version, permit = divmod(number, MAX_PERMITS)
            grant = Grant(row_key(request.key, permit), request.owner, version)
    return grant
