"""The queue for a key in the server, where each waiter blocks on a bell of its own.

A release tells the first waiter that the key is free, and keeps it for that waiter for
a quarter of a second. It tells the next waiters when to look, one after the other, in
case those before them have died, and also the last waiters, in case all of those have.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from contextlib import suppress

from redis.exceptions import ClusterDownError, RedisError, TryAgainError

from ... import clock
from ..gates import Gate
from ..values import Request
from .client import LASTING, UNREACHABLE
from .server import MICRO, Server

logger = logging.getLogger("dblocks")

LONGEST = 25.0
"""Seconds between two looks at a key that nobody releases."""

LONGEST_OF_CO_OWNER = 1.0
"""The same for an explicit owner, which may get the key in another thread meanwhile."""


class Doorbell(Gate):
    """One waiter's place in the queue, and its bell."""

    is_bell = True

    def __init__(self, server: Server, request: Request) -> None:
        self._server = server
        self._request = request
        self._ticket = f"{os.urandom(8).hex()} {request.holder}"
        self._pid = os.getpid()
        self._queues = False
        self._left = False

    @property
    def ticket(self) -> str:
        """The waiter's name in the queue; an empty string if it isn't there."""
        return self._ticket if self._queues else ""

    def patience(self, remaining: float) -> float:
        # The server says when to look before that.
        return LONGEST_OF_CO_OWNER if self._request.explicit else LONGEST

    def enter(self, seconds: float) -> None:
        if self._left:
            return
        self._queues = True
        try:
            self.held = self._queue(seconds)
        except LASTING:
            raise
        except (*UNREACHABLE, TryAgainError, ClusterDownError):
            # The reading that follows sits the fault out for as long as the caller
            # waits. Other errors are raised, because reading doesn't meet them.
            self.held = False
        finally:
            self._leave_if_left()

    def _queue(self, seconds: float) -> bool:
        if self._left:
            return False
        until = clock.monotonic() + seconds
        is_free, turn = self._server.queue(self._request, self._ticket, seconds)
        return is_free or self._listen(min(until - clock.monotonic(), turn))

    def _leave_if_left(self) -> None:
        # Another thread may have left in the meantime.
        if self._left:
            self._leave()

    def _listen(self, seconds: float) -> bool:
        until = clock.monotonic() + seconds
        while (left := until - clock.monotonic()) > 0:
            word = self._server.listen(self._request.key, self._ticket, left)
            if not word.isdigit():
                return word == "go"
            until = min(until, clock.monotonic() + int(word) / MICRO)
        return False

    def answered(self, *, granted: bool) -> None:
        """Note the answer to an attempt: the key is kept for this waiter no longer.

        Args:
            granted: The waiter got the key, and no longer queues.
        """
        self.held = False
        if granted:
            self._queues = False

    def leave(self) -> None:
        self._left, self.held = True, False
        if not self._queues or self._pid != os.getpid():
            return
        if asyncio._get_running_loop() is None:
            self._leave()
            return
        with suppress(RuntimeError):
            threading.Thread(target=self._leave, daemon=True).start()

    def _leave(self) -> None:
        self._queues = False
        try:
            self._server.leave(self._request.key, self._ticket)
        except RedisError as error:
            # The queue forgets a waiter that doesn't ask again.
            logger.debug("not left the queue key=%r error=%s", self._request.key, error)
