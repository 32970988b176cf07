"""The queue for a key: each waiter has a place, and watches the one before it."""

from __future__ import annotations

import math
from collections.abc import Callable

from ... import clock
from ...bells import Bell
from ...permits import row_keys
from ..gates import QUEUE_FOR, Gate
from ..values import Request
from . import nodes
from .connection import PASSING
from .sessions import PATIENCE, Session


class Place(Gate):
    """One waiter's place. Without permits, its node itself becomes the grant.

    Attributes:
        request: What the waiter asks for.
        session, folder, name: The place's node, once there is one.
    """

    is_bell = True

    def __init__(self, sessions: Callable[[], Session], request: Request) -> None:
        self.request = request
        self.session: Session | None = None
        self.folder = self.name = self._mark = ""
        self._session_id: int | None = None
        self._sessions = sessions
        self._bell = Bell()
        #: Taken by whichever comes first: the grant that keeps the node, or leaving.
        self._claims = [None]
        #: Local clock since when the waiter has been away; infinite while it attends.
        self._rests_since = math.inf

    def patience(self, remaining: float) -> float:
        # Watches report changes, but the reading of the holder must not get too old.
        return max(QUEUE_FOR, remaining / 2)

    def enter(self, seconds: float) -> None:
        until = clock.monotonic() + seconds
        try:
            self.attend()
            self.held = self._wait(until)
        except PASSING:
            # The attempt that follows sits the fault out, with the waiter's patience.
            self.held = False
        finally:
            self.rest()
            if self._is_left:
                # When leave() was called, there may have been no node to delete yet.
                self._doom()

    def attend(self) -> bool:
        """Note that the waiter is back; ``False`` if its place is given up already."""
        session = self.session
        if session is None:
            self._rests_since = math.inf
            return False
        with session.mutex:
            self._rests_since = math.inf
            return self._session_id is not None

    def rest(self) -> None:
        """Note that the waiter is away for a while."""
        self._rests_since = clock.monotonic()

    def expire(self, until: float) -> None:
        """Give the place up if its waiter has been away since ``until``.

        A stopped event loop must not keep others from a free key for ever.
        """
        session = self.session
        if session is None or self._rests_since > until:
            return
        with session.mutex:
            if self._rests_since > until or self._is_left or self._session_id is None:
                return
            # The next place has a mark of its own.
            self._session_id = None
            session.doom(self.folder, self._mark)

    @property
    def _is_left(self) -> bool:
        return not self._claims

    def _wait(self, until: float) -> bool:
        """Wait for this place's turn; tell whether it has very likely come."""
        session, request = self._current_session(), self.request
        while not self._is_left:
            give_up = max(until, clock.monotonic() + PATIENCE)
            before = self._places_before(session, give_up)
            if not before and request.permits == 1:
                return True
            told = self._told(session, before, until, give_up)
            if told is None:
                return False
            claimed = nodes.claimed(before)
            if told and (claimed < request.permits or len(before) == 1):
                return not self._is_left
        return False

    def _current_session(self) -> Session:
        """Return the present session, and give up a node of an earlier one."""
        session, request = self._sessions(), self.request
        self.session, number = session, session.id
        self.folder = session.folder(nodes.queue_key(request.key, request.permits))
        if number != self._session_id:
            if self._mark:
                # That session may live on for a while, and its node with it.
                session.doom(self.folder, self._mark)
            self._mark, self._session_id = nodes.new_mark(request.permits), number
            session.remember(self)
        return session

    def _told(
        self, session: Session, before: list[str], until: float, give_up: float
    ) -> bool | None:
        """Wait until the place before this one is gone, or a permit is free.

        If the waiters before this one ask for fewer permits, this one watches the rest.

        Returns:
            ``True`` if that has happened, ``False`` if the connection is gone instead;
            ``None`` if the time is up.
        """
        permits, claimed = self.request.permits, nodes.claimed(before)
        rows = row_keys(self.request.key, permits)[claimed:]
        folders = [session.folder(row) for row in rows]
        # Until the last of these is gone, no more permits are left to this waiter.
        blocking = [x for x in before if nodes.permits_of(x) >= min(claimed, permits)]
        paths = folders + [f"{self.folder}/{x}" for x in blocking[-1:]]
        bell = Bell()
        self._bell = bell
        try:
            seen = session.watch(paths, bell, give_up)
            if None in seen or [] in seen[: len(folders)]:
                return True
            while (left := until - clock.monotonic()) > 0 and not self._is_left:
                if bell.wait(left):
                    return bell.rung_for is not None
            return None
        finally:
            session.unwatch(paths, bell)

    def _places_before(self, session: Session, give_up: float) -> list[str]:
        """Take a place, unless there is one; return the places before it."""
        places = session.children([self.folder], give_up)[0]
        while not (mine := [x for x in places or () if nodes.is_of(x, self._mark)]):
            content = nodes.Content.of(self.request, waits=True).written()
            folder = {self.folder: places is None}
            taken = session.take(folder, self._mark, content, give_up)
            if taken is None:
                places = session.children([self.folder], give_up)[0]
            else:
                places = taken.places[0]
        assert places is not None
        # A lost reply may have left another place, which nobody would delete.
        session.remove([f"{self.folder}/{x}" for x in mine[1:]], give_up)
        self.name = mine[0]
        return places[: places.index(self.name)]

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"

    def keep(self) -> bool:
        """Leave the node to the grant; ``False`` if the waiter has left already."""
        try:
            self._claims.pop()
        except IndexError:
            return False
        # If the grant is over by now, its waiter needs another node.
        self.session = self._session_id = None
        self._mark = ""
        self._claims.append(None)
        return True

    def leave(self) -> None:
        try:
            self._claims.pop()
        except IndexError:
            return
        self._bell.ring()
        self._doom()

    def _doom(self) -> None:
        session, self.held = self.session, False
        if session is not None:
            session.doom(self.folder, self._mark)

    def __del__(self) -> None:
        self.leave()
