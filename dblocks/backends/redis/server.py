"""One server: the verbs, each a script, in the terms of the engines."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from itertools import chain, islice
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    ClusterDownError,
    ConnectionError,
    TimeoutError,
    TryAgainError,
)

from ...permits import apart, row_key, row_keys
from ..values import (
    Described,
    Entry,
    Grant,
    Granted,
    Reading,
    Renewal,
    Renewed,
    Request,
    Waiters,
)
from . import scripts
from .client import Client, Part

MICRO = 1_000_000

BATCH = 500
"""The most rows that one call reads or writes, so that others' calls get a turn."""

LONG = 1.0
"""The shortest wait, in seconds, that the server is trusted to end on time."""

SHORT = 0.05
"""Seconds before a waiter looks again for its bell, if the bell's node isn't known."""

LATE = 0.25
"""Seconds by which the server may end a wait too late."""

OTHERS_WITHIN = 5
"""The part of a lease for which renewals on one node wait for those on others."""

SLACK = 1.0
"""Seconds for which a waiter counts as alive after it should have asked again."""


class Server:
    """Keeps locks on one server, or on one of several.

    Args:
        has_tokens: Whether versions are the caller's fencing tokens; those of one
            server of several aren't.
    """

    def __init__(self, client: Client, prefix: str, *, has_tokens: bool = True) -> None:
        self.client = client
        self._prefix = prefix
        self._has_tokens = has_tokens
        self._row = re.compile(
            re.escape(prefix) + r"\{lock:(.*)\}:row(?::(\d+))?", re.DOTALL
        )

    # Names

    def _base(self, key: str) -> str:
        return f"{self._prefix}{{lock:{key}}}:"

    def row(self, row_key: str) -> str:
        """Return the name of a row's hash."""
        key, permit = apart(row_key)
        return f"{self._base(key)}row" + ("" if permit is None else f":{permit}")

    def _queue(self, key: str) -> list[str]:
        base = self._base(key)
        return [f"{base}queue", f"{base}alive", f"{base}rung"]

    def _names(self, row_key: str) -> list[str]:
        """Return the names of a row's queue, as :meth:`_queue`, and of its hash."""
        return [*self._queue(apart(row_key)[0]), self.row(row_key)]

    def _bell(self, key: str, ticket: str) -> str:
        return f"{self._base(key)}bell:{ticket.partition(' ')[0]}"

    # The verbs

    def acquire(
        self, request: Request, ticket: str = "", patience: float = 0.0
    ) -> Granted | Reading:
        """Grant a key, or say who has it."""
        keys = row_keys(request.key, request.permits)
        answer = self.client.run(
            scripts.ACQUIRE,
            [
                *self._queue(request.key),
                self._bell(request.key, ticket),
                *map(self.row, keys),
            ],
            [*_terms(request), request.permit, ticket],
            patience=patience,
        )
        key = keys[answer[1]]
        if not answer[0]:
            permit = None if request.permits == 1 else answer[1]
            return replace(self._reading(answer[2]), permit=permit)
        _, _, version, limit, *earlier = answer
        again, identity = False, request.identity
        if earlier:
            again, identity = bool(earlier[0]), earlier[1].decode()
        grant = self._grant(key, request.owner, version, identity)
        return Granted(grant, limit / MICRO, again=again)

    def _grant(self, key: str, owner: str, version: int, identity: str) -> Grant:
        if self._has_tokens:
            return Grant(key, owner, version)
        return Grant(key, owner, None, identity)

    def forfeit(self, grant: Grant, holds: int) -> None:
        """Subtract holds from the count of an explicit owner's grant."""
        queue, *_, row = self._names(grant.key)
        arguments = [grant.owner, _mark(grant), holds, _act()]
        self.client.run(scripts.FORFEIT, [queue, row], arguments)

    def acquire_all(
        self, request: Request, keys: Sequence[str], patience: float = 0.0
    ) -> list[Granted] | None:
        """Grant several free keys that nobody waits for, or none."""
        names: list[str] = []
        for key in keys:
            queue, _, rung = self._queue(key)
            names += queue, rung, self.row(key)
        try:
            versions = self.client.run(
                scripts.ACQUIRE_ALL, names, _terms(request), patience=patience
            )
        except ClusterCrossSlotError:
            return None
        if not versions:
            return None
        owner, identity = request.owner, request.identity
        return [
            Granted(self._grant(key, owner, version, identity), request.max_hold)
            for key, version in zip(keys, versions, strict=True)
        ]

    def release_all(
        self, grants: Sequence[Grant], *, count: int | None, undo: bool = False
    ) -> set[Grant]:
        """Release one hold of each, or all but ``count``; return the current grants."""
        answers = self.client.run_all(
            scripts.RELEASE,
            ["" if count is None else count, int(undo), _act()],
            [(self._names(grant.key), [grant.owner, _mark(grant)]) for grant in grants],
        )
        return {grant for grant, answer in zip(grants, answers, strict=True) if answer}

    def renew(self, renewals: Sequence[Renewal], count: int | str = "") -> Renewed:
        """Extend grants; ``count`` is the new number of holds; ``up`` adds one."""
        renewed = Renewed()
        for batch in _batches(renewals):
            parts = [
                ([self.row(grant.key)], [grant.owner, _mark(grant), _micro(lease)])
                for grant, lease in batch
            ]
            within = min(lease for _, lease in batch) / OTHERS_WITHIN
            answers = self.client.run_all(
                scripts.RENEW, [count], parts, others_within=within
            )
            for (grant, _), answer in zip(batch, answers, strict=True):
                if answer in (1, 2):
                    renewed.extended.add(grant)
                    if answer == 2:
                        renewed.requested.add(grant)
                elif answer is not None:
                    seen = self._reading(answer)
                    renewed.lost[grant] = seen.reason_for(grant) or "taken"
                else:
                    renewed.out_of_reach.add(grant)
        return renewed

    def read_all(
        self, keys: Sequence[str], patience: float = 0.0
    ) -> dict[str, Reading]:
        """Look at rows; omit those that were never taken, or were forgotten."""
        found = {}
        for batch in _batches(keys):
            answers = self._read(batch, patience)
            for key, answer in zip(batch, answers, strict=True):
                if answer:
                    found[key] = self._reading(answer)
        return found

    def _read(self, keys: Sequence[str], patience: float = 0.0) -> Any:
        rows: list[Part] = [([self.row(key)], ()) for key in keys]
        return self.client.run_all(scripts.READ, (), rows, patience=patience)

    # The queue

    def queue(
        self, request: Request, ticket: str, seconds: float
    ) -> tuple[bool, float]:
        """Queue for a key for that many seconds.

        Returns:
            Whether the key is free for this waiter, and if not, after how many seconds
            to look if the bell doesn't ring.
        """
        keys = row_keys(request.key, request.permits)
        is_free, turn = self.client.run(
            scripts.QUEUE,
            [*self._queue(request.key), *map(self.row, keys)],
            [ticket, _micro(seconds + SLACK)],
            patience=seconds,
        )
        return bool(is_free), turn / MICRO

    def listen(self, key: str, ticket: str, seconds: float) -> str:
        """Wait for a word at the bell; return an empty string if none comes."""
        # The server looks at its clock ten times a second, so it is asked to end long
        # waits a bit early. The client ends short ones, which costs the connection.
        ends = seconds - LATE if seconds > LONG else seconds + LONG
        bell = self._bell(key, ticket)
        try:
            answer = self.client.at(bell).send(
                "BLPOP", bell, ends, answers_within=seconds
            )
        except (ConnectionError, TimeoutError):
            # The next command will show whether the server is out of reach.
            return ""
        except (AskError, TryAgainError, ClusterDownError):
            # The next command will find the key's node.
            time.sleep(min(seconds, SHORT))
            return ""
        return "" if answer is None else str(answer[1], "ascii")

    def leave(self, key: str, ticket: str) -> None:
        """Leave the queue."""
        # Without patience, because the caller's time may be over, and the queue forgets
        # a waiter that doesn't ask again.
        names = [*self._queue(key), self._bell(key, ticket)]
        self.client.run(scripts.LEAVE, names, [ticket], is_patient=False)

    def _reading(self, answer: Sequence[Any]) -> Reading:
        if not answer:
            return Reading()
        owner, holder, note, version, acquired, remaining, limit, *_, identity = answer
        return Reading(
            owner=owner.decode(),
            holder=holder.decode(),
            note=note.decode(),
            version=version if self._has_tokens else None,
            acquired_at=_moment(acquired),
            remaining=remaining / MICRO,
            limit=limit / MICRO,
            identity="" if self._has_tokens else identity.decode(),
        )

    # Operators

    def waiters(self, key: str) -> Waiters:
        """Tell who waits: one waiter for each process."""
        found = self.client.run(scripts.WAITERS, self._queue(key)[:2])
        since = _moment(int(found[0][1])) if found else None
        names = (ticket.decode().partition(" ")[2] for ticket, _ in found)
        return Waiters(len(found), since, tuple(names))

    def entries(self, key: str | None = None) -> Iterator[Entry]:
        """Return what is known about all locks, or about a key and its permits."""
        for batch in _batches(self._find(key)):
            for each, answer in zip(batch, self._read(batch), strict=True):
                if answer:
                    yield self._entry(each, answer)

    def make_older(self, seconds: float) -> None:
        """Let time pass for all locks."""
        for batch in _batches(self._find(None)):
            parts: list[Part] = [(self._names(each)[::3], ()) for each in batch]
            self.client.run_all(scripts.MAKE_OLDER, [_micro(seconds)], parts)

    def _entry(self, row_key: str, answer: Sequence[Any]) -> Entry:
        seen = self._reading(answer)
        return Entry(
            key=row_key,
            owner=seen.owner,
            holder=seen.holder,
            note=seen.note,
            hold_count=answer[7],
            version=seen.version,
            acquired_at=seen.acquired_at,
            expires_at=_moment(answer[8]),
            remaining=seen.remaining,
            release_requested_at=_moment(answer[9]),
        )

    def _find(self, key: str | None) -> list[str]:
        """Return the keys of all rows, or of those of a key."""
        which = "*" if key is None else _literally(key)
        pattern = f"{_literally(self._prefix)}{{lock:{which}}}:row*"
        found = set()
        for name in chain.from_iterable(
            _scan(client, pattern) for client in self.client.masters()
        ):
            match = self._row.fullmatch(name)
            if match is not None and key in (None, match[1]):
                permit = None if match[2] is None else int(match[2])
                found.add(row_key(match[1], permit))
        return sorted(found)

    def request_release(self, row_key: str, version: int | None) -> Described | None:
        """Ask the holder of a row to finish; return owner, holder and version."""
        arguments = ["" if version is None else version]
        return _described(
            self.client.run(scripts.REQUEST_RELEASE, [self.row(row_key)], arguments)
        )

    def force_release(
        self, row_key: str, version: int | None, age: float
    ) -> Described | None:
        """Free a row; return owner, holder and version of the grant that this ended."""
        return _described(
            self.client.run(
                scripts.FORCE_RELEASE,
                self._names(row_key),
                ["" if version is None else version, _micro(age), _act()],
            )
        )


