"""Renewing leases in time, and noticing on time when they are lost.

One thread keeps the time for all holds of the process. It does no I/O, so nothing can
delay the news that a lease is over. Renewals are sent by a second thread, one for
each backend that has something to renew, which takes all that are due together; a
renewal that hangs on a dead socket holds up no deadline, and once its leases are
lost, the thread is given up and replaced. Both threads end when there is nothing left
to do.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial

from django.db import connections

from . import clock
from .backends.base import BaseBackend
from .holds import Hold
from .signals import lock_lost

logger = logging.getLogger("dblocks")

MAX_SLEEP = 0.5
"""Seconds after which the timekeeper looks whether it is still needed."""


class Timekeeper:
    """The process's renewals and deadlines."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start from nothing, as in a forked child."""
        # Always entered by itself: a signal's exception inside Condition.__enter__(),
        # which is Python, would leave it locked for ever.
        self._mutex = threading.Lock()
        self._condition = threading.Condition(self._mutex)
        self._holds: dict[int, weakref.ref[Hold]] = {}
        self._by_key: dict[tuple[BaseBackend, str], weakref.ref[Hold]] = {}
        self._workers: dict[BaseBackend, _Worker] = {}
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0

    def add(self, hold: Hold) -> None:
        """Watch over a hold until it is discarded, lost or forgotten."""
        with self._mutex:
            ref = self._holds[id(hold)] = weakref.ref(hold)
            self._by_key[hold.backend, hold.grant.key] = ref
            if self._thread is None:
                self._start()
            elif min(hold.renew_at, hold.deadline) < self._wakes_at:
                self._condition.notify()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="dblocks-timekeeper")
        thread.daemon = True
        try:
            thread.start()
        except RuntimeError:
            # The interpreter is going down, or has no threads.
            logger.warning("leases are not renewed: no thread can be started")
        else:
            self._thread = thread

    def discard(self, hold: Hold) -> None:
        """Watch no more over a hold."""
        place = hold.backend, hold.grant.key
        with self._mutex:
            ref = self._holds.pop(id(hold), None)
            if ref is not None and self._by_key.get(place) is ref:
                del self._by_key[place]

    def holder(self, backend: BaseBackend, key: str) -> Hold | None:
        """Return the live hold that this process has on a key, if it has one."""
        ref = self._by_key.get((backend, key))
        hold = ref() if ref is not None else None
        return hold if hold is not None and hold.is_live() else None

    def hurry(self) -> None:
        """Look at the clock now; it was moved, or something became due."""
        with self._mutex:
            self._condition.notify()

    def owed(self, connection: object) -> list[Hold]:
        """Take what can only be renewed on a test's own connection."""
        owed = []
        for hold in self.holds():
            if hold.test_connection is connection and hold.owed:
                hold.owed = False
                owed.append(hold)
        return owed

    def holds(self) -> list[Hold]:
        """Return all live holds."""
        with self._mutex:
            refs = list(self._holds.values())
        return [hold for ref in refs if (hold := ref()) is not None]

    def _run(self) -> None:
        while True:
            holds = self.holds()
            now = clock.monotonic()
            for hold in holds:
                if hold.deadline <= now:
                    hold.is_live()
            due = self._due(holds, now)
            for backend, batch in due.items():
                self._send(backend, batch)
            self._dismiss({hold.backend for hold in holds if hold.terms.renew}, now)
            del holds, due
            hold = batch = None  # type: ignore[assignment]
            if not self._sleep():
                return

    def _due(self, holds: Iterable[Hold], now: float) -> dict[BaseBackend, list[Hold]]:
        live = [h for h in holds if h.lost_reason is None and not h.closed]
        due: dict[BaseBackend, list[Hold]] = {}
        backends = {hold.backend for hold in live if hold.renew_at <= now}
        for hold in live:
            # What is nearly due comes along: the leases of a process fall into step.
            nearly = hold.renew_at <= now + hold.terms.interval / 4
            if hold.backend not in backends or not nearly:
                continue
            if hold.test_connection is None:
                due.setdefault(hold.backend, []).append(hold)
            else:
                hold.extend(now)
                hold.owed = True
        return due

    def _send(self, backend: BaseBackend, batch: list[Hold]) -> None:
        worker = self._workers.get(backend)
        if worker is None:
            worker = _Worker(self, backend)
            try:
                worker.start()
            except RuntimeError as error:
                _log_failure(backend, len(batch), error)
                for hold in batch:
                    hold.failing = True
                    hold.renew_at = clock.monotonic() + _soon(hold)
                return
            self._workers[backend] = worker
        for hold in batch:
            hold.failing = True
            hold.renew_at = clock.monotonic() + _soon(hold) if worker.busy else math.inf
        if not worker.busy:
            worker.take(batch)

    def _dismiss(self, needed: set[BaseBackend], now: float) -> None:
        for backend, worker in list(self._workers.items()):
            if backend not in needed or (worker.busy and worker.give_up_at <= now):
                del self._workers[backend]
                worker.take(None)

    def _sleep(self) -> bool:
        with self._mutex:
            now = clock.monotonic()
            wakes_at = now + MAX_SLEEP
            for ident, ref in list(self._holds.items()):
                hold = ref()
                if hold is None:
                    del self._holds[ident]
                    self._by_key = {k: r for k, r in self._by_key.items() if r()}
                else:
                    wakes_at = min(wakes_at, hold.renew_at, hold.deadline)
            hold = None
            if not self._holds and not self._workers:
                self._thread = None
                return False
            self._wakes_at = wakes_at
            if wakes_at > now:
                self._condition.wait(wakes_at - now)
            return True


