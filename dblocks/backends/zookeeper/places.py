"""The queue for a key: each waiter has a place, and watches the one before it."""

from __future__ import annotations

import os
from collections.abc import Callable

from ... import clock
from ...permits import row_keys
from ..gates import QUEUE_FOR, Gate
from ..values import Request
from . import nodes
from .connection import PASSING
from .sessions import PATIENCE, Session, Watch


class Place(Gate):
    """One waiter's place. Without permits, this node itself becomes the grant.

    Attributes:
        request: What is waited for.
        session, folder, name: Its node, once there is one.
    """

    is_bell = True

    def __init__(self, sessions: Callable[[], Session], request: Request) -> None:
        self.request = request
        self.session: Session | None = None
        self.folder = self.name = self._mark = ""
        self._session_id: int | None = None
        self._sessions = sessions
        self._watch: Watch | None = None
        #: Emptied by whichever comes first: the grant that keeps the node, or leaving.
        self._claims = [None]

    @property
    def held(self) -> bool:  # type: ignore[override]
        """Whether this place's turn has very likely come."""
        watch = self._watch
        return watch is not None and watch.has_come

    @property
    def rung(self) -> bool | None:  # type: ignore[override]
        watch = self._watch
        return None if watch is None else watch.has_rung

    def patience(self, remaining: float) -> float:
        # Watches report changes, but the reading of the holder must not get too old.
        return max(QUEUE_FOR, remaining / 2)

    def enter(self, seconds: float) -> None:
        if self.held:
            return
        try:
            self._watch_next(clock.monotonic() + max(seconds, PATIENCE))
        except PASSING:
            # Next, the waiter asks for the key, with all its patience.
            self.stop_watching()
        finally:
            if self._is_left:
                # If it was left meanwhile, there may have been nothing to delete yet.
                self._doom()

    @property
    def _is_left(self) -> bool:
        return not self._claims

    def _watch_next(self, give_up: float) -> None:
        """Watch the place before this one, or, if first, the permits."""
        session, request = self._current_session(), self.request
        while not self._is_left:
            # What it has watched says nothing of a place that is made next.
            self.stop_watching()
            before = self._places_before(session, give_up)
            paths = [f"{self.folder}/{name}" for name in before[-1:]]
            if not before and request.permits > 1:
                rows = row_keys(request.key, request.permits)
                paths = [session.folder(row) for row in rows]
            is_next = not before or (len(before) == 1 and request.permits == 1)
            watch = self._watch = Watch(paths, is_next, self.wake)
            seen = session.watch(watch, give_up)
            if seen and None not in seen and (before or [] not in seen):
                return
            # It has happened before it was watched.
            watch.ring(True)
            if is_next:
                return

    def stop_watching(self) -> None:
        """Take it that this place's turn hasn't come."""
        watch, self._watch = self._watch, None
        if watch is not None and self.session is not None:
            self.session.unwatch(watch)

    def _current_session(self) -> Session:
        """Return the session, and give up a node that an earlier one has made."""
        session, request = self._sessions(), self.request
        self.session, number = session, session.id
        self.folder = session.folder(nodes.queue_key(request.key, request.permits))
        if number != self._session_id:
            if self._mark:
                # That session may live on for a while, and its node with it.
                session.doom(self.folder, self._mark)
            self._mark, self._session_id = os.urandom(16).hex(), number
        return session

    def _places_before(self, session: Session, give_up: float) -> list[str]:
        """Return the places before this one, which is taken first."""
        places = session.children([self.folder], give_up)[0]
        while not (mine := [x for x in places or () if nodes.is_of(x, self._mark)]):
            request = self.request
            content = nodes.Content(
                request.owner, request.holder, request.note, waits=True
            )
            taken = session.take(
                {self.folder: places is None}, self._mark, content.written(), give_up
            )
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
        """Leave the node to the grant; ``False`` if this was left already."""
        try:
            self._claims.pop()
        except IndexError:
            return False
        self.session = None
        return True

    def leave(self) -> None:
        try:
            self._claims.pop()
        except IndexError:
            return
        self._doom()

    def _doom(self) -> None:
        self.stop_watching()
        if self.session is not None:
            self.session.doom(self.folder, self._mark)

    def __del__(self) -> None:
        self.leave()
