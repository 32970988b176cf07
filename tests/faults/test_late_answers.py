"""Answers that come late: a holder never believes in more time than it has."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dblocks import Lease, distributed_lock
from dblocks.conf import backends
from dblocks.models import DistributedLock
from tests.support.factories import stored
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE, always, eventually, scaled, starved

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

Delay = Callable[[], object]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Delay]]:
    """Hold answers up after the database has done its part, by the verb's name."""
    delays: dict[str, Delay] = {}

    def hold_up(owner: type, verb: str) -> None:
        original = getattr(owner, verb)

        def answer(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            delays.get(verb, bool)()
            return result

        monkeypatch.setattr(owner, verb, answer)

    backend = backends["default"]
    hold_up(type(backend), "try_acquire")
    hold_up(type(backend), "reenter")
    hold_up(type(backend), "renew")
    yield delays
    delays.clear()


DELAY = scaled(0.8)
"""Seconds for which an answer is late: more than the margins of the leases here."""


def left(key: str) -> float:
    """Return for how many seconds the database would grant the key to nobody else."""
    return DistributedLock.objects.with_state().get(pk=key).remaining


def believes_too_much(lease: Lease) -> bool:
    """Does the holder count on more time than the row has?"""
    at, believed = time.monotonic(), lease.remaining()
    # The machine may take its time until the row has been read.
    return believed > left(lease.key) + time.monotonic() - at


def test_answer_to_an_acquire(late: dict[str, Delay], key: str) -> None:
    """The lease is counted from before it was asked for, however late the answer."""
    length = scaled(2)
    late["try_acquire"] = lambda: time.sleep(DELAY)
    lease = distributed_lock(key, lease=length, renew=False).acquire(timeout=0)
    assert 0 < lease.remaining() <= length - DELAY
    assert not believes_too_much(lease)
    assert lease.release()


@pytest.mark.parametrize("timeout", [0, DEADLINE])
def test_grant_that_others_have_had_since(
    late: dict[str, Delay], key: str, other: OtherThread, timeout: float
) -> None:
    """Who learns of a grant when somebody else has the key goes on waiting."""
    theirs: list[Lease] = []

    def delay() -> None:
        late.clear()
        lock = distributed_lock(key, lease=scaled(30))
        theirs.append(other.do(lock.acquire, timeout=DEADLINE))
        threading.Timer(0.3, lambda: other.do(theirs[0].release)).start()

    late["try_acquire"] = delay
    lease = distributed_lock(key, lease=scaled(0.5)).try_acquire(timeout=timeout)
    assert theirs
    if timeout:
        assert lease is not None
        assert lease.fencing_token > theirs[0].fencing_token
        lease.check()
        lease.release()
    else:
        assert lease is None
        eventually(lambda: not theirs[0].held)


def test_answer_to_a_re_entry(late: dict[str, Delay], key: str) -> None:
    """So is the longer lease that an inner acquisition asks for."""
    length = scaled(2)
    outer = distributed_lock(key, lease=length, renew=False).acquire(timeout=0)
    late["reenter"] = lambda: time.sleep(DELAY)
    inner = distributed_lock(key, lease=2 * length).acquire(timeout=0)
    assert length < inner.remaining() <= 2 * length - DELAY
    assert not believes_too_much(inner)
    assert inner.release()
    assert outer.release()


def test_answer_to_a_renewal(late: dict[str, Delay], key: str) -> None:
    """A renewal is counted from before it was sent."""
    lease = distributed_lock(key, lease=scaled(3)).acquire(timeout=0)
    end, asked, go_on = stored(key).expires_at, threading.Event(), threading.Event()
    late["renew"] = lambda: (asked.set(), go_on.wait(DEADLINE))
    assert asked.wait(DEADLINE)
    before = lease.remaining()
    eventually(lambda: lease.remaining() < before - DELAY)
    late.clear()
    go_on.set()
    eventually(
        lambda: lease.remaining() > before, within=scaled(2.0), what="the renewal"
    )
    assert stored(key).expires_at > end
    assert not believes_too_much(lease)
    assert lease.release()


def test_answer_after_the_loss(late: dict[str, Delay], key: str) -> None:
    """The loss is told while the answer hangs, and the answer takes it back no more.

    The database has extended the lease; its holder has been told that it is lost.
    """
    lease = distributed_lock(key, lease=1).acquire(timeout=0)
    losses: list[tuple[float, str | None]] = []
    lease.on_lost(lambda lost: losses.append((time.monotonic(), lost.lost_reason)))
    deadline, before = time.monotonic() + lease.remaining(), starved()
    asked, go_on = threading.Event(), threading.Event()
    late["renew"] = lambda: (asked.set(), go_on.wait(DEADLINE))
    assert asked.wait(DEADLINE)
    # Not asked whether it is held: that alone would notice.
    eventually(lambda: losses, what="the news")
    assert losses[0][0] - deadline < 0.5 + max(0.0, starved() - before)
    late.clear()
    go_on.set()
    always(lambda: not lease.held and lease.lost_reason, during=0.3)
    assert [reason for _, reason in losses] == ["backend"]
    assert not lease.release()


@pytest.fixture
def undisturbed() -> Iterator[Callable[[float], None]]:
    """Sleep in a way that lets no other thread run, then or shortly after."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(DEADLINE)
    yield lambda seconds: ctypes.PyDLL(None).usleep(int(1e6 * seconds))
    sys.setswitchinterval(interval)


def test_getters_only_look(
    key: str, undisturbed: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks about a lease that is over is told so, and nothing is set off."""
    lease = distributed_lock(key, lease=0.3, renew=False).acquire(timeout=0)
    told = threading.Event()
    lease.on_lost(lambda lost: told.set())
    started: list[str] = []
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    undisturbed(0.4)
    looked = lease.held, lease.remaining(), lease.lost_reason, repr(lease)
    by_looking = list(started)
    monkeypatch.undo()
    assert looked[:3] == (False, 0.0, "expired")
    assert not by_looking
    assert told.wait(DEADLINE)
