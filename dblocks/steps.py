"""Code that waits in steps, written once for threads and for event loops.

A generator yields what is to be done next and is sent the result. Whoever runs it
decides where: :func:`run` does everything in the calling thread, :func:`arun` makes
the calls in threads and waits in the event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Generic, TypeVar

from asgiref.sync import sync_to_async

from .waiting import Place

T = TypeVar("T")


class Call:
    """Call this where database calls are made; its result is sent back."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function


class Aside(Call):
    """Call this, which may block; in an event loop in a thread of its own."""

    __slots__ = ()


class Pause:
    """Wait until the place is woken, or for so long; sends back whether it was."""

    __slots__ = ("place", "seconds")

    def __init__(self, place: Place, seconds: float) -> None:
        self.place = place
        self.seconds = seconds


Step = Call | Pause


def run(steps: Generator[Step, Any, T]) -> T:
    """Run steps in this thread."""
    result: object
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, Pause):
                    result = step.place.wait(step.seconds)
                else:
                    result = step.function()
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        steps.close()


async def arun(
    steps: Generator[Step, Any, Any], *, kind: type[T], undo: Callable[[T], object]
) -> Any:
    """Run steps from an event loop.

    Args:
        kind: What must not be forgotten if a call ends with it and the task that
            waited for the call was cancelled meanwhile.
        undo: Called with it then, in the thread of the call.
    """
    result: object
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, Pause):
                    result = await step.place.await_(step.seconds)
                elif isinstance(step, Aside):
                    await _aside(step.function)
                    result = None
                else:
                    result = await _Awaited(step.function, kind, undo).result()
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        return stop.value
    finally:
        steps.close()


async def _aside(function: Callable[[], object]) -> None:
    """Run a blocking function in a thread of its own.

    Not in the loop's pool, which as many waiting keys could use up, nor in the thread
    that asgiref shares, where the holder's release would stand behind it.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def call() -> None:
        error = None
        try:
            function()
        except Exception as caught:
            error = caught
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=call, name="dblocks-gate", daemon=True).start()
    await done


class _Awaited(Generic[T]):
    """A call in a thread, undone if nobody waits for it any more."""

    def __init__(
        self, function: Callable[[], object], kind: type[T], undo: Callable[[T], object]
    ) -> None:
        self._function = function
        self._kind = kind
        self._undo = undo
        self._mutex = threading.Lock()
        self._abandoned = False
        self._kept: T | None = None

    async def result(self) -> object:
        try:
            return await sync_to_async(self._run)()
        except asyncio.CancelledError:
            with self._mutex:
                self._abandoned = True
                kept, self._kept = self._kept, None
            if kept is not None:
                # In the thread that it came from, whose connection may be the only
                # one that sees it (a TestCase's); a second cancel doesn't stop it.
                undoing = asyncio.ensure_future(sync_to_async(self._undo)(kept))
                await asyncio.shield(undoing)
            raise

    def _run(self) -> object:
        if not self._is_awaited(None):
            return None
        result = self._function()
        kept = result if isinstance(result, self._kind) else None
        if not self._is_awaited(kept) and kept is not None:
            self._undo(kept)
        return result

    def _is_awaited(self, kept: T | None) -> bool:
        """Tell whether somebody waits; who ceases to from now on undoes this."""
        with self._mutex:
            self._kept = None if self._abandoned else kept
            return not self._abandoned
