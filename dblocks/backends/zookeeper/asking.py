"""Asks for a key, until it is granted or somebody else has it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from ... import clock
from ...permits import row_keys
from ..values import Grant, Granted, Reading, Request, first_free
from . import nodes
from .places import Place
from .sessions import Held, Session

AT_ONCE = 100
"""How many permits are looked at in one go: mostly one of the first is free."""


def moment(milliseconds: int) -> datetime:
    """Return a moment of the server's clock."""
    return datetime.fromtimestamp(milliseconds / 1000, timezone.utc)


def granted_at(content: nodes.Content, stat: Any) -> int:
    """Return when a node's key was granted, in milliseconds of the server's clock."""
    # A waiter's node is written again when the key is granted.
    return content.since or int(stat.mtime)


def reading(content: nodes.Content, stat: Any, lease: float) -> Reading:
    """Return what a node says about the holder of a key."""
    return Reading(
        owner=content.owner,
        holder=content.holder,
        note=content.note,
        version=stat.czxid,
        acquired_at=moment(granted_at(content, stat)),
        # A waiter may be about to take the key, or may have given up.
        remaining=0.0 if content.waits else lease,
    )


class Asking:
    """One request for a key, or for several at once."""

    def __init__(self, request: Request, lease: float) -> None:
        self._request = request
        self._rows = row_keys(request.key, request.permits)
        self._lease = lease
        self._mark = nodes.new_mark(request.permits)
        self._touched: list[str] = []
        #: The session of the latest request; by now, there may be another.
        self._session_id = 0
        self._place = None
        if request.queued and isinstance(request.gate, Place):
            self._place = request.gate

    def doom(self, session: Session | None) -> None:
        """Have the nodes deleted that this request has made in vain."""
        if session is not None:
            for folder in self._touched:
                session.doom(folder, self._mark)

    def one(self, session: Session, give_up: float) -> Granted | Reading:
        """Ask for one key; after a fault, clean up and ask again."""
        self._tidy(session)
        place = self._place
        if place is None:
            return self._one(session, give_up)
        # Unless this succeeds, the waiter's turn hasn't come.
        place.held = False
        if not place.attend():
            return self.seen(session, give_up)
        try:
            if self._request.permits == 1:
                return self._promoted(session, place, give_up)
            return self._one(session, give_up)
        finally:
            place.rest()

    def _one(self, session: Session, give_up: float) -> Granted | Reading:
        request = self._request
        while True:
            if request.explicit:
                again = self._again(session, give_up)
                if again is not None:
                    return again
            found = self._look_and_take(session, give_up)
            if found is not None:
                return found
            if clock.monotonic() > give_up:
                return self.seen(session, give_up)

    def all(
        self, keys: Sequence[str], session: Session, give_up: float
    ) -> list[Granted] | None:
        """Ask for several keys at once; ``None`` if one of them isn't free."""
        self._tidy(session)
        seen = session.children([session.folder(key) for key in keys], give_up)
        return None if any(seen) else self._take(session, keys, seen, give_up)

    def _tidy(self, session: Session) -> None:
        # The request may have been carried out, and only its answer lost.
        for folder in self._touched:
            session.sweep(folder, self._mark)
        self._touched.clear()

    def _take(
        self,
        session: Session,
        keys: Sequence[str],
        seen: Sequence[list[str] | None],
        give_up: float,
    ) -> list[Granted] | None:
        """Take keys that were seen to be free; ``None`` if that has changed."""
        folders = [session.folder(key) for key in keys]
        missing = {f: each is None for f, each in zip(folders, seen, strict=True)}
        sent = clock.monotonic()
        self._touched += folders
        self._session_id = session.id
        content = nodes.Content.of(self._request).written()
        taken = session.take(missing, self._mark, content, give_up)
        if taken is None:
            # Nothing was made.
            self._touched.clear()
            return None
        if not taken.are_first():
            self._tidy(session)
            return None
        granted = [
            self._granted(session, key, folder, name, taken.transaction, sent)
            for key, folder, name in zip(keys, folders, taken.names, strict=True)
        ]
        self._touched.clear()
        return granted

    def _granted(
        self,
        session: Session,
        key: str,
        folder: str,
        name: str,
        version: int,
        sent: float,
        owner: str | None = None,
        written: int = 0,
    ) -> Granted:
        request = self._request
        grant = Grant(key, owner or request.owner, version)
        held = Held(
            grant,
            folder,
            name,
            self._session_id,
            expires_at=sent + min(request.lease, request.max_hold),
            max_until=sent + request.max_hold,
            written=written,
        )
        session.grants[key, grant.owner] = held
        return Granted(grant, request.max_hold)

    def _promoted(
        self, session: Session, place: Place, give_up: float
    ) -> Granted | Reading:
        """Make a waiter's place the grant, if it is the first."""
        sent = clock.monotonic()
        # The first place stays first for as long as it exists. Writing it again tells
        # since when it has the key, and proves that the session is alive; but the node
        # may be an earlier session's, and will go with that.
        content = nodes.Content.of(place.request).written()
        stat = session.write(place.path, content, give_up)
        self._session_id = session.id
        if stat is not None and stat.ephemeralOwner == self._session_id:
            key, owner = place.request.key, place.request.owner
            granted = self._granted(
                session,
                key,
                place.folder,
                place.name,
                stat.czxid,
                sent,
                owner,
                written=stat.version,
            )
            if place.keep():
                return granted
            session.grants.pop((key, owner), None)
        return self.seen(session, give_up)

    def _again(self, session: Session, give_up: float) -> Granted | None:
        """Count one more hold of an explicit owner that has the key in this process."""
        request = self._request
        for row in self._rows:
            held = session.grants.get((row, request.owner))
            if held is None:
                continue
            sent = clock.monotonic()
            stat = session.stats([held.path], give_up)[0]
            with session.mutex:
                if stat is None or not session.extend(held, sent + request.lease):
                    session.drop(held)
                    continue
                # Called first, because a signal handler may change the count meanwhile.
                lost = request.forfeits(held.grant)
                left = held.count - lost
                held.count = left + 1 if left > 0 else 1
                return Granted(held.grant, held.max_until - sent, again=True)
        return None

    def _look_and_take(
        self, session: Session, give_up: float
    ) -> Granted | Reading | None:
        """Take the key, or a permit, if it is free; ``None`` if that has changed."""
        rows, first = self._rows, self._request.permit
        seen: list[list[str] | None] = [None] * len(rows)
        in_turn = [*range(first, len(rows)), *range(first)]
        for start in range(0, len(rows), AT_ONCE):
            numbers = in_turn[start : start + AT_ONCE]
            claimed = self._look(session, numbers, seen, give_up)
            free = [n for n in numbers if not seen[n] and n >= claimed]
            if free:
                number = free[0]
                taken = self._take(session, [rows[number]], [seen[number]], give_up)
                return None if taken is None else taken[0]
        return self._reading(session, seen, give_up)

    def _look(
        self,
        session: Session,
        numbers: Sequence[int],
        seen: list[list[str] | None],
        give_up: float,
    ) -> int:
        """Note the places at some rows; return how many permits others wait for."""
        key, permits = self._request.key, self._request.permits
        asked = [session.folder(self._rows[number]) for number in numbers]
        if permits > 1:
            asked.append(session.folder(nodes.queue_key(key, permits)))
        found = session.children(asked, give_up)
        queue = found.pop() if permits > 1 else None
        for number, places in zip(numbers, found, strict=True):
            seen[number] = places
        place = self._place.name if self._place else ""
        return nodes.claimed(nodes.before(place, queue or ()))

    def seen(self, session: Session, give_up: float) -> Reading:
        """Return who has the key; with permits, the one that will be free first."""
        folders = [session.folder(row) for row in self._rows]
        return self._reading(session, session.children(folders, give_up), give_up)

    def _reading(
        self,
        session: Session,
        seen: Sequence[list[str] | None],
        give_up: float,
    ) -> Reading:
        rows = self._rows
        readings = {
            row: Reading(remaining=self._lease)
            for row, places in zip(rows, seen, strict=True)
            if places
        }
        if len(readings) == len(rows):
            # Nobody knows which of them will be free first.
            path = f"{session.folder(rows[0])}/{(seen[0] or [''])[0]}"
            node = session.contents([path], give_up)[0]
            readings.pop(rows[0])
            if node is not None:
                readings[rows[0]] = reading(*node, self._lease)
        return first_free(readings, rows)
