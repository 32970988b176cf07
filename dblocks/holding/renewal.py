"""Renewing leases in time, and noticing on time when they are lost.

The scheduler, one thread for all holds of the process, does no I/O and runs no foreign
code, so nothing can delay the news that a lease is over. For each backend that has
something to renew, a renewal thread sends all renewals that are due together. If it
hangs on a dead socket, it is abandoned and replaced once half of the time that its
leases had left is over, or as soon as other leases are due that can't wait. Threads of
both kinds linger when there is nothing left to do: starting a thread for each short
lock would cost more than the lock.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import weakref
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from django.db import connections

from .. import clock, forks
from ..backends.base import BaseBackend
from ..backends.values import Grant, Renewal, Renewed
from . import news
from .holds import Hold
from .registry import registry

logger = logging.getLogger("dblocks")

LONGEST_SLEEP = 0.5
"""Seconds after which the scheduler looks for forgotten holds."""

LINGER = 2.0
"""Seconds after which a scheduler that has nothing to watch ends."""


class RenewalScheduler:
    """Watches over the process's holds: their renewals and deadlines."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._wakes_at = 0.0
        #: A hold was added since the scheduler last looked.
        self._used = False
        self._workers: dict[BaseBackend, _Worker] = {}

    def watch(self, *holds: Hold) -> None:
        """Watch over holds until they are released, lost or forgotten."""
        for hold in holds:
            registry.add(hold)
        self._used = True
        # Once: it may be about to end.
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._start()
        elif min([min(x.renew_at, x.deadline) for x in holds]) < self._wakes_at:
            self.hurry()

    def hurry(self) -> None:
        """Have the scheduler look now: the clock was moved, or something became due."""
        self._wakes.put(None)

    def _start(self) -> None:
        # If two are started at the same time, or a start was interrupted, the one that
        # is named here goes on.
        try:
            self._thread = threading.Thread(
                target=self._run, name="dblocks-scheduler", daemon=True
            )
            self._thread.start()
        except RuntimeError:
            # The interpreter is shutting down, or can't run (daemon) threads.
            logger.warning("leases are not renewed: no thread can be started")

    def _run(self) -> None:
        me = threading.current_thread()
        idle_since = clock.monotonic()
        while self._thread is me:
            now = clock.monotonic()
            self._look(now)
            if not registry.is_empty() or self._used or self._workers or news.pending:
                idle_since, self._used = now, False
            elif now - idle_since >= LINGER:
                self._thread = None
                # A hold that was added in the meantime has seen a running scheduler.
                if registry.is_empty() or self._thread is not None:
                    return
                self._thread = me
            self._sleep()

    def _look(self, now: float) -> None:
        """Report losses, and send the renewals that are due."""
        live: list[Hold] = []
        for hold in registry.all():
            if hold.is_referred_to():
                if hold.is_live():
                    live.append(hold)
                    continue
                # After the look above: otherwise a hold that became overdue between the
                # two calls would be dropped without a report of its loss.
                hold.note_overdue()
                if hold.is_live():
                    continue
            registry.discard(hold)
        registry.forget(now)
        news.start_pending()
        for backend, batch in _due(live, now).items():
            self._send(backend, batch)
        needed = {hold.backend for hold in live if hold.terms.renew}
        for backend, worker in list(self._workers.items()):
            lingers = backend in needed or now - worker.used_at < LINGER
            hangs = worker.batch and worker.give_up_at <= now
            if not lingers or hangs or not worker.is_alive():
                self._dismiss(backend, worker)

    def _dismiss(self, backend: BaseBackend, worker: _Worker) -> None:
        del self._workers[backend]
        worker.end()
        for ref in worker.batch:
            hold = ref()
            if hold is not None:
                hold.renew_at = clock.monotonic()

    def _send(self, backend: BaseBackend, batch: list[Hold]) -> None:
        now, worker = clock.monotonic(), self._workers.get(backend)
        patience = min(hold.terms.interval for hold in batch) / 2
        if worker is not None and worker.batch and now - worker.used_at > patience:
            # It hangs, perhaps on a dead socket; the batch can't wait for it.
            self._dismiss(backend, worker)
            worker = None
        for hold in batch:
            hold.failing = True
            hold.renew_at = now + _soon(hold)
        if worker is None:
            worker = _Worker(self, backend)
            try:
                worker.start()
            except RuntimeError as error:
                _tell_failure(backend, len(batch), error)
                return
            self._workers[backend] = worker
        if not worker.batch:
            worker.take(batch)

    def _sleep(self) -> None:
        now = clock.monotonic()
        self._wakes_at = min(now + LONGEST_SLEEP, _next_event())
        # watch() compared a hold that was added before that line with the old value.
        wakes_at = min(self._wakes_at, _next_event())
        with suppress(queue.Empty):
            if wakes_at > now:
                self._wakes.get(timeout=wakes_at - now)
            while True:
                self._wakes.get_nowait()
        # Until the next sleep it looks by itself.
        self._wakes_at = 0.0


