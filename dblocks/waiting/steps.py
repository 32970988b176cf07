"""Where the steps of a wait run: in one thread, or around an event loop.

The wait is written once, as coroutines that leave whatever takes time to one of these
classes. In a thread nothing suspends them, so :func:`run` needs no event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from ..backends.base import BaseBackend
from .queue import Waiter
from .threads import call_in_thread

T = TypeVar("T")


class InThread:
    """Makes every step in the calling thread."""

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function that may wait for the engine."""
        return function()

    async def tell(self, function: Callable[[], object]) -> None:
        """Call a function that runs others' code, such as receivers of a signal."""
        function()

    async def pause(self, waiter: Waiter, seconds: float) -> bool:
        """Wait until woken, or for this long; return whether it was woken."""
        return waiter.wait(seconds)


class InEventLoop(InThread):
    """Makes calls in threads of dblocks' own, and waits in the event loop.

    Args:
        undo: Called with the result of a call, in a thread, if the task that waited
            for it was cancelled meanwhile.
    """

    def __init__(self, backend: BaseBackend, undo: Callable[[Any], object]) -> None:
        self._backend = backend
        self._undo = undo

    async def call(self, function: Callable[[], T]) -> T:
        return await call_in_thread(self._backend, function, self._undo)

    async def tell(self, function: Callable[[], object]) -> None:
        # In a thread: receivers may ask a database, or run an event loop of their own.
        told = partial(copy_context().run, function)
        await call_in_thread(self._backend, told)

    async def pause(self, waiter: Waiter, seconds: float) -> bool:
        return await waiter.await_(seconds)


def run(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Make steps that take place :class:`InThread`, and run them.

    They are made here, and by no function in C: a signal handler that raises before
    their first step would leave behind a coroutine that was never awaited.
    """
    steps = make()
    try:
        while True:
            steps.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        steps.close()
