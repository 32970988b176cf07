"""Acquiring, waiting, releasing: what every engine's lock does."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from asgiref.sync import async_to_sync
from django.db import transaction

from dblocks import Lease, LeaseLost, Lock, LockError, LockTimeout, clock
from dblocks.backends.gates import Gate
from dblocks.backends.values import Granted, Reading, Request
from dblocks.conf import backends
from dblocks.waiting import queue
from tests.support.fixtures import OtherThread, outranks
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled, takes

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]


def test_acquire_returns_the_proof(lock: Locks, key: str, backend: str) -> None:
    """A lease says what is held, by whom, where, and with which fencing token."""
    with lock(owner="me").acquire() as lease:
        assert (lease.key, lease.owner, lease.backend) == (key, "me", backend)
        has_token = backends[backend].has_fencing_tokens
        assert isinstance(lease.fencing_token, int if has_token else type(None))
        assert lease.held
        assert lease.lost_reason is None


def test_with_form(lock: Locks, obtainable: Obtainable) -> None:
    """The block holds the lock from its first line to its last, and not after."""
    with lock() as lease:
        assert isinstance(lease, Lease)
        assert lease.held
        assert not obtainable()
    assert not lease.held
    assert obtainable()


def test_block_of_a_released_lease(lock: Locks, acquire: Leases) -> None:
    """A block that would run without the lock doesn't run."""
    first, lock_again = acquire(), lock().acquire

    async def block(lease: Lease) -> None:
        async with lease:
            raise AssertionError

    with first:
        pass
    second = lock_again()
    second.release()
    for lease in (first, second):
        with pytest.raises(LeaseLost) as refused, lease:
            raise AssertionError
        assert refused.value.reason == "released"
        with pytest.raises(LeaseLost):
            async_to_sync(block)(lease)


@pytest.mark.usefixtures("committed")
def test_block_before_a_release_that_waits(lock: Locks) -> None:
    """A lease whose release waits for a transaction's end is held until then."""
    lease = lock().acquire()
    with transaction.atomic():
        lease.release()
        with lease:
            assert lease.held
    assert not lease.held


def test_lease_as_context_manager(lock: Locks, obtainable: Obtainable) -> None:
    """A lease that was acquired by hand is released by its own block."""
    with lock().acquire() as lease:
        assert lease.held
        assert not obtainable()
    assert obtainable()


def test_lock_is_used_again(lock: Locks) -> None:
    """One lock object serves any number of blocks, each with a higher token."""
    the_lock = lock()
    leases = []
    for _ in range(3):
        with the_lock as lease:
            leases.append(lease)
    assert all(outranks(later, earlier) for earlier, later in pairwise(leases))


def test_try_acquire_of_a_taken_key(
    lock: Locks, acquire: Leases, other: OtherThread
) -> None:
    """Without waiting the answer is None, at once."""
    acquire()
    with takes(at_most=SLACK):
        assert other.do(lock().try_acquire) is None


def test_try_acquire_may_wait(lock: Locks, acquire: Leases, other: OtherThread) -> None:
    """With a timeout the answer is None when that is over."""
    acquire()
    with takes(0.4, 0.4 + SLACK):
        assert other.do(lock().try_acquire, timeout=0.4) is None


def test_keys_are_independent(
    lock: Locks, acquire: Leases, key: str, other: OtherThread
) -> None:
    """Holding one key says nothing about another."""
    acquire()
    with other.do(lock(key + "!").acquire, timeout=0) as lease:
        assert lease.held


@pytest.mark.parametrize("timeout", [0, 0.3, 0.75])
def test_lock_timeout(
    lock: Locks, acquire: Leases, other: OtherThread, timeout: float
) -> None:
    """A wait that ran out raises LockTimeout, not early and not much later."""
    acquire()
    with takes(timeout, timeout + SLACK), pytest.raises(LockTimeout):
        other.do(lock(timeout=timeout).acquire)


def test_timeout_of_the_call_rules(
    lock: Locks, acquire: Leases, other: OtherThread
) -> None:
    """The timeout given to acquire() goes before the lock's own."""
    acquire()
    with takes(at_most=SLACK), pytest.raises(LockTimeout):
        other.do(lock(timeout=30).acquire, timeout=0)


