"""Reports losses and requests to finish, each in a thread of its own.

If a log handler, a callback or a receiver of the signal blocks or raises, it delays no
deadline, no renewal, and no other lease's news.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from django.db import connections

from .. import clock, forks, signals

if TYPE_CHECKING:
    from .holds import Callbacks, Hold

logger = logging.getLogger("dblocks")

NEWS = "dblocks-news"
"""The name of the threads."""

AT_EXIT = 1.0
"""Seconds for which a process that ends waits until its news has been told."""

pending: deque[Callable[[], object]] = deque()
forks.in_child(pending.clear)


def tell_loss(hold: Hold, reason: str) -> None:
    """Log that a hold is lost, run its callbacks and send the signal."""
    held_for = clock.monotonic() - hold.started
    facts = hold.facts(held_for=held_for, reason=reason)

    def news() -> None:
        _run(hold.loss_callbacks)
        hold.leave_gate()
        if (observer := signals.observer) is not None:
            _guarded(observer.lost, hold, held_for, reason)
        _guarded(signals.lock_lost.send_robust, hold.sender, **facts)
        # Last, because a log handler may have to wait for another thread's record.
        _guarded(
            logger.warning,
            "lost key=%(key)r permit=%(permit)s backend=%(backend)s owner=%(owner)s "
            "fencing_token=%(fencing_token)s held_for=%(held_for).3f reason=%(reason)s",
            signals.shown(facts),
        )

    apart(news)


def tell_request(hold: Hold) -> None:
    """Log that the holder is asked to finish, run callbacks and send the signal."""
    facts = hold.facts(held_for=clock.monotonic() - hold.started)

    def news() -> None:
        _run(hold.request_callbacks)
        _guarded(signals.lock_release_requested.send_robust, hold.sender, **facts)
        _guarded(
            logger.info,
            "asked to release key=%(key)r permit=%(permit)s backend=%(backend)s "
            "owner=%(owner)s fencing_token=%(fencing_token)s held_for=%(held_for).3f",
            signals.shown(facts),
        )

    apart(news)


def call_back(callbacks: Callbacks) -> None:
    """Run callbacks whose news is known already."""
    apart(lambda: _run(callbacks))


def apart(function: Callable[[], object]) -> None:
    """Call a function in a thread of its own, as soon as one can be started."""
    pending.append(function)
    start_pending()


def start_pending() -> None:
    """Start the threads that couldn't be started before."""
    for _ in range(len(pending)):
        try:
            threading.Thread(target=_run_one, name=NEWS, daemon=True).start()
        except RuntimeError:
            return


def settle(seconds: float) -> None:
    """Wait at most this long until all news has been told.

    A daemon thread that writes to standard error while the interpreter shuts down would
    make it abort.
    """
    until = clock.monotonic() + seconds
    # A thread that is only just being started can't be joined.
    while clock.monotonic() < until and (
        pending or any(thread.name == NEWS for thread in threading.enumerate())
    ):
        start_pending()
        time.sleep(0.01)


atexit.register(settle, AT_EXIT)


def _run_one() -> None:
    try:
        function = pending.popleft()
    except IndexError:
        return
    try:
        function()
    finally:
        connections.close_all()


def _run(callbacks: Callbacks) -> None:
    with suppress(IndexError):
        while True:
            ref, callback = callbacks.pop(0)
            lease = ref()
            if lease is not None and not lease._is_released:
                _guarded(callback, lease)


def _guarded(function: Callable[..., object], *args: object, **kwargs: object) -> None:
    try:
        function(*args, **kwargs)
    except BaseException:
        with suppress(BaseException):
            logger.exception("failed when told of a lease: %r", function)
