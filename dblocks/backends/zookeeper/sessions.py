"""The session with ZooKeeper that all locks of a process share.

In ZooKeeper its locks consist of ephemeral nodes, which the server deletes when the
session is over: when it has heard nothing for the length of a lease.
"""

from __future__ import annotations

import atexit
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kazoo.exceptions import KazooException

from ... import clock, forks
from ...bells import Bell
from ..values import Grant
from . import nodes
from .connection import ERRORS, LEAST, PASSING, Address, Connection

if TYPE_CHECKING:
    from .places import Place

logger = logging.getLogger("dblocks")

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds for which passing faults are sat out if the caller's time is shorter."""

RETRY_AFTER = 0.05
"""Seconds until a request is tried again after a passing fault."""

PULSES = 20
"""How often per lease the server hears from a session.

A server of an ensemble reports twice a tick to the leader which sessions it has heard
from. If it dies before a report, the leader counts from what the report before said,
which must not be long ago even if an idle session has just got a key.
"""


@dataclass(eq=False)
class Held:
    """A grant of this process.

    Attributes:
        folder, place: The grant's node.
        session_id: The session to which the node belongs.
        count: How many holds the owner has.
        written: How often the owner has written the node; a request to finish writes it
            once more.
        expires_at: Local clock at which the node is deleted if nothing renews the
            grant.
        max_until: Local clock beyond which no renewal moves ``expires_at``.
    """

    grant: Grant
    folder: str
    place: str
    session_id: int
    expires_at: float
    max_until: float
    count: int = 1
    written: int = 0

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.place}"

    @property
    def mark(self) -> str:
        return self.place.partition("-")[0]


@dataclass(eq=False)
class Leftover:
    """Nodes to be deleted: those made in a folder under a mark.

    Compared by identity, because while one leftover is swept, more nodes may be made
    under its mark: these are a leftover of their own.
    """

    folder: str
    mark: str


class Session(Connection):
    """The grants that a session keeps, and its waiters.

    A thread of its own deletes leftovers: nodes that nobody waits for any more, nodes
    that an error left behind, and leases that ran out.
    """

    def __init__(self, address: Address) -> None:
        super().__init__(address)
        self.grants: dict[tuple[str, str], Held] = {}
        #: Held for an instant by whoever changes one of these grants.
        self.mutex = threading.RLock()
        self._explicit = threading.RLock()
        self._bells: set[tuple[str, Bell]] = set()
        self._resting: set[weakref.ref[Place]] = set()
        self._leftovers: set[Leftover] = set()
        self._due: queue.SimpleQueue[None] = queue.SimpleQueue()

    def open(self) -> None:
        super().open()
        threading.Thread(
            target=self._keep, name="dblocks-zookeeper", daemon=True
        ).start()

    # Watching

    def watch(
        self, paths: Sequence[str], bell: Bell, give_up: float
    ) -> list[list[str] | None]:
        """Ring the bell when a node goes or its children change; return these."""
        self._bells |= {(path, bell) for path in paths}
        return self.children(paths, give_up, watch=self._rung)

    def unwatch(self, paths: Sequence[str], bell: Bell) -> None:
        """Stop ringing the bell for these nodes."""
        self._bells -= {(path, bell) for path in paths}

    def _rung(self, event: Any) -> None:
        for path, bell in list(self._bells):
            # No path means that the connection is lost, and all watches with it.
            if event.path in (None, "", path):
                bell.ring(event.path)

    def remember(self, place: Place) -> None:
        """Have a place given up once its waiter has been away for a lease."""
        self._resting.add(weakref.ref(place, self._resting.discard))

    # What to delete

    def give_back(
        self, last: Sequence[Held], give_up: float, unanswered: set[int]
    ) -> list[bool]:
        """Delete the nodes of grants; tell which of them existed.

        Args:
            unanswered: Sessions in which the nodes were to be deleted before, and may
                have been.
        """
        asked_before = frozenset(unanswered)
        unanswered |= {held.session_id for held in last}
        there = self.remove([held.path for held in last], give_up)
        return [
            was or (held.session_id == self.id and self.id in asked_before)
            for held, was in zip(last, there, strict=True)
        ]

    @contextmanager
    def alone(self, give_up: float) -> Iterator[None]:
        """Keep out other threads that ask for a key for an explicit owner.

        Raises:
            ConnectionLoss: Another thread was waiting for the server all that time.
        """
        left = min(max(0.0, give_up - clock.monotonic()), threading.TIMEOUT_MAX)
        # Twice: a standstill of the whole process may have used up the first wait.
        take = self._explicit.acquire
        if not (take(timeout=left) or take(timeout=LEAST)):
            raise self.silence()
        try:
            yield
        finally:
            self._explicit.release()

    def extend(self, held: Held, until: float) -> bool:
        """Keep a grant for longer; ``False`` if it has already run out."""
        with self.mutex:
            if self.grants.get((held.grant.key, held.grant.owner)) is not held:
                return False
            held.expires_at = max(held.expires_at, min(until, held.max_until))
            return True

    def drop(self, held: Held) -> bool:
        """Stop keeping a grant; ``False`` if it wasn't kept any more."""
        name = held.grant.key, held.grant.owner
        with self.mutex:
            if self.grants.get(name) is not held:
                return False
            del self.grants[name]
            return True

    def close(self) -> None:
        super().close()
        self._due.put(None)

    def doom(self, folder: str, mark: str) -> None:
        """Have the nodes of a mark deleted as soon as possible. Never blocks."""
        self._leftovers.add(Leftover(folder, mark))
        self._due.put(None)

    def settle(self, until: float) -> None:
        """Wait until the leftovers are deleted, or the local clock is at ``until``."""
        while self._leftovers and not self.is_over() and clock.monotonic() < until:
            time.sleep(0.005)

    def _keep(self) -> None:
        """Pulse, and delete leftovers, for as long as the client lives."""
        while not self.is_over():
            try:
                due = self._pulse()
                now = clock.monotonic()
                self._leftovers |= self._run_out(now)
                self._expire(now - self.address.lease)
                ends = [held.expires_at for held in list(self.grants.values())]
                pause = RETRY_AFTER if self._leftovers else min([due, *ends]) - now
                with suppress(queue.Empty):
                    self._due.get(timeout=max(0.0, pause))
                self._tidy_up()
            except Exception:
                # Without this thread, leases that nobody renews would not run out.
                logger.exception("failed to delete leftovers")
                time.sleep(min(PATIENCE, self.address.lease / PULSES))

    def _pulse(self) -> float:
        """Have the servers hear from the session; return when to do so again."""
        now, pause = clock.monotonic(), self.address.lease / PULSES
        if not self.client.connected or self.was_silent():
            return now + pause
        if now >= self._heard_at + pause:
            self._heard_at = now
            self.client.exists_async(self.address.root)
        return self._heard_at + pause

    def _expire(self, until: float) -> None:
        """Give up places whose waiters have been away since ``until``.

        Not if the connection is newer: without a server, waiters couldn't come back.
        """
        if not self.client.connected or self._connected_at > until:
            return
        for ref in list(self._resting):
            place = ref()
            if place is not None:
                place.expire(until)

    def _tidy_up(self) -> None:
        left = self._leftovers
        for each in list(left):
            self._pulse()
            # kazoo would queue each request until there is a server.
            if not self.client.connected:
                break
            try:
                self.sweep(each.folder, each.mark)
            except PASSING:
                break
            except KazooException as error:
                logger.warning("not deleted folder=%s error=%s", each.folder, error)
            left.discard(each)

    def _run_out(self, now: float) -> set[Leftover]:
        """Drop the grants that nobody has renewed in time; return their places."""
        found = set()
        with self.mutex:
            for held in list(self.grants.values()):
                if held.expires_at <= now and self.drop(held):
                    found.add(Leftover(held.folder, held.mark))
        return found

    def sweep(self, folder: str, mark: str) -> None:
        """Delete what was made under a mark."""
        give_up = clock.monotonic() + PATIENCE
        # A server that is behind may lack nodes that were made through another server.
        synced = self.client.sync_async(folder)
        self.wait(synced, give_up)
        places = self.children([folder], give_up)[0] or ()
        mine = [f"{folder}/{place}" for place in places if nodes.is_of(place, mark)]
        self.remove(mine, give_up)
        if not mine:
            # The place went with its session, which deletes no folders.
            self.client.delete_async(folder)

    def forget_parent(self) -> None:
        """In a forked child, let go of the session, which is the parent's."""
        self.mutex = threading.RLock()
        self.handler.abandon()