def _next_event() -> float:
    """Return when the first hold is due or over."""
    moments = (min(hold.renew_at, hold.deadline) for hold in registry.all())
    return min(moments, default=math.inf)


def _due(live: list[Hold], now: float) -> dict[BaseBackend, list[Hold]]:
    due: dict[BaseBackend, list[Hold]] = {}
    backends = {hold.backend for hold in live if hold.renew_at <= now}
    for hold in live:
        # Nearly due leases come along, so that a process's leases fall into step.
        nearly = hold.renew_at <= now + hold.terms.interval / 4
        if hold.backend not in backends or not nearly:
            continue
        binding = hold.binding
        if binding.renewal_bar is not None and binding.renewal_bar():
            hold.renew_at = now + _soon(hold)
            continue
        if binding.test_connection is None:
            due.setdefault(hold.backend, []).append(hold)
        else:
            # Only the test can see the row; it is renewed when the test next asks.
            hold.extend(now)
            answer = partial(hold.note_answer, sent=now)
            how = hold.renewal(), answer, hold.is_live
            hold.backend.owe(binding.test_connection, *how)
    return due


class _Worker(threading.Thread):
    """Sends the renewals of one backend."""

    def __init__(self, scheduler: RenewalScheduler, backend: BaseBackend) -> None:
        super().__init__(name=f"dblocks-renewal-{backend.alias}", daemon=True)
        self._scheduler = scheduler
        self._backend = backend
        self._batches: queue.SimpleQueue[bool] = queue.SimpleQueue()
        #: The holds that it is renewing, if any.
        self.batch: list[weakref.ref[Hold]] = []
        self.used_at = clock.monotonic()
        self.give_up_at = 0.0
        self._is_replaced = False

    def end(self) -> None:
        """End, after the present batch; another may be renewing its holds."""
        self._is_replaced = True
        self._batches.put(False)

    def take(self, batch: list[Hold]) -> None:
        """Renew a batch."""
        self.used_at = clock.monotonic()
        for hold in batch:
            # Without an answer until then, there is time for another connection.
            hold.renew_at = _halfway(hold)
        self.give_up_at = max(hold.deadline for hold in batch)
        self.batch = [weakref.ref(hold) for hold in batch]
        self._batches.put(True)

    def run(self) -> None:
        try:
            while self._serve():
                pass
        finally:
            connections.close_all()

    def _serve(self) -> bool:
        """Send renewals until one fails; ``False`` if it is to end.

        The next session has a connection of its own: the present one may lead to a
        server that is no longer the primary.
        """
        with self._backend.renewal_session():
            while self._batches.get():
                succeeded = self._renew()
                self.batch = []
                self._scheduler.hurry()
                if not succeeded:
                    return True
        return False

    def _renew(self) -> bool:
        """Renew the batch; tell whether the engine has answered."""
        held = [
            (ref, hold.renewal())
            for ref in self.batch
            if (hold := ref()) is not None and hold.is_live()
        ]
        hold = None
        if not held:
            return True
        sent = clock.monotonic()
        outcome, failed = Renewed(), False
        try:
            outcome = self._backend.renew(_longest(each for _, each in held))
        except Exception as error:
            failed = True
            _tell_failure(self._backend, len(held), error)
        for ref, _ in held:
            hold = ref()
            if hold is None:
                continue
            if hold.note_answer(outcome, sent):
                if self._is_replaced:
                    # A late answer must not make the renewal due that replaced it.
                    hold.renew_at = max(hold.renew_at, _halfway(hold))
            elif not self._is_replaced:
                # Not if a transaction has the row locked: then the engine has answered.
                hold.failing = failed or hold.grant in outcome.out_of_reach
                hold.renew_at = clock.monotonic() + _soon(hold)
        if outcome.out_of_reach:
            why = "too few servers have them, or could be asked"
            _tell_failure(self._backend, len(outcome.out_of_reach), why)
        return not failed


def _longest(renewals: Iterable[Renewal]) -> list[Renewal]:
    """Return one renewal for each grant: holds of one owner may differ in length."""
    longest: dict[Grant, Renewal] = {}
    for each in renewals:
        known = longest.setdefault(each.grant, each)
        if known.lease < each.lease:
            longest[each.grant] = each
    return list(longest.values())


def _tell_failure(backend: BaseBackend, leases: int, error: object) -> None:
    text = "renewal failed backend=%s leases=%d error=%s"
    news.apart(partial(logger.warning, text, backend.alias, leases, error))


def _halfway(hold: Hold) -> float:
    """Return the moment when half of the time that a hold has left will be over."""
    return (clock.monotonic() + hold.deadline) / 2


def _soon(hold: Hold) -> float:
    """Return the seconds until a failed renewal is tried again."""
    return min(hold.terms.interval / 4, 1.0)


scheduler = RenewalScheduler()
forks.in_child(scheduler.__init__)  # type: ignore[misc]
