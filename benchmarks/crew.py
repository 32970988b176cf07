"""Processes that measure: forked for one task each, with connections of their own."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")

START_TIMEOUT = 60.0

_context = multiprocessing.get_context("fork")

# The types of what is shared by processes have no names to import.
Barrier = Any
Event = Any


class CrewError(Exception):
    """A measuring process failed; the message is its traceback."""


def barrier(parties: int) -> Barrier:
    """Make a barrier at which processes wait for each other before they begin."""
    return _context.Barrier(parties, timeout=START_TIMEOUT)


def event() -> Event:
    """Make an event that one process sets and others see."""
    return _context.Event()


def pipe() -> tuple[Connection[Any, Any], Connection[Any, Any]]:
    """Make a pipe between two processes that are not started yet."""
    return _context.Pipe()


def run(
    function: Callable[..., T], calls: Iterable[Mapping[str, object]] = ({},)
) -> list[T]:
    """Call a function at the same time in as many processes; return what they did.

    Raises:
        CrewError: One of them failed; the others were ended.
    """
    children = []
    try:
        for arguments in calls:
            mine, theirs = _context.Pipe(duplex=False)
            child = _context.Process(
                target=_work, args=(theirs, function, arguments), daemon=True
            )
            child.start()
            theirs.close()
            children.append((child, mine))
        results = []
        for _, mine in children:
            good, result = mine.recv()
            if not good:
                raise CrewError(result)
            results.append(result)
        return results
    except EOFError:
        raise CrewError("A measuring process ended without a result.") from None
    finally:
        for child, mine in children:
            mine.close()
            child.join(1.0)
            if child.is_alive():
                child.kill()
                child.join()
            child.close()


def run_one(function: Callable[..., T], **arguments: object) -> T:
    """Call a function in a process of its own."""
    [result] = run(function, [arguments])
    return result


def _work(
    results: Connection[Any, Any],
    function: Callable[..., object],
    arguments: Mapping[str, object],
) -> None:
    from django.db import connections

    # The parent's handlers unwind its stack; this one has nothing to clean up.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        results.send((True, function(**arguments)))
    except BaseException:
        results.send((False, traceback.format_exc()))
    finally:
        connections.close_all()