class _Opening:
    """Opens the sessions of an address, one at a time."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self._failure: tuple[float, type[Exception], tuple[Any, ...]] | None = None

    def open(self, address: Address, asked: float) -> Session:
        """Return a new session.

        Args:
            asked: Local clock when the caller came. A failure since then is also the
                caller's, which waited for it; otherwise callers would fail in turn.
        """
        if self._failure is not None and self._failure[0] > asked:
            _, kind, args = self._failure
            raise kind(*args)
        made = Session(address)
        try:
            made.open()
        except ERRORS as error:
            self._failure = clock.monotonic(), type(error), error.args
            raise
        return made


_openings: dict[Address, _Opening] = {}
_sessions: dict[Address, Session] = {}


def opened(address: Address) -> Session | None:
    """Return the process's session, if it has one."""
    return _sessions.get(address)


def session(address: Address) -> Session:
    """Return the process's session, opened when it is first needed."""
    found = _sessions.get(address)
    if found is None or found.is_over():
        asked = clock.monotonic()
        opening = _openings.setdefault(address, _Opening())
        with opening.mutex:
            found = _sessions.get(address)
            if found is None or found.is_over():
                made = opening.open(address, asked)
                left = found = _sessions.get(address)
                if found is None or found.is_over():
                    found = _sessions[address] = made
                else:
                    # A signal handler has opened a session in between.
                    left = made
                if left is not None:
                    left.close()
    found.check()
    if found.was_silent():
        raise found.silence()
    return found


def close(address: Address) -> None:
    """End the process's session, and free all that it holds."""
    found = _sessions.pop(address, None)
    if found is not None:
        found.close()


def settle(seconds: float) -> None:
    """Wait until the leftovers of all sessions are deleted, or ``seconds`` are over.

    Otherwise the server would keep the nodes of a process that ends for the length of a
    lease, and all who queue behind them would wait.
    """
    until = clock.monotonic() + seconds
    for each in list(_sessions.values()):
        each.settle(until)


atexit.register(settle, PATIENCE)


def patiently(
    address: Address, patience: float, ask: Callable[[Session, float], T]
) -> T:
    """Ask, and ask again for some time after a passing fault.

    Args:
        ask: Called with the session, and the local clock at which to give up.
    """
    give_up = clock.monotonic() + max(patience, PATIENCE)
    while True:
        try:
            return ask(session(address), give_up)
        except PASSING:
            if clock.monotonic() + RETRY_AFTER >= give_up:
                raise
            time.sleep(RETRY_AFTER)


def _after_fork_in_child() -> None:
    _openings.clear()
    for each in _sessions.values():
        each.forget_parent()
    _sessions.clear()


forks.in_child(_after_fork_in_child)