@pytest.mark.needs("has_own_leases")
def test_lock_timeout_tells_who_holds(
    lock: Locks, acquire: Leases, key: str, other: OtherThread
) -> None:
    """LockTimeout says who holds, why, since when, and when to come back."""
    acquire(note="the nightly import", lease=20)
    with pytest.raises(LockTimeout) as caught:
        other.do(lock().acquire, timeout=0.2)
    error = caught.value
    assert isinstance(error, LockError)
    assert (error.key, error.note) == (key, "the nightly import")
    assert float(error.timeout) == 0.2
    assert socket.gethostname() in error.holder
    assert str(os.getpid()) in error.holder
    assert error.acquired_at is not None
    assert 10 < error.retry_after <= 20
    for word in (repr(key), "0.2", error.holder, "the nightly import"):
        assert word in str(error)


def test_message_without_a_timeout() -> None:
    """A LockTimeout of somebody who would have waited for ever can be shown."""
    assert "'k'" in str(LockTimeout("k", timeout=None))


@pytest.mark.parametrize(
    "error",
    [
        LockTimeout("k", timeout=2, holder="web-1", retry_after=3),
        LeaseLost("k", fencing_token=7, reason="taken"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_travel_between_processes(error: LockError) -> None:
    """A worker's error reaches the process that waits for its result, whole."""
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


copies = pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda lock: pickle.loads(pickle.dumps(lock))],
    ids=["copy", "deepcopy", "pickle"],
)


@copies
def test_copy_that_skips(
    lock: Locks, other: OtherThread, copied: Callable[[Lock], Lock]
) -> None:
    """It doesn't wait either."""
    lease = other.do(lock().acquire)
    with takes(at_most=SLACK):
        assert copied(lock(on_locked="skip"))(lambda: "ran")() is None
    other.do(lease.release)


@copies
def test_copy_of_a_lock_in_use(lock: Locks, copied: Callable[[Lock], Lock]) -> None:
    """It is a lock like any other, as a spawned process gets it."""
    with (first := lock()) as lease:
        second = copied(first)
        with second as inner:
            assert inner.owner == lease.owner
        with pytest.raises(RuntimeError, match="not entered"):
            second.__exit__(None, None, None)
        assert lease.held


def test_timeout_none_waits_on(
    lock: Locks, acquire: Leases, other: OtherThread
) -> None:
    """With timeout=None the wait ends only with the grant."""
    lease = acquire()
    waiting = other.start(lock(timeout=None).acquire)
    always(lambda: not waiting.done(), during=0.5, what="waiting")
    lease.release()
    granted = waiting.result(timeout=DEADLINE)
    assert outranks(granted, lease)
    granted.release()


def test_release_wakes_a_waiter(
    lock: Locks, acquire: Leases, other: OtherThread
) -> None:
    """A waiter has the key within a second of its release."""
    lease = acquire()
    waiting = other.start(lock().acquire, timeout=DEADLINE)
    always(lambda: not waiting.done(), during=0.3, what="waiting")
    lease.release()
    with takes(at_most=SLACK):
        waiting.result(timeout=DEADLINE).release()


def test_locked(lock: Locks, acquire: Leases, other: OtherThread) -> None:
    """locked() is true while anybody holds, for the holder and for others."""
    the_lock = lock()
    assert the_lock.locked() is False
    lease = acquire()
    assert the_lock.locked() is True
    assert other.do(the_lock.locked) is True
    lease.release()
    assert the_lock.locked() is False


def test_release_says_whether_it_was_held(
    acquire: Leases, obtainable: Obtainable
) -> None:
    """release() is True for a lease that was held until then."""
    lease = acquire()
    assert lease.release() is True
    assert obtainable()
    assert not lease.held


def test_release_of_a_lost_lease(acquire: Leases) -> None:
    """release() is False for a lease that had run out."""
    lease = acquire(lease=0.3, renew=False)
    eventually(lambda: not lease.held, what="the end of the lease")
    eventually(lambda: lease.lost_reason, what="the loss")
    assert lease.release() is False


def test_release_twice(acquire: Leases, lock: Locks, other: OtherThread) -> None:
    """A second release does nothing, even when somebody else holds by then."""
    lease = acquire()
    lease.release()
    theirs = other.do(lock().acquire, timeout=0)
    lease.release()
    assert theirs.held
    assert lock().locked()
    assert theirs.release() is True


def test_second_release_leaves_an_outer_hold(
    acquire: Leases, obtainable: Obtainable
) -> None:
    """Releasing an inner lease twice takes away one hold, not two."""
    acquire()
    inner = acquire()
    inner.release()
    inner.release()
    assert not obtainable()


def test_ten_acquires_nine_releases(acquire: Leases, obtainable: Obtainable) -> None:
    """After nine of ten releases the lock is still held, after the tenth it is free."""
    leases = [acquire() for _ in range(10)]
    assert len({lease.fencing_token for lease in leases}) == 1
    for lease in leases[:9]:
        assert lease.release() is True
        assert not obtainable()
    assert leases[9].held
    assert leases[9].release() is True
    assert obtainable()


def test_holder_that_never_unlocks(
    acquire: Leases, lock: Locks, other: OtherThread
) -> None:
    """A holder that never unlocks is replaced when its lease is over, not before."""
    with takes(1, 1 + SLACK):
        lease = acquire(lease=1, renew=False)
        taken_over = other.do(lock().acquire, timeout=5)
    assert not lease.held
    assert outranks(taken_over, lease)
    assert lease.release() is False
    assert taken_over.release() is True


def test_body_exception_releases(lock: Locks, obtainable: Obtainable) -> None:
    """An exception in the body passes through unchanged, and the lock is free."""
    error = RuntimeError("from the body")
    with pytest.raises(RuntimeError) as caught, lock():
        raise error
    assert caught.value is error
    assert obtainable()


def test_leaving_a_lost_lease_raises(lock: Locks, key: str) -> None:
    """Leaving the block of a lease that ran out raises LeaseLost with the facts."""
    with (
        pytest.raises(LeaseLost) as caught,
        lock(lease=scaled(0.3), renew=False) as lease,
    ):
        eventually(lambda: not lease.held, what="the end of the lease")
    error = caught.value
    assert isinstance(error, LockError)
    assert (error.key, error.fencing_token) == (key, lease.fencing_token)
    assert error.reason == lease.lost_reason == "expired"
    assert repr(key) in str(error)


def test_body_exception_is_never_masked(lock: Locks) -> None:
    """When the body raised and the lease was lost, the body's exception comes out."""
    error = RuntimeError("from the body")
    short = lock(lease=scaled(0.3), renew=False)
    with pytest.raises(RuntimeError) as caught, short as lease:  # noqa: PT012
        eventually(lambda: not lease.held, what="the end of the lease")
        raise error
    assert caught.value is error


def test_release_inside_the_block(lock: Locks, obtainable: Obtainable) -> None:
    """A lease released by hand inside its block leaves it without an error."""
    with lock() as lease:
        lease.release()
        assert obtainable()


class Overlap:
    """Counts how many are inside at once."""

    def __init__(self) -> None:
        self.inside = self.most = self.entries = 0

    def __enter__(self) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.002)

    def __exit__(self, *exc_info: object) -> None:
        self.entries += 1
        self.inside -= 1


