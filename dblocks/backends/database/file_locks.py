"""Gates of SQLite: locks on single bytes of an empty file beside the database.

The kernel frees them when a process ends, and wakes the next waiter. They say who may
look, never who holds: the row does.

A key has two bytes. The holder of the key keeps the first locked, so that nobody must
write to find the key taken. Waiters, each in a thread of its own, queue for the second;
the one that has it waits for the first.

The locks belong to open file descriptions (``F_OFD_SETLK``, Linux): so threads exclude
each other too, and closing another descriptor of the file frees none. The garbage
collector or a signal handler may interrupt any of this.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import ClassVar

from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ... import forks
from ...bells import Bell
from ..gates import Gate, GateClosed
from .dialects.base import digest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger("dblocks")

SUFFIX = "-dblocks"
"""What follows the database's name in the name of the file."""

AVAILABLE = (
    # Elsewhere ``struct flock`` has another layout.
    sys.platform == "linux"
    and hasattr(fcntl, "F_OFD_SETLK")
    and struct.calcsize("P") == 8
)

KEPT_IDLE = 32
"""The most descriptors of a file that are kept for later gates: enough for a set."""

MOST_OPEN = 256
"""The most open descriptors with which another gate is entered.

A process may often open no more than 1,024 files, and SQLite needs some for each write.
"""

MOST_ASKERS = 64
"""The most threads of this process that queue in the kernel; others do without."""

_FLOCK = struct.Struct("hhqqi4x")
"""``struct flock``: type, whence, start, length, process."""


class _File:
    """An open file description."""

    #: After a fork the child closes them.
    all_open: ClassVar[set[_File]] = set()

    number = -1

    def open(self, path: str) -> None:
        self.name = path + SUFFIX
        # Mode and owner are the database's, as for SQLite's own files next to it: who
        # can open that can open this, whatever the umask, and even if root makes it.
        database = os.stat(path)
        mode = database.st_mode & 0o666
        try:
            self.number = os.open(self.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
            os.fchmod(self.number, mode)
            if os.geteuid() == 0:
                os.fchown(self.number, database.st_uid, database.st_gid)
        except FileExistsError:
            self.number = os.open(self.name, os.O_RDWR)
        file = os.fstat(self.number)
        self._identity = file.st_ino, file.st_dev
        self.all_open.add(self)

    def is_current(self) -> bool:
        """Tell whether this is still the file that others would open."""
        try:
            file = os.stat(self.name)
        except FileNotFoundError:
            return False
        return self.number >= 0 and (file.st_ino, file.st_dev) == self._identity

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)
            self.all_open.discard(self)


_CLOSED = _File()


class _Descriptor:
    """The use of an open file description, by one gate at a time."""

    _file = _CLOSED

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = _File()
        # Opened once it is an attribute: after an interrupt __del__() closes it.
        self._file.open(path)

    @classmethod
    def take(cls, path: str) -> _Descriptor:
        try:
            idle = _idle[path]
            while True:
                descriptor = idle.pop()
                if descriptor._file.is_current():
                    return descriptor
                descriptor.close()
        except (KeyError, IndexError):
            return cls(path)

    def give_back(self) -> None:
        """Keep it, without locks, for the next gate."""
        idle = _idle.setdefault(self._path, deque())
        if len(idle) >= KEPT_IDLE:
            self.close()
            return
        # As a new object: the garbage collector may be about to finalize this one, if
        # the gate that gives it back is garbage too.
        kept = _Descriptor.__new__(_Descriptor)
        kept._path = self._path
        kept._file, self._file = self._file, _CLOSED
        if kept._file.number >= 0:
            idle.append(kept)

    def __del__(self) -> None:
        # Frees a lock that an interrupt kept from reaching its gate.
        self.close()

    def lock(self, byte: int, *, wait: bool = False) -> bool:
        """Lock a byte; tell whether that succeeded."""
        command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
        try:
            self._call(command, fcntl.F_WRLCK, byte)
        except OSError as error:
            if error.errno in {errno.EAGAIN, errno.EACCES}:
                return False
            raise
        return True

    def is_free(self, byte: int, length: int = 1) -> bool:
        """Tell whether nobody else has any of these bytes locked."""
        answer = self._call(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, byte, length)
        return bool(_FLOCK.unpack(answer)[0] == fcntl.F_UNLCK)

    def unlock(self, byte: int) -> None:
        if self._file.number >= 0:
            self._call(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, byte)

    def _call(self, command: int, kind: int, byte: int, length: int = 1) -> bytes:
        asked = _FLOCK.pack(kind, os.SEEK_SET, byte, length, 0)
        return fcntl.fcntl(self._file.number, command, asked)

    def close(self) -> None:
        self._file.close()


