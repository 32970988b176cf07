"""Telling of losses, each in a thread of its own.

A log handler, a callback or a receiver of the signal may block or raise whatever it
likes: it keeps no deadline waiting, no renewal, and no other lease's news.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from django.db import connections

from .. import clock
from ..signals import lock_lost

if TYPE_CHECKING:
    from .holds import Hold

logger = logging.getLogger("dblocks")

_pending: deque[Callable[[], object]] = deque()
os.register_at_fork(after_in_child=_pending.clear)


def tell(hold: Hold, reason: str) -> None:
    """Log that a hold is lost, run its callbacks and send the signal."""
    held_for = clock.monotonic() - hold.started

    def news() -> None:
        _run_callbacks(hold)
        hold.leave_gate()
        _guarded(
            lock_lost.send_robust,
            sender=hold.sender,
            key=hold.grant.key,
            backend=hold.backend.alias,
            owner=hold.grant.owner,
            fencing_token=hold.grant.version,
            held_for=held_for,
            reason=reason,
        )
        # Last: handlers wait for each other.
        _guarded(_log_loss, hold, reason, held_for)

    apart(news)


def call_back(hold: Hold) -> None:
    """Run the callbacks of a hold that is lost already."""
    apart(lambda: _run_callbacks(hold))


def apart(function: Callable[[], object]) -> None:
    """Call a function in a thread of its own, as soon as one can be started."""
    _pending.append(function)
    start_pending()


def are_pending() -> bool:
    """Tell whether there is news for which no thread could be started."""
    return bool(_pending)


def start_pending() -> None:
    """Start the threads that couldn't be started before."""
    for _ in range(len(_pending)):
        thread = threading.Thread(target=_run_one, name="dblocks-news", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return


def _run_one() -> None:
    try:
        function = _pending.popleft()
    except IndexError:
        return
    try:
        function()
    finally:
        connections.close_all()


def _run_callbacks(hold: Hold) -> None:
    while True:
        try:
            ref, callback = hold.callbacks.popleft()
        except IndexError:
            return
        lease = ref()
        if lease is not None:
            _guarded(callback, lease)


def _log_loss(hold: Hold, reason: str, held_for: float) -> None:
    logger.warning(
        "lost key=%r backend=%s owner=%s fencing_token=%s held_for=%.3f reason=%s",
        hold.grant.key,
        hold.backend.alias,
        hold.grant.owner,
        hold.grant.version,
        held_for,
        reason,
    )


def _guarded(function: Callable[..., object], *args: object, **kwargs: object) -> None:
    try:
        function(*args, **kwargs)
    except BaseException:
        with suppress(BaseException):
            logger.exception("failed when a lease was lost: %r", function)
