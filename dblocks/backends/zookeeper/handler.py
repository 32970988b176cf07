"""What kazoo runs on: threads, sockets and answers.

A signal handler or the garbage collector may use locks in the middle of a request. So
that nothing blocks their answers then, callers share no mutex with kazoo's threads.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from typing import Any

from kazoo.handlers.threading import KazooTimeoutError, SequentialThreadingHandler

from ...bells import Bell

CONNECT_WITHIN = 3.0
"""Seconds for the first connection, and for trying the only server."""

TRIES = 3
"""How many servers, if there are that many, can be tried in that time."""


class Answer:
    """The answer to a request, with the interface of kazoo's own.

    kazoo's callbacks are called in the thread that brings the answer.
    """

    def __init__(self) -> None:
        self.value: Any = None
        self.exception: BaseException | None = None
        self._is_here = False
        self._bell = Bell()
        self._callbacks: deque[Callable[[Answer], object]] = deque()

    def ready(self) -> bool:
        return self._is_here

    def successful(self) -> bool:
        return self._is_here and self.exception is None

    def set(self, value: Any = None) -> None:
        self.value = value
        self._arrives()

    def set_exception(self, exception: BaseException) -> None:
        self.exception = exception
        self._arrives()

    def _arrives(self) -> None:
        self._is_here = True
        self._bell.ring()
        self._call_back()

    def rawlink(self, callback: Callable[[Answer], object]) -> None:
        self._callbacks.append(callback)
        if self._is_here:
            self._call_back()

    def _call_back(self) -> None:
        with suppress(IndexError):
            while True:
                self._callbacks.popleft()(self)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_here and self._bell.wait(
            threading.TIMEOUT_MAX if timeout is None else timeout
        ):
            # For the next thread that waits.
            self._bell.ring()
        return self._is_here

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not (self.wait(timeout) if block else self._is_here):
            raise KazooTimeoutError
        if self.exception is not None:
            # A copy: with its traceback, the answer's own exception would keep all
            # callers' frames, and their leases, until the garbage collector comes.
            raise copy(self.exception)
        return self.value


class Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """One thread, and sockets that a forked child can let go of.

    Callbacks and completions run in it, and not in more threads: they don't block.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Seconds for trying each server.
        self.try_within = CONNECT_WITHIN
        self._sockets: set[socket.socket] = set()
        self._latest: socket.socket | None = None
        #: Whether to stop without telling the server that the session ends.
        self.breaks_off = False

    def start(self) -> None:
        self._running = True

    def stop(self) -> None:
        self._running = False
        if self.breaks_off:
            # kazoo's thread may be waiting for a silent server.
            self.hang_up()

    def dispatch_callback(self, callback: Any) -> None:
        callback.func(*callback.args)

    def select(
        self, readers: Any, writers: Any, others: Any, timeout: float | None = None
    ) -> tuple[list[Any], list[Any], list[Any]]:
        if not hasattr(select, "poll"):
            found: tuple[list[Any], list[Any], list[Any]]
            found = super().select(readers, writers, others, timeout)
            return found
        # kazoo's own makes an epoll object each time, which takes longer.
        poll = select.poll()
        for each in readers:
            poll.register(each, select.POLLIN)
        for each in writers:
            poll.register(each, select.POLLOUT)
        ready = dict(poll.poll(None if timeout is None else timeout * 1000))
        return (
            [each for each in readers if each.fileno() in ready],
            [each for each in writers if each.fileno() in ready],
            [],
        )

    def async_result(self) -> Answer:
        return Answer()

    def spawn(
        self, func: Callable[..., object], *args: Any, **kwargs: Any
    ) -> threading.Thread:
        thread = threading.Thread(
            target=func,
            args=args,
            kwargs=kwargs,
            name="dblocks-zookeeper-client",
            daemon=True,
        )
        thread.start()
        return thread

    def create_connection(self, *args: Any, **kwargs: Any) -> socket.socket:
        kwargs["timeout"] = min(kwargs["timeout"], self.try_within)
        made: socket.socket = super().create_connection(*args, **kwargs)
        self._latest = made
        self._sockets = {made, *(each for each in self._sockets if each.fileno() >= 0)}
        return made

    def create_socket_pair(self) -> tuple[socket.socket, socket.socket]:
        pair: tuple[socket.socket, socket.socket] = super().create_socket_pair()
        self._sockets |= set(pair)
        return pair

    def hang_up(self) -> None:
        """Break the connection; kazoo makes another one, perhaps to another server."""
        if self._latest is not None:
            with suppress(OSError):
                self._latest.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Close this process's ends without telling the server."""
        for each in self._sockets:
            with suppress(OSError):
                # Not through TLS, which would send the server a message.
                socket.close(each.detach())
