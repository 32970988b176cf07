"""Gates of SQLite: locks on single bytes of an empty file beside the database.

The kernel frees them when a process ends, and wakes who waits. They say who may look,
never who holds: the row does.

A key has two bytes. Who has the key keeps the first, so that nobody must write to
find it taken. Of those that wait, each in a thread of its own, one at a time has the
second and waits for the first; whoever comes meanwhile stands behind it.

The locks belong to open file descriptions (``F_OFD_SETLK``, Linux): other threads'
exclude each other too, and closing another descriptor of the file frees none. The
garbage collector or a signal handler may come in the middle of any of this.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
import weakref
from collections import deque
from contextlib import suppress
from functools import cache

from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ... import forks
from ..gates import Gate, GateClosed
from .dialects.base import digest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("dblocks")

SUFFIX = "-dblocks"
"""What the file is called, after the database's name."""

AVAILABLE = hasattr(fcntl, "F_OFD_SETLK") and struct.calcsize("P") == 8

KEPT_IDLE = 8
"""Descriptors of a file that are kept for the next gates."""

MOST_ASKERS = 64
"""Threads of this process that queue in the kernel; further waiters do without."""

_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock``: type, whence, start, length, process."""


class _Descriptor:
    """An open file description, which locks bytes for one gate at a time."""

    _number = -1

    def __init__(self, path: str) -> None:
        self._path = path
        # As SQLite does it for its own files beside the database.
        mode = os.stat(path).st_mode & 0o666
        self._number = os.open(path + SUFFIX, os.O_RDWR | os.O_CREAT, mode)
        self._file = os.fstat(self._number)
        _open.add(self)

    @classmethod
    def take(cls, path: str) -> _Descriptor:
        idle = _idle.setdefault(path, deque())
        while idle:
            try:
                descriptor = idle.pop()
            except IndexError:
                break
            if descriptor.is_current():
                return descriptor
            descriptor.close()
        return cls(path)

    def is_current(self) -> bool:
        """Tell whether the file is still the one that others would open."""
        try:
            return os.path.samestat(os.stat(self._path + SUFFIX), self._file)
        except FileNotFoundError:
            return False

    def give_back(self) -> None:
        """Keep it, without locks, for the next gate."""
        idle = _idle.setdefault(self._path, deque())
        if len(idle) >= KEPT_IDLE:
            self.close()
            return
        # As another object: the garbage collector may be about to finalize this one,
        # and a gate of the same garbage gives it back.
        kept = _Descriptor.__new__(_Descriptor)
        kept._path, kept._file = self._path, self._file
        kept._number, self._number = self._number, -1
        if kept._number >= 0:
            _open.add(kept)
            idle.append(kept)

    def __del__(self) -> None:
        # Whatever an interrupt kept from its gate is free again.
        self.close()

    def lock(self, byte: int, *, wait: bool = False) -> bool:
        """Lock a byte; whether it was had."""
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            self._call(command, fcntl.F_WRLCK, byte)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.EACCES}:
                return False
            raise
        return True

    def is_free(self, byte: int) -> bool:
        """Tell whether nobody else has a byte locked."""
        answer = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte)
        return bool(_FLOCK.unpack(answer)[0] == fcntl.F_UNLCK)

    def unlock(self, byte: int) -> None:
        if self._number >= 0:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def _call(self, command: int, kind: int, byte: int) -> bytes:
        flock = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        return fcntl.fcntl(self._number, command, flock)

    def close(self) -> None:
        number, self._number = self._number, -1
        if number >= 0:
            os.close(number)


_open: weakref.WeakSet[_Descriptor] = weakref.WeakSet()
_idle: dict[str, deque[_Descriptor]] = {}

_mutex = threading.RLock()
"""Kept for an instant, by who changes what an asker knows of its gate."""

_askers: dict[tuple[str, int], _Asker] = {}
"""The threads that queue for a byte, one at most for each in this process."""


class _Asker(threading.Thread):
    """Queues for a key's bytes, which nothing can stop, and hands the first one on.

    Should its gate be left meanwhile, another of this process may take its place.
    """

    def __init__(self, descriptor: _Descriptor, path: str, byte: int) -> None:
        super().__init__(name="dblocks-queue", daemon=True)
        self._descriptor = descriptor
        self._place = path, byte
        self.gate: FileLock | None = None

    def give_up(self) -> None:
        """Queue for nothing: no thread can be started."""
        with _mutex:
            if _askers.get(self._place) is self:
                del _askers[self._place]
        self._descriptor.close()

    def run(self) -> None:
        descriptor, (_, byte) = self._descriptor, self._place
        error = None
        try:
            descriptor.lock(byte + 1, wait=True)
            descriptor.lock(byte, wait=True)
            descriptor.unlock(byte + 1)
        except OSError as raised:
            error = raised
        with _mutex:
            if _askers.get(self._place) is self:
                del _askers[self._place]
            gate, self.gate = self.gate, None
            if gate is not None and error is None:
                gate.receive(descriptor)
        if error is not None:
            logger.debug("no gate file=%s error=%s", self._place[0] + SUFFIX, error)
            descriptor.close()
        elif gate is None:
            descriptor.unlock(byte)
            descriptor.give_back()


def gate_of(connection: Connection, key: str) -> FileLock | None:
    """Return the gate of a key, not yet entered, where there are such gates."""
    path = str(connection.settings_dict["NAME"])
    if not AVAILABLE or path.startswith("file:"):
        return None
    return FileLock(_real_path(os.path.abspath(path)), key)


#: By any name, a file has one queue. To follow links takes longer than the lock.
_real_path = cache(os.path.realpath)


class FileLock(Gate):
    """A gate for one key of one database."""

    _descriptor: _Descriptor | None = None

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        self._byte = int.from_bytes(digest(path, key)[:7], "big") * 2
        self._bell = threading.Lock()
        self._bell.acquire()

    def try_enter(self) -> bool:
        """Enter if nobody has the key's byte and nobody queues for it."""
        try:
            descriptor = _Descriptor.take(self._path)
            if descriptor.is_free(self._byte + 1) and descriptor.lock(self._byte):
                self._descriptor, self.held = descriptor, True
            else:
                descriptor.give_back()
        except OSError as error:
            raise GateClosed from error
        return self.held

    def is_free(self) -> bool:
        """Tell whether nobody has entered it or queues for it."""
        with suppress(OSError):
            descriptor = _Descriptor.take(self._path)
            try:
                return all(map(descriptor.is_free, (self._byte, self._byte + 1)))
            finally:
                descriptor.give_back()
        return True

    def enter(self, seconds: float) -> None:
        new = None
        try:
            with _mutex:
                if not self._asks() and not self.try_enter():
                    new = self._ask()
            # A thread that starts may be the one to collect garbage, and with it gates.
            if new is not None:
                new.start()
        except (OSError, RuntimeError) as error:
            if new is not None and new.ident is None:
                new.give_up()
            raise GateClosed from error
        if not self.held:
            self._bell.acquire(timeout=seconds)

    def _asks(self) -> bool:
        """Tell whether a thread queues for it, be it one that is left over."""
        asker = _askers.get((self._path, self._byte))
        if asker is None or (asker.gate is None and asker.ident is None):
            # An interrupt kept it from its start.
            return False
        if asker.gate is None:
            asker.gate = self
        elif asker.gate is not self:
            raise GateClosed
        return True

    def _ask(self) -> _Asker:
        if len(_askers) >= MOST_ASKERS:
            raise GateClosed
        asker = _Asker(_Descriptor.take(self._path), self._path, self._byte)
        asker.gate = self
        _askers[self._path, self._byte] = asker
        return asker

    def receive(self, descriptor: _Descriptor) -> None:
        """Enter, by an asker."""
        self._descriptor, self.held = descriptor, True
        with suppress(RuntimeError):
            self._bell.release()

    def leave(self) -> None:
        with _mutex:
            asker = _askers.get((self._path, self._byte))
            if asker is not None and asker.gate is self:
                asker.gate = None
            descriptor, self._descriptor = self._descriptor, None
            self.held = False
        if descriptor is not None:
            descriptor.unlock(self._byte)
            descriptor.give_back()

    def __del__(self) -> None:
        # Run by the garbage collector, perhaps in a thread that the mutex waits for.
        # Nobody queues for a gate that is forgotten: its asker would remember it.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            descriptor.close()


def _forget_after_fork() -> None:
    global _mutex
    _mutex = threading.RLock()
    _askers.clear()
    _idle.clear()
    for descriptor in list(_open):
        # The parent's locks are on the description, and stay.
        descriptor.close()


forks.in_child(_forget_after_fork)
