"""Threads of dblocks' own, in which async code asks the engine.

Not asgiref's thread, because sync code may occupy it: a release would queue behind the
very waiter that waits for it. And not the event loop's pool, because waiters could use
it up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Generic, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections

from ..backends.base import BaseBackend
from ..backends.database.own_connections import run_apart
from ..workers import Workers

logger = logging.getLogger("dblocks")

T = TypeVar("T")


@contextmanager
def _apart() -> Iterator[None]:
    run_apart()
    try:
        yield
    finally:
        connections.close_all()


workers = Workers("dblocks-async", _apart)


async def call_in_thread(
    backend: BaseBackend,
    function: Callable[[], T],
    undo: Callable[[T], object] | None = None,
) -> T:
    """Call a function that asks an engine, without blocking the event loop.

    The call is made whatever becomes of the task. In a ``TestCase`` it runs in the
    test's thread, because only that thread's connection sees the test's rows.

    Args:
        undo: Called with the result, in a thread, if the task was cancelled meanwhile.
    """
    start = _start_in_test if backend.is_in_test_case() else workers.start
    call = _Call(function, undo)
    start(call)
    try:
        return await call.received
    except BaseException as error:
        if not call.ends_first() and not call.failed_with(error):
            start(call.drop)
        raise
    finally:
        # The call's error would keep this frame, and with it its callers' frames and
        # leases, until the garbage collector comes.
        del call


#: Kept here, because the event loop has only weak references to its tasks.
_tasks_in_test: set[asyncio.Future[None]] = set()


def _start_in_test(call: Callable[[], None]) -> None:
    _tasks_in_test.add(task := asyncio.ensure_future(sync_to_async(call)()))
    task.add_done_callback(_tasks_in_test.discard)


class _Call(Generic[T]):
    """A call whose result the task receives, or else is undone.

    The call and the wait for it end in any order, and the event loop may be closed
    before it passes the result on. Whichever of the two ends last handles the result.
    """

    def __init__(
        self, function: Callable[[], T], undo: Callable[[T], object] | None
    ) -> None:
        self._function = function
        self._undo = undo
        self._error: BaseException | None = None
        self._first = [None]
        self._loop = asyncio.get_running_loop()
        self.received: asyncio.Future[T] = self._loop.create_future()

    def __call__(self) -> None:
        try:
            try:
                self._result = self._function()
            except BaseException as error:
                self._error = error
            if self.ends_first():
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._pass_on)
                    return
                # The loop is closed, and its waiters are gone.
            self.drop()
        finally:
            # As in call_in_thread().
            del self

    def failed_with(self, error: BaseException) -> bool:
        return error is self._error

    def ends_first(self) -> bool:
        """Tell whether the call or the wait, whichever asks, is the first to end."""
        try:
            self._first.pop()
        except IndexError:
            return False
        return True

    def drop(self) -> None:
        """Undo the result, which nobody receives."""
        undo, self._undo = self._undo, None
        if self._error is not None:
            logger.warning("failed when nobody waited any more error=%s", self._error)
        elif undo is not None:
            undo(self._result)

    def _pass_on(self) -> None:
        if self.received.done():
            return
        if self._error is not None:
            self.received.set_exception(self._error)
        else:
            self.received.set_result(self._result)
