"""Who "I" am: the thread, the asyncio task, or the call that asgiref makes for a task.

An :class:`Owner` is one line of execution. It can re-enter its locks, and no other line
of execution is ever mistaken for it. Thread numbers are reused and context variables
are copied into child tasks, so neither can identify it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from asgiref.sync import SyncToAsync

from .. import forks

if TYPE_CHECKING:
    from ..leases import Lease, Leases


def _describe_process() -> str:
    return f"{socket.gethostname()} pid {os.getpid()}"


_process = _describe_process()


class Owner:
    """A line of execution, with its leases.

    Attributes:
        holder: Host, process, and the thread's or the task's name, for people.
    """

    __slots__ = ("__weakref__", "_leases", "holder")

    def __init__(self, name: str) -> None:
        # A thread's name may have characters that no text column takes.
        name = name.encode(errors="replace").decode().replace("\0", "?")
        self.holder = f"{_process} {name}"[:255]
        self._leases: list[weakref.ref[Any]] = []

    def add(self, *leases: Lease | Leases) -> None:
        """Remember leases; the last one is the innermost."""
        known = self._leases
        if known:
            known = [ref for ref in known if (it := ref()) is not None and it._open]
        self._leases = [*known, *map(weakref.ref, leases)]

    def leases(self, key: str | None = None) -> Iterator[Any]:
        """Yield its open leases, or those of one key, the innermost first."""
        for ref in reversed(self._leases):
            lease = ref()
            if lease is None or not lease._open:
                continue
            if key is None or key == getattr(lease, "key", None):
                yield lease


class _Thread(threading.local):
    owner: Owner | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[object, Owner]] = []


_thread = _Thread()
_tasks: weakref.WeakKeyDictionary[asyncio.Task[object], Owner] = (
    weakref.WeakKeyDictionary()
)


def current() -> Owner:
    """Return the owner that the running code belongs to."""
    # Without a running loop asyncio.current_task() raises, which takes longer.
    loop = asyncio._get_running_loop()
    task = asyncio.current_task(loop) if loop is not None else None
    if task is not None:
        owner = _tasks.get(task)
        if owner is None:
            owner = _tasks[task] = Owner(task.get_name())
        return owner
    if "task_context" in SyncToAsync.threadlocal.__dict__:
        called = _asgiref_call()
        if called is not None:
            return called
    if _thread.owner is None:
        _thread.owner = Owner(threading.current_thread().name)
    return _thread.owner


def _asgiref_call() -> Owner | None:
    """Return the owner for the ``sync_to_async`` call that is under way, if any.

    asgiref's thread-local names the latest call, even when that is over; only the stack
    tells whether one is running.
    """
    running: list[object] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code is SyncToAsync.thread_handler.__code__:
            running.append(frame.f_locals["task_context"])
        frame = frame.f_back
    if not running:
        _thread.calls.clear()
        return None
    _thread.calls = [
        call for call in _thread.calls if any(call[0] is one for one in running)
    ]
    for call, owner in _thread.calls:
        if call is running[0]:
            return owner
    owner = Owner(threading.current_thread().name)
    _thread.calls.append((running[0], owner))
    return owner


def _forget_after_fork() -> None:
    global _process
    _process = _describe_process()
    _thread.__dict__.clear()
    _thread.__init__()  # type: ignore[misc]
    _tasks.clear()


forks.in_child(_forget_after_fork)