def _scan(client: Client, pattern: str) -> Iterator[str]:
    """Yield the names of all keys of a server that match, some of them twice."""
    cursor = "0"
    while True:
        answer = client.send("SCAN", cursor, "MATCH", pattern, "COUNT", 1000)
        yield from (name.decode() for name in answer[1])
        cursor = answer[0].decode()
        if cursor == "0":
            return


def _described(answer: Any) -> Described | None:
    """Return owner, holder and version of a grant, if the answer names one."""
    if not answer:
        return None
    return answer[0].decode(), answer[1].decode(), answer[2]


def _act() -> str:
    return os.urandom(8).hex()


def _micro(seconds: float) -> int:
    return round(seconds * MICRO)


def _mark(grant: Grant) -> int | str:
    return grant.identity if grant.version is None else grant.version


def _terms(request: Request) -> list[str | int]:
    return [
        request.owner,
        _micro(request.lease),
        _micro(request.max_hold),
        _micro(request.hold_at_least),
        request.holder,
        request.note,
        int(request.explicit),
        request.identity,
    ]


def _batches(items: Sequence[Any]) -> Iterator[Any]:
    rest = iter(items)
    while batch := list(islice(rest, BATCH)):
        yield batch


def _moment(micro: int) -> datetime | None:
    if not micro:
        return None
    return datetime.fromtimestamp(micro / MICRO, timezone.utc)


def _literally(text: str) -> str:
    """Return a pattern of Redis that only this text matches."""
    return re.sub(r"([*?\[\]^\\-])", r"\\\1", text)
