"""Takes keys on SQLite, where a write keeps all other writers out.

A refused caller must not write. A key's gate tells without a statement that nobody has
the key; a caller without a gate, or who comes from elsewhere, reads first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ...permits import row_keys
from ..gates import GateClosed
from ..values import PINNED_GRACE, Granted, Reading, Request, first_free
from . import permit_rows, several_rows, table
from .connections import is_alone
from .file_locks import FileLock, gate_of

MOST_GATES = 32
"""The most gates that one acquisition enters; each has a file open."""


def gate(connection: Connection, key: str) -> FileLock | None:
    """Return a new gate to queue at for a key, if there is one."""
    return None if is_alone(connection) else gate_of(connection, key)


def take(connection: Connection, request: Request) -> Granted | Reading:
    """Grant a key, or one of its permits."""
    is_one = request.permits == 1
    if is_alone(connection) or (request.queued and is_one):
        grants = table.take if is_one else permit_rows.take
        return grants(connection, request)
    return _take_one(connection, request) if is_one else _take_any(connection, request)


def _take_one(connection: Connection, request: Request) -> Granted | Reading:
    entrance = gate_of(connection, request.key)
    try:
        entered = entrance is not None and entrance.try_enter()
    except GateClosed:
        entrance, entered = None, False
    try:
        if not entered:
            seen = table.read(connection, request.key)
            is_anothers = seen is not None and seen.owner != request.owner
            if seen and is_anothers and not _is_free(seen, entrance):
                return seen
        answer = table.take(connection, request)
        if isinstance(answer, Granted) and entered:
            answer, entrance = answer._replace(gate=entrance), None
        return answer
    finally:
        if entrance is not None:
            entrance.leave()


def _take_any(connection: Connection, request: Request) -> Granted | Reading:
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
            answer = permit_rows.take_one(connection, request, key)
            if isinstance(answer, Granted):
                if permit_rows.is_only(connection, request, answer):
                    return answer._replace(gate=gate)
                gate.leave()
                # The owner has another one.
                return permit_rows.take(connection, request)
            gate.leave()
    seen = first_free(table.read_all(connection, keys), keys)
    return permit_rows.take(connection, request) if _is_free(seen, queue) else seen


def take_all(
    connection: Connection, request: Request, keys: Sequence[str]
) -> list[Granted] | None:
    """Grant several keys that have rows and are free, all or none of them."""
    gates: dict[str, FileLock] = {}
    if not is_alone(connection) and len(keys) <= MOST_GATES:
        gates = dict(_enter(connection, keys, most=len(keys)))
    try:
        if len(gates) < len(keys):
            seen = table.read_all(connection, keys)
            for key in keys:
                queue = None if key in gates else _queue(connection, key)
                if key not in seen or not _is_free(seen[key], queue):
                    return None
        granted = several_rows.take(connection, request, keys)
        if granted is not None and len(gates) == len(keys):
            granted = [each._replace(gate=gates[each.grant.key]) for each in granted]
            gates = {}
        return granted
    finally:
        for gate in gates.values():
            gate.leave()


def _enter(
    connection: Connection, keys: Sequence[str], *, most: int
) -> list[tuple[str, FileLock]]:
    """Enter gates that can be entered now, at most so many."""
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


def _is_free(seen: Reading, gate: FileLock | None) -> bool:
    """Tell whether a key is free, even if others have its gate or queue there.

    They may be stopped; or a holder has its gate that was replaced and doesn't know it.
    """
    is_waited_for = gate is not None and seen.acquired_at is not None
    return seen.remaining <= (-PINNED_GRACE if is_waited_for else 0.0)
