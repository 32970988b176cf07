"""Code that waits in steps, written once for threads and for event loops.

A generator yields what is to be done next and is sent the result. Whoever runs it
decides where: :func:`run` does everything in the calling thread, :func:`arun` makes
the calls in threads of dblocks' own and waits in the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from ..backends.base import BaseBackend
from .queue import Waiter
from .threads import call_in_thread

T = TypeVar("T")


class Call:
    """Call this, which may take as long as the engine does; its result is sent back."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function


class Pause:
    """Wait until woken, or for so long; whether it was woken is sent back."""

    __slots__ = ("seconds", "waiter")

    def __init__(self, waiter: Waiter, seconds: float) -> None:
        self.waiter = waiter
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
                    result = step.waiter.wait(step.seconds)
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
    steps: Generator[Step, Any, T],
    backend: BaseBackend,
    undo: Callable[[Any], object],
) -> T:
    """Run steps from an event loop.

    Args:
        undo: Called with the result of a call, in a thread, if the task that waited
            for it was cancelled meanwhile.
    """
    result: object
    try:
        step = next(steps)
        while True:
            try:
                if isinstance(step, Pause):
                    result = await step.waiter.await_(step.seconds)
                else:
                    result = await call_in_thread(backend, step.function, undo)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(result)
    except StopIteration as stop:
        value: T = stop.value
        return value
    finally:
        steps.close()
