"""Other threads beside a ``TestCase`` that holds a lock in its transaction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, NamedTuple

import pytest
from django.core.management import call_command
from django.db import connection, connections

from dblocks import LockTimeout, distributed_lock
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support.timing import SLACK, excused, starved

pytestmark = [pytest.mark.django_db, pytest.mark.database_backend]


class Call(NamedTuple):
    """A call in a thread: the result, and how long it took."""

    thread: threading.Thread
    future: Future[tuple[Any, float]]


def in_a_thread(function: Callable[[], Any]) -> Call:
    """Begin a call in a thread. The time without a processor doesn't count.

    What hangs on the test's transaction ends with that.
    """
    future: Future[tuple[Any, float]] = Future()

    def call() -> None:
        connections["default"].ensure_connection()
        started, before = time.monotonic(), starved()
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            took = time.monotonic() - started
            future.set_result((result, took - excused(before, took)))
        finally:
            connections.close_all()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return Call(thread, future)


def outcome(call: Call, within: float) -> Any:
    """Return the result, which must have come in time."""
    try:
        result, seconds = call.future.result(timeout=within + SLACK)
    except NotInTime:
        pytest.fail(f"no answer within {within:g} s")
    # It is still closing its connection, and a later test's forked child would keep
    # for ever what the thread has of SQLite's mutexes at that moment.
    call.thread.join(SLACK)
    assert not call.thread.is_alive()
    assert seconds <= within
    return result


def is_granted(key: str, timeout: float = 0) -> bool:
    """Try to take a key, and give it back."""
    lease = distributed_lock(key).try_acquire(timeout=timeout)
    if lease is not None:
        lease.release()
    return lease is not None


@pytest.mark.parametrize("timeout", [0, 0.5])
def test_try(key: str, timeout: float) -> None:
    """A try by another thread for what the test holds is refused, and at once."""

    with distributed_lock(key, timeout=0) as lease:
        tried = in_a_thread(lambda: is_granted(key, timeout))
        assert outcome(tried, 1 + timeout) is False
        assert lease.held


def test_try_for_what_was_released(key: str) -> None:
    """What the test has used, nobody else can see, and nobody waits for its end."""
    with distributed_lock(key, timeout=0):
        pass

    def attempt() -> bool:
        return distributed_lock(key).try_acquire() is not None

    assert outcome(in_a_thread(attempt), 1) is False


def test_try_for_what_is_held_elsewhere(key: str) -> None:
    """So it is when the test has somebody else hold the key."""

    with hold_elsewhere(key):
        assert outcome(in_a_thread(lambda: is_granted(key)), 1) is False


def test_wait(key: str) -> None:
    """A wait by another thread ends with a ``LockTimeout`` when its time is over."""

    def wait() -> str:
        try:
            distributed_lock(key).acquire(timeout=0.5).release()
        except LockTimeout as error:
            return error.key
        return "granted"

    with distributed_lock(key, timeout=0):
        assert outcome(in_a_thread(wait), 1.5) == key


@pytest.mark.skipif(connection.vendor == "sqlite", reason="SQLite has one writer")
def test_try_for_another_key(key: str) -> None:
    """Another new key is free, also after a flush, as by a ``TransactionTestCase``."""

    def flush() -> None:
        call_command("flush", interactive=False, verbosity=0)

    def attempt() -> bool:
        granted = is_granted(f"{key}:other")
        # The test's end doesn't undo what this thread has written.
        DistributedLock.objects.filter(pk=f"{key}:other")._raw_delete("default")
        return granted

    outcome(in_a_thread(flush), 10)
    with distributed_lock(key):
        assert outcome(in_a_thread(attempt), 1) is True


@pytest.mark.parametrize("timeout", [0, 0.5])
def test_settings_that_are_replaced(key: str, settings: Any, timeout: float) -> None:
    """Nor does a thread hang because the test has replaced the setting meanwhile."""

    with distributed_lock(key, timeout=0) as lease:
        settings.DBLOCKS = {"default": {"LEASE": 20}}
        tried = in_a_thread(lambda: is_granted(key, timeout))
        assert outcome(tried, 1 + timeout) is False
        assert lease.held


def test_settings_that_are_replaced_during_a_wait(key: str, settings: Any) -> None:
    """Not even if it waits already, and the test takes the key then."""
    waiting = threading.Event()

    def wait() -> bool:
        waiting.set()
        return is_granted(key, timeout=1)

    with hold_elsewhere(key) as theirs:
        found = in_a_thread(wait)
        assert waiting.wait(SLACK)
        settings.DBLOCKS = {"default": {"LEASE": 20}}
        theirs.release()
        with distributed_lock(key, timeout=0):
            assert outcome(found, 2) is False