_idle: dict[str, deque[_Descriptor]] = {}

_mutex = threading.RLock()
"""Held for an instant by whoever changes the gate of an asker."""

_askers: dict[tuple[str, int], _Asker] = {}
"""The threads that queue for a byte, at most one for each byte in this process."""


class _Asker(threading.Thread):
    """Queues for a key's bytes, and hands the first one to its gate.

    The kernel's wait can't be stopped. If the gate is left meanwhile, another gate of
    this process may take its place.
    """

    def __init__(self, descriptor: _Descriptor, path: str, byte: int) -> None:
        super().__init__(name="dblocks-queue", daemon=True)
        self._descriptor = descriptor
        self._place = path, byte
        self.gate: FileLock | None = None

    def give_up(self) -> None:
        """Don't queue: no thread can be started."""
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
    """Return the gate of a key, not yet entered, if there are such gates."""
    path = str(connection.settings_dict["NAME"])
    if not AVAILABLE or path.startswith("file:"):
        return None
    if not path.startswith("/"):
        path = os.path.abspath(path)
    return FileLock(_real_path(path), key)


def gates_in_use(connection: Connection, keys: Sequence[str]) -> dict[str, FileLock]:
    """Return the gates of those keys that others have entered or queue for.

    The kernel is asked once if nobody uses any gate of the file.
    """
    first = gate_of(connection, keys[0]) if keys else None
    if first is None or first.is_free(of_all=True):
        return {}
    gates = {key: gate for key in keys if (gate := gate_of(connection, key))}
    return {key: gate for key, gate in gates.items() if not gate.is_free()}


#: A file has one queue, whatever name leads to it. Cached, because following links
#: takes longer than a lock.
_real_path = cache(os.path.realpath)


class FileLock(Gate):
    """A gate for one key of one database."""

    _descriptor: _Descriptor | None = None
    _bell: Bell | None = None

    def __init__(self, path: str, key: str) -> None:
        self._path = path
        self._byte = int.from_bytes(digest(path, key)[:7], "big") * 2

    def try_enter(self) -> bool:
        """Enter if nobody has the key's byte or queues for it."""
        if len(_File.all_open) >= MOST_OPEN:
            # Close the idle descriptors of other files.
            for path in _idle.keys() - {self._path}:
                _idle.pop(path, None)
            if len(_File.all_open) >= MOST_OPEN:
                raise GateClosed
        try:
            descriptor = _Descriptor.take(self._path)
            if descriptor.is_free(self._byte + 1) and descriptor.lock(self._byte):
                self._descriptor, self.held = descriptor, True
            else:
                descriptor.give_back()
        except OSError as error:
            raise GateClosed from error
        return self.held

    def is_free(self, *, of_all: bool = False) -> bool:
        """Tell whether nobody has this gate, or any of its file, or queues for it."""
        # A length of zero reaches to the end, however far that is.
        first, length = (0, 0) if of_all else (self._byte, 2)
        with suppress(OSError):
            descriptor = _Descriptor.take(self._path)
            try:
                return descriptor.is_free(first, length)
            finally:
                descriptor.give_back()
        return True

    def enter(self, seconds: float) -> None:
        new = None
        if self._bell is None:
            self._bell = Bell()
        try:
            with _mutex:
                if not self._asks() and not self.try_enter():
                    new = self._ask()
            # Without the mutex: a thread's start may run the garbage collector, which
            # may leave gates.
            if new is not None:
                new.start()
        except (OSError, RuntimeError) as error:
            if new is not None and new.ident is None:
                new.give_up()
            raise GateClosed from error
        if not self.held:
            self._bell.wait(seconds)

    def _asks(self) -> bool:
        """Tell whether a thread queues for this gate, perhaps an abandoned gate's."""
        asker = _askers.get((self._path, self._byte))
        if asker is None or (asker.gate is None and asker.ident is None):
            # An interrupt kept it from starting.
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
        """Enter, with the descriptor on which an asker has locked the byte."""
        self._descriptor, self.held = descriptor, True
        if self._bell is not None:
            self._bell.ring()

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
        # Without the mutex: the garbage collector may run this in the middle of code
        # that has it. No asker queues for a forgotten gate: it would refer to the gate.
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            descriptor.close()


def _forget_after_fork() -> None:
    global _mutex
    _mutex = threading.RLock()
    _askers.clear()
    _idle.clear()
    for file in list(_File.all_open):
        # The parent's locks belong to the description, and stay.
        file.close()


forks.in_child(_forget_after_fork)