def test_one_lock_object_shared_by_threads(
    lock: Locks, threads: Callable[[], OtherThread]
) -> None:
    """Threads that share one lock object exclude each other, and none is left out."""
    shared = lock(timeout=DEADLINE)
    overlap = Overlap()
    start = threading.Barrier(4, timeout=DEADLINE)

    def contend() -> None:
        start.wait()
        for _ in range(5):
            with shared, overlap:
                pass

    futures = [threads().start(contend) for _ in range(4)]
    for future in futures:
        future.result(timeout=2 * DEADLINE)
    assert (overlap.most, overlap.entries) == (1, 20)


@pytest.mark.needs("has_cooling")
class TestHoldAtLeast:
    """``hold_at_least``: the key cools down after an early release."""

    def test_early_release_cools(self, lock: Locks, other: OtherThread) -> None:
        """After an early release nobody gets the key until that time is over."""
        with takes(0.8, 0.8 + SLACK):
            with lock(hold_at_least=0.8) as lease:
                pass
            assert lock().locked()
            granted = other.do(lock().acquire, timeout=5)
        assert outranks(granted, lease)
        granted.release()

    def test_exception_cools_too(self, lock: Locks, obtainable: Obtainable) -> None:
        """A body that fails cools like one that succeeds."""
        with pytest.raises(RuntimeError), lock(hold_at_least=5):
            raise RuntimeError
        assert not obtainable()

    def test_former_holder_waits_as_well(self, lock: Locks) -> None:
        """The thread that released it early can't take the cooling key either."""
        with lock(hold_at_least=5):
            pass
        assert lock().try_acquire() is None

    def test_cooling_key_is_reported(self, lock: Locks, other: OtherThread) -> None:
        """A wait for a cooling key is a LockTimeout that says when to come back."""
        with lock(hold_at_least=5):
            pass
        with pytest.raises(LockTimeout) as caught:
            other.do(lock().acquire, timeout=0)
        assert 0 < caught.value.retry_after <= 5
        assert caught.value.cooling
        assert "has released it, and it stays taken for another" in str(caught.value)

    def test_late_release_frees_at_once(
        self, lock: Locks, obtainable: Obtainable
    ) -> None:
        """Held for longer than that, the key is free at its release."""
        with lock(hold_at_least=0.2) as lease:
            always(lambda: lease.held, during=0.3)
        assert obtainable()

    def test_outermost_rules(self, lock: Locks, obtainable: Obtainable) -> None:
        """An inner acquisition's release neither cools nor frees."""
        with lock(hold_at_least=5), lock():
            pass
        assert not obtainable()


