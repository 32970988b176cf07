"""Who "I" am: the thread, the asyncio task, the call that asgiref makes for one.

An :class:`Owner` is one line of execution. Its locks are re-entrant for it, and no
other line of execution is ever mistaken for it: thread numbers are used again and
context variables are copied into child tasks, so neither serves.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import weakref
from types import FrameType
from typing import TYPE_CHECKING

from asgiref.sync import SyncToAsync

if TYPE_CHECKING:
    from .backends.base import BaseBackend
    from .holds import Hold
    from .leases import Lease


class Owner:
    """A line of execution, with what it holds.

    Attributes:
        holds: Its own holds, by backend and key. Weak: a hold lives as long as
            its leases.
        leases: Its leases in the order of acquisition, the innermost last.
        name: The thread's or the task's name, for people.
    """

    __slots__ = ("__weakref__", "holds", "leases", "name")

    def __init__(self, name: str) -> None:
        # A thread's name may hold what no text column takes.
        self.name = name.encode(errors="replace").decode().replace("\0", "?")
        self.holds: weakref.WeakValueDictionary[tuple[BaseBackend, str], Hold] = (
            weakref.WeakValueDictionary()
        )
        self.leases: list[weakref.ref[Lease]] = []

    def add(self, lease: Lease) -> None:
        """Remember a lease as the innermost one."""
        self.leases = [ref for ref in self.leases if _is_open(ref)]
        self.leases.append(weakref.ref(lease))

    def innermost(self, key: str | None = None) -> Lease | None:
        """Return the innermost open lease, of one key or of any."""
        for ref in reversed(self.leases):
            lease = ref()
            if lease is not None and lease.open and key in (None, lease.key):
                return lease
        return None


def _is_open(ref: weakref.ref[Lease]) -> bool:
    lease = ref()
    return lease is not None and lease.open


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
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
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

    asgiref's thread-local list names the latest call, also when that is over; only the
    stack tells whether one is running.
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


def _describe_process() -> str:
    return f"{socket.gethostname()} pid {os.getpid()}"


_process = _describe_process()


def holder(owner: Owner) -> str:
    """Describe an owner for people: host, process, thread or task."""
    return f"{_process} {owner.name}"[:255]


def _forget_after_fork() -> None:
    global _process
    _process = _describe_process()
    _thread.__dict__.clear()
    _thread.__init__()  # type: ignore[misc]
    _tasks.clear()


os.register_at_fork(after_in_child=_forget_after_fork)