class _Worker(threading.Thread):
    """Sends the renewals of one backend."""

    def __init__(self, timekeeper: Timekeeper, backend: BaseBackend) -> None:
        super().__init__(name=f"dblocks-renewal-{backend.alias}", daemon=True)
        self._timekeeper = timekeeper
        self._backend = backend
        self._batches: queue.SimpleQueue[list[weakref.ref[Hold]] | None] = (
            queue.SimpleQueue()
        )
        self.busy = False
        self.give_up_at = 0.0

    def take(self, batch: list[Hold] | None) -> None:
        """Renew a batch; after ``None`` end."""
        if batch is None:
            self._batches.put(None)
            return
        self.busy = True
        self.give_up_at = max(hold.deadline for hold in batch)
        self._batches.put([weakref.ref(hold) for hold in batch])

    def run(self) -> None:
        session = self._backend.renewal_session()
        try:
            while (refs := self._batches.get()) is not None:
                self._renew(session, refs)
                self.busy = False
                self._timekeeper.hurry()
        finally:
            session.close()

    def _renew(self, session: object, refs: list[weakref.ref[Hold]]) -> None:
        grants = {}
        for ref in refs:
            hold = ref()
            if hold is not None and not hold.closed:
                grants[hold.grant] = (ref, hold.renewal())
        hold = None
        if not grants:
            return
        sent = clock.monotonic()
        try:
            outcome = session.renew([renewal for _, renewal in grants.values()])  # type: ignore[attr-defined]
        except Exception as error:
            outcome = None
            _log_failure(self._backend, len(grants), error)
        for grant, (ref, _) in grants.items():
            hold = ref()
            if hold is None or hold.closed:
                continue
            if outcome is not None and grant in outcome.extended:
                hold.extend(sent)
            elif outcome is not None and grant in outcome.lost:
                hold.lose(outcome.lost[grant])
            else:
                hold.renew_at = clock.monotonic() + _soon(hold)


def _log_failure(backend: BaseBackend, leases: int, error: Exception) -> None:
    logger.warning(
        "renewal failed backend=%s leases=%d error=%s", backend.alias, leases, error
    )


def _soon(hold: Hold) -> float:
    """Seconds until a renewal that could not be made is tried again."""
    return min(hold.terms.interval / 4, 1.0)


def announce_loss(hold: Hold, reason: str) -> None:
    """Log a loss and run the callbacks in a thread of their own."""
    held_for = clock.monotonic() - hold.started
    logger.warning(
        "lost key=%r backend=%s owner=%s fencing_token=%s held_for=%.3f reason=%s",
        hold.grant.key,
        hold.backend.alias,
        hold.grant.owner,
        hold.grant.version,
        held_for,
        reason,
    )
    from .locks import Lock

    if hold.callbacks or lock_lost.receivers:
        run_callbacks(
            hold,
            partial(
                lock_lost.send_robust,
                sender=Lock,
                key=hold.grant.key,
                backend=hold.backend.alias,
                owner=hold.grant.owner,
                fencing_token=hold.grant.version,
                held_for=held_for,
                reason=reason,
            ),
        )


def run_callbacks(hold: Hold, *more: Callable[[], object]) -> None:
    """Call what waits for the loss of a hold, each once, in a thread of its own."""

    def call() -> None:
        with hold.mutex:
            callbacks, hold.callbacks = hold.callbacks, []
        try:
            for ref, callback in callbacks:
                lease = ref()
                if lease is not None:
                    try:
                        callback(lease)
                    except Exception:
                        logger.exception("on_lost failed key=%r", hold.grant.key)
            for function in more:
                function()
        finally:
            connections.close_all()

    try:
        threading.Thread(target=call, name="dblocks-callbacks", daemon=True).start()
    except RuntimeError as error:
        logger.error("on_lost is not called key=%r error=%s", hold.grant.key, error)


timekeeper = Timekeeper()


def _after_fork_in_child() -> None:
    refs = list(timekeeper._holds.values())
    timekeeper.reset()
    for ref in refs:
        hold = ref()
        if hold is not None:
            hold.mutex = threading.RLock()
            hold.lost_reason = hold.lost_reason or "forked"


os.register_at_fork(after_in_child=_after_fork_in_child)