class TestMaxHold:
    """``max_hold``: renewal ends so long after the acquisition."""

    def test_hung_holder_is_replaced(
        self, lock: Locks, acquire: Leases, other: OtherThread
    ) -> None:
        """A holder that renews for ever still loses the key at max_hold."""
        most = scaled(4)
        with takes(most, most + SLACK):
            lease = acquire(lease=most / 2, max_hold=most)
            granted = other.do(lock().acquire, timeout=DEADLINE)
        assert not lease.held
        granted.release()

    def test_shortens_a_longer_lease(
        self, acquire: Leases, lock: Locks, other: OtherThread
    ) -> None:
        """Smaller than the lease, it is the lease."""
        with takes(0.5, 0.5 + SLACK):
            lease = acquire(lease=30, max_hold=0.5)
            assert lease.remaining() <= 0.5
            granted = other.do(lock().acquire, timeout=5)
        granted.release()

    @pytest.mark.needs("has_own_leases")
    def test_explicit_renewal_is_bounded(self, acquire: Leases) -> None:
        """renew() by hand doesn't go beyond it either."""
        lease = acquire(lease=2, max_hold=4)
        lease.renew(lease=600)
        assert lease.remaining() <= 4

    def test_inner_acquisition_is_bounded(
        self, acquire: Leases, lock: Locks, other: OtherThread
    ) -> None:
        """Re-entering, which renews, doesn't go beyond the outermost one's max_hold."""
        most = scaled(1.2)
        with takes(most, most + SLACK):
            acquire(lease=most, max_hold=most)
            acquire(lease=600)
            granted = other.do(lock().acquire, timeout=5)
        granted.release()


def until_somebody_waits(key: str, backend: str) -> None:
    eventually(lambda: queue.queues.find(backends[backend], key), what="the wait")


def test_abandoned_lease_lapses(lock: Locks, other: OtherThread) -> None:
    """A lease that nothing refers to is reported, no longer renewed, and lapses."""
    with pytest.warns(ResourceWarning) as warned:  # noqa: PT031
        lock(lease=scaled(0.6)).acquire()
        gc.collect()
        eventually(lambda: len(warned), within=SLACK, what="the warning")
    with takes(at_most=scaled(0.6) + SLACK):
        other.do(lock().acquire, timeout=5).release()


def test_abandoned_lease_lapses_under_a_waiter(
    lock: Locks, other: OtherThread, key: str, backend: str
) -> None:
    """Who waits for it in the same process doesn't keep an abandoned lease alive."""
    with pytest.warns(ResourceWarning):  # noqa: PT031
        lease = lock(lease=scaled(1.2)).acquire()
        waiting = other.start(lock().acquire, timeout=DEADLINE)
        until_somebody_waits(key, backend)
        del lease
        gc.collect()
        with takes(at_most=scaled(1.2) + SLACK):
            granted = waiting.result(timeout=DEADLINE)
    other.do(granted.release)


def test_who_released_stands_behind_who_waits(
    lock: Locks, other: OtherThread, key: str, backend: str
) -> None:
    """A thread that gives a lock back and wants it again doesn't pass the next one."""

    came: list[str] = []

    def pass_through() -> None:
        with lock(timeout=DEADLINE):
            came.append("the next one")

    for turn in range(1, 6):
        lease = lock().acquire()
        waiting = other.start(pass_through)
        until_somebody_waits(key, backend)
        lease.release()
        with lock(timeout=DEADLINE):
            assert len(came) == turn
        waiting.result(timeout=DEADLINE)


def test_kept_lease_is_no_resource_leak(
    acquire: Leases, recwarn: pytest.WarningsRecorder
) -> None:
    """A lease that is referred to and released in time warns about nothing."""
    acquire().release()
    assert not [warning for warning in recwarn if warning.category is ResourceWarning]


def test_many_keys_in_one_thread(lock: Locks, key: str) -> None:
    """One owner may hold many keys at once and release them in any order."""
    leases = [lock(f"{key}:{number}").acquire(timeout=0) for number in range(5)]
    for number in (3, 0, 4, 1, 2):
        assert lock(f"{key}:{number}").locked() is True
        assert leases[number].release() is True
        assert lock(f"{key}:{number}").locked() is False


