"""Takes keys on SQLite, where a write keeps all other writers out.

A refused caller must not write. A caller that enters a key's gate knows without a
statement that nobody has the key; a caller that can't enter reads first. While a key
looks free and others have its gate, somebody is about to take it or has just released
it: a write would meet the transaction that follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import TypeVar

from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ...permits import row_key, row_keys
from ..gates import GateClosed
from ..values import PINNED_GRACE, Granted, Reading, Request, Taken, first_free
from . import permit_rows, several_rows, table
from .connections import is_alone
from .dialects.sqlite import BusyTimeout
from .file_locks import FileLock, gate_of, gates_in_use

MOST_GATES = 32
"""The most gates that one acquisition enters; each has a file open."""

PAUSES = 0.001, 0.002, *[0.004] * 31
"""Seconds between looks at a key that seems to be changing hands, 0.127 in all.

After that, the gate's owner is taken for stopped.
"""

T = TypeVar("T")


class _ChangesHands(Exception):
    """Others have the gate of a key that looks free."""


def gate(connection: Connection, key: str) -> FileLock | None:
    """Return a new gate to queue at for a key, if there is one."""
    return None if is_alone(connection) else gate_of(connection, key)


def take(connection: Connection, request: Request) -> Granted | Reading:
    """Grant a key, or one of its permits."""
    is_one = request.permits == 1
    if is_alone(connection) or (request.queued and is_one):
        grants = table.take if is_one else permit_rows.take
        return grants(connection, request)
    ask = _take_one if is_one else _take_any
    return _once_settled(lambda patient: ask(connection, request, patient))


def _once_settled(ask: Callable[[bool], T]) -> T:
    for pause in PAUSES:
        try:
            return ask(True)
        except _ChangesHands:
            pass
        time.sleep(pause)
    return ask(False)


def _take_one(
    connection: Connection, request: Request, patient: bool
) -> Granted | Reading:
    entrance = gate_of(connection, request.key)
    try:
        entered = entrance is not None and entrance.try_enter()
    except GateClosed:
        entrance, entered = None, False
    try:
        if not entered:
            seen = table.read(connection, request.key) or Reading()
            if seen.owner != request.owner and not _is_free(seen, entrance, patient):
                return seen
        # Without the gate, don't wait for other writers, so that each repetition looks
        # first: the gate's owner may have had the key meanwhile, and released it.
        with nullcontext() if entered else BusyTimeout(connection, 0.0):
            answer = table.take(connection, request)
        if isinstance(answer, Granted) and entered:
            answer = Granted(answer.grant, answer.limit, answer.again, entrance)
            entrance = None
        return answer
    finally:
        if entrance is not None:
            entrance.leave()


def _take_any(
    connection: Connection, request: Request, patient: bool
) -> Granted | Reading:
    """Grant a permit; those that wait for one queue at the key's own gate."""
    keys = row_keys(request.key, request.permits)
    if request.explicit:
        found = table.read_all(connection, keys)
        if permit_rows.owned(found, request.owner) is not None:
            return permit_rows.take(connection, request)
    queue = None if request.queued else _queue(connection, request.key)
    if queue is None:
        first = request.permit
        for key, gate in _enter(connection, keys[first:] + keys[:first], most=1):
            taken: Granted | None = None
            try:
                answer = permit_rows.take_one(connection, request, key)
                if isinstance(answer, Granted):
                    if permit_rows.is_only(connection, request, answer):
                        taken = answer._replace(gate=gate)
                        return taken
                    # The owner has another permit.
                    return permit_rows.take(connection, request)
            finally:
                if taken is None:
                    gate.leave()
    seen = first_free(table.read_all(connection, keys), keys)
    if not _is_free(seen, queue, patient):
        return seen
    if patient and _queue(connection, row_key(request.key, seen.permit)) is not None:
        raise _ChangesHands
    return permit_rows.take(connection, request)


def take_all(
    connection: Connection, request: Request, keys: Sequence[str]
) -> list[Granted] | Taken | None:
    """Grant several keys that are free, all or none of them.

    A refused caller has written nothing.
    """
    return _once_settled(lambda patient: _take_all(connection, request, keys, patient))


def _take_all(
    connection: Connection, request: Request, keys: Sequence[str], patient: bool
) -> list[Granted] | Taken | None:
    gates: dict[str, FileLock] = {}
    if not is_alone(connection) and len(keys) <= MOST_GATES:
        gates = dict(_enter(connection, keys, most=len(keys)))
    try:
        if len(gates) == len(keys):
            granted = several_rows.take(connection, request, keys)
            if granted is not None:
                own, gates = gates, {}
                return [each._replace(gate=own[each.grant.key]) for each in granted]
        seen = table.read_all(connection, keys)
        rest = [key for key in keys if key not in gates]
        queues = {} if is_alone(connection) else gates_in_use(connection, rest)
        for key in keys:
            if key in seen and seen[key].remaining > 0:
                owned = request.explicit and seen[key].owner == request.owner
                return None if owned else Taken(key, seen[key])
        for key in keys:
            it = seen.get(key, Reading())
            if not _is_free(it, queues.get(key), patient):
                return None
        return several_rows.take(connection, request, keys) if rest else None
    finally:
        for gate in gates.values():
            gate.leave()


def _enter(
    connection: Connection, keys: Sequence[str], *, most: int
) -> list[tuple[str, FileLock]]:
    """Enter keys' gates without waiting, until a key has none or ``most`` are had."""
    entered: list[tuple[str, FileLock]] = []
    with suppress(GateClosed):
        for key in keys:
            gate = gate_of(connection, key)
            if gate is not None and gate.try_enter():
                entered.append((key, gate))
            if gate is None or len(entered) == most:
                break
    return entered


def _queue(connection: Connection, key: str) -> FileLock | None:
    """Return a key's gate if others have it or queue there."""
    queue = gate(connection, key)
    return None if queue is None or queue.is_free() else queue


def _is_free(seen: Reading, gate: FileLock | None, patient: bool) -> bool:
    """Tell whether a key is free, even if others have its gate or queue there.

    Those others may be stopped; or a former holder, who doesn't know that the lease is
    lost, still has the gate.
    """
    if gate is None or seen.remaining > 0:
        return seen.remaining <= 0
    if seen.acquired_at is not None and seen.remaining > -PINNED_GRACE:
        return False
    if patient:
        raise _ChangesHands
    return True