def test_representation(lock: Locks, key: str, backend: str) -> None:
    """A lock's representation names its keys, its permits and its engine."""
    assert repr(lock()) == f"<Lock {key!r} backend={backend!r}>"
    assert repr(lock(permits=3)) == f"<Lock {key!r} permits=3 backend={backend!r}>"


def test_left_where_it_was_not_entered(lock: Locks, acquire: Leases) -> None:
    """A block that was never entered can't be left, and nobody's lease ends by it."""
    lease = acquire()
    with pytest.raises(RuntimeError, match="is left where it was not entered"):
        lock().__exit__(None, None, None)
    assert lease.held


def test_released_lease_proves_nothing(acquire: Leases) -> None:
    """Asked for its proof after its release, a lease says that it was released."""
    lease = acquire()
    lease.release()
    with pytest.raises(LeaseLost, match=r"proves nothing now\. Take the lock again\."):
        lease.check()


@pytest.mark.usefixtures("committed")
def test_timeouts_while_the_first_one_sleeps(
    lock: Locks, other: OtherThread, key: str, backend: str
) -> None:
    """Who waits behind it isn't late for an answer that the first waiter hasn't got.

    What it had seen is out of date: the key was released here, and taken elsewhere at
    once. One asks for all whose time is over.
    """
    engine = backends[backend]
    # Not noted in this process: as another one has it, which had to wait for it.
    request = Request(key, "theirs", engine.lease)
    if (gate := engine.gate(request)) is not None:
        gate.enter(DEADLINE)
        request.gate, request.queued = gate, True
    theirs = engine.try_acquire(request, 0.0)
    assert isinstance(theirs, Granted)
    waiting = other.start(lock().acquire, timeout=DEADLINE)
    until_somebody_waits(key, backend)
    always(lambda: not waiting.done(), during=0.1, what="waiting")
    queue.queues.freed(engine, key)
    for _ in range(2):
        with takes(0.2, 0.2 + scaled(0.4)), pytest.raises(LockTimeout) as caught:
            lock(timeout=0.2).acquire()
        assert 0 < caught.value.retry_after <= engine.lease
    engine.release(theirs.grant, count=None, deadline=clock.monotonic() + SLACK)
    if gate is not None:
        gate.leave()
    other.do(waiting.result(timeout=DEADLINE).release)


@pytest.mark.usefixtures("committed")
def test_timeouts_while_the_first_one_looks(
    lock: Locks,
    other: OtherThread,
    key: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who gives up doesn't have the first waiter ask for a key that is taken."""
    engine = backends[backend]
    # Not noted in this process.
    theirs = engine.try_acquire(Request(key, "theirs", engine.lease), 0.0)
    assert isinstance(theirs, Granted)
    waiting = other.start(lock().acquire, timeout=DEADLINE)
    until_somebody_waits(key, backend)
    always(lambda: not waiting.done(), during=0.1, what="waiting")
    asked: list[Request] = []
    ask = engine.try_acquire

    def note(request: Request, patience: float) -> Granted | Reading:
        asked.append(request)
        return ask(request, patience)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "try_acquire", note)
        for _ in range(20):
            with pytest.raises(LockTimeout):
                lock(timeout=0.02).acquire()
    assert len(asked) < 5
    engine.release(theirs.grant, count=None, deadline=clock.monotonic() + SLACK)
    other.do(waiting.result(timeout=DEADLINE).release)


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize("timeout", [0, 0.1])
def test_try_while_the_key_changes_hands(
    lock: Locks,
    key: str,
    backend: str,
    timeout: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A waiter queues for no longer than it may: it would sit out another's hold."""
    gate = backends[backend].gate(Request(key, "the first", 30.0))
    if gate is None:
        pytest.skip("there is no queue here that other processes see")
    lock().acquire().release()
    gate.enter(DEADLINE)
    assert gate.held
    enter, queued = type(gate).enter, list[float]()

    def note(gate: Gate, seconds: float) -> None:
        queued.append(seconds)
        enter(gate, seconds)

    monkeypatch.setattr(type(gate), "enter", note)
    try:
        lease = lock().try_acquire(timeout)
    finally:
        gate.leave()
    assert all(0 < seconds <= timeout for seconds in queued)
    assert lease is None or lease.release()


def test_gates_that_are_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of very many keys whose gates are abandoned, the last are known."""
    monkeypatch.setattr(queue, "MOST_ABANDONED", 2)
    queues = queue.WaitQueues()
    for key in ("a", "b", "c"):
        queues.note_abandoned(backends["locmem"], key)
    assert queues.is_abandoned(backends["locmem"], "c")
    assert not queues.is_abandoned(backends["locmem"], "a")
