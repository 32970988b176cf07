"""What dblocks gives to the tests of users: a competitor, and a clock to be moved."""

from __future__ import annotations

import asyncio
import threading
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.core.management import CommandError, call_command
from django.db import IntegrityError, NotSupportedError, connection, transaction
from django.db.transaction import TransactionManagementError
from django.test import TestCase, TransactionTestCase, override_settings
from django.test.utils import CaptureQueriesContext

from dblocks import (
    Lease,
    LeaseLost,
    Lock,
    LockTimeout,
    current_lease,
    distributed_lock,
)
from dblocks.backends.base import BaseBackend
from dblocks.backends.database import own_connections
from dblocks.conf import backends
from dblocks.holding import news
from dblocks.models import DistributedLock
from dblocks.signals import lock_lost
from dblocks.test import (
    aclear_locks,
    amove_clock,
    clear_locks,
    hold_elsewhere,
    move_clock,
)
from tests.support.fixtures import OtherThread, fitting, outranks, wipe
from tests.support.timing import DEADLINE, SLACK, eventually, scaled, takes
from tests.test_ownership import run
from tests.testapp.models import Account

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]


@pytest.mark.needs("has_own_leases")
def test_held_elsewhere(backend: str, lock: Locks, key: str) -> None:
    """In the block the key is somebody else's; afterwards it is free."""
    with hold_elsewhere(key, backend=backend, note="nightly", lease=20) as theirs:
        assert theirs.held
        assert lock().locked()
        with pytest.raises(LockTimeout) as caught:
            lock().acquire(timeout=0)
        assert caught.value.note == "nightly"
        assert 10 < caught.value.retry_after <= 20.1
        with pytest.raises(LookupError):
            current_lease(key)
    with lock(timeout=0) as ours:
        assert outranks(ours, theirs)


def test_held_elsewhere_until_released(backend: str, lock: Locks, key: str) -> None:
    """The somebody may release before the end of the block."""
    with hold_elsewhere(key, backend=backend) as theirs:
        assert theirs.release() is True
        with lock(timeout=0):
            pass


def test_held_elsewhere_after_an_error(backend: str, lock: Locks, key: str) -> None:
    """An error in the block passes through, and the key is free."""
    with pytest.raises(RuntimeError), hold_elsewhere(key, backend=backend):
        raise RuntimeError
    assert not lock().locked()


def test_held_elsewhere_when_taken(
    backend: str, acquire: Leases, key: str, other: OtherThread
) -> None:
    """A key that is taken can't be held elsewhere too, not by its holder either."""
    acquire()
    with (
        takes(at_most=SLACK),
        pytest.raises(LockTimeout),
        hold_elsewhere(key, backend=backend),
    ):
        pass


def test_held_elsewhere_by_two(backend: str, key: str) -> None:
    """Each block is a holder of its own."""
    with (
        hold_elsewhere(key, backend=backend),
        hold_elsewhere(key + "!", backend=backend),
        pytest.raises(LockTimeout),
        hold_elsewhere(key, backend=backend),
    ):
        pass


def test_released_while_waiting(
    backend: str, lock: Locks, key: str, other: OtherThread
) -> None:
    """Who waits for what is held elsewhere gets it at the end of the block."""
    with hold_elsewhere(key, backend=backend):
        waiting = other.start(lock().acquire, timeout=DEADLINE)
    waiting.result(timeout=DEADLINE).release()


def test_held_elsewhere_in_async_code(backend: str, lock: Locks, key: str) -> None:
    """There is an async form, and the sync one refuses to block an event loop."""

    async def main() -> None:
        holder = hold_elsewhere(key, backend=backend)
        async with holder as theirs:
            assert theirs.held
            assert await lock().atry_acquire() is None
        async with lock(timeout=0):
            pass
        with pytest.raises(SynchronousOnlyOperation), holder:
            pass

    async_to_sync(main)()


@pytest.mark.parametrize("where", ["entering", "leaving"])
def test_held_elsewhere_in_a_cancelled_task(
    backend: str,
    key: str,
    obtainable: Obtainable,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    """A cancelled task gives the key back, wherever it is."""
    holder = hold_elsewhere(key, backend=backend, **fitting(backend, {"lease": 60}))
    kind = type(backends[backend])
    try_acquire = kind.try_acquire
    over = threading.Event()

    async def enter() -> None:
        async with holder:
            pytest.fail("entered")

    async def entering() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.create_task(enter())
        task.add_done_callback(lambda task: over.set())

        def try_when_cancelled(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(task.cancel)
            over.wait(DEADLINE)
            return try_acquire(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "try_acquire", try_when_cancelled)
            with pytest.raises(asyncio.CancelledError):
                await task

    async def leaving() -> None:
        await holder.__aenter__()
        busy = asyncio.create_task(sync_to_async(over.wait)(DEADLINE))
        # Its thread must be busy before the block is left.
        await asyncio.sleep(0)
        task = asyncio.create_task(holder.__aexit__(None, None, None))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        over.set()
        await busy

    run({"entering": entering, "leaving": leaving}[where]())
    eventually(obtainable, within=DEADLINE, what="the key")


@pytest.mark.needs("has_movable_clock")
def test_sync_helpers_in_async_code(backend: str, key: str) -> None:
    """They are refused, on every engine, with the name of what to use instead."""

    def hold() -> None:
        with hold_elsewhere(key, backend=backend):
            pytest.fail("entered")

    async def main() -> None:
        for helper, twin in (
            (hold, "async with hold_elsewhere"),
            (lambda: move_clock(1, backend=backend), r"amove_clock\(\)"),
            (lambda: clear_locks(backend), r"aclear_locks\(\)"),
        ):
            with pytest.raises(SynchronousOnlyOperation, match=twin):
                helper()

    run(main())


@pytest.mark.usefixtures("locks_beside")
def test_held_elsewhere_in_a_transaction(backend: str, lock: Locks, key: str) -> None:
    """The somebody doesn't wait for the end of the test's transaction."""
    with transaction.atomic():
        with hold_elsewhere(key, backend=backend):
            assert lock().try_acquire() is None
        lock().acquire(timeout=0).release()


@pytest.mark.needs("has_movable_clock")
class TestMoveClock:
    """``move_clock``: time passes without anybody waiting for it."""

    def test_lease_runs_out(
        self, backend: str, lock: Locks, key: str, obtainable: Obtainable
    ) -> None:
        """Moved past its lease, a holder has lost it, renewed or not."""
        for options in ({}, {"renew": False}):
            with pytest.raises(LeaseLost) as caught, lock(lease=30, **options) as lease:  # noqa: PT012
                move_clock(31, backend=backend)
                assert not lease.held
                assert lease.lost_reason == "expired"
                assert obtainable()
            assert caught.value.reason == "expired"

    def test_somebody_elses_lease_runs_out(
        self, backend: str, lock: Locks, key: str
    ) -> None:
        """A holder that died is replaced once its lease is over, not before."""
        with hold_elsewhere(key, backend=backend, lease=30) as theirs:
            assert lock().try_acquire() is None
            move_clock(timedelta(minutes=1), backend=backend)
            with lock(timeout=0) as ours:
                assert outranks(ours, theirs)
        assert theirs.lost_reason == "expired"

    def test_lease_that_lasts(self, backend: str, acquire: Leases) -> None:
        """Moved by less than the lease, it has so much less left."""
        lease = acquire(lease=100, renew=False)
        move_clock(60, backend=backend)
        assert lease.held
        assert 25 < lease.remaining() <= 30
        move_clock(29, backend=backend)
        assert lease.remaining() <= 1

    def test_renewal_goes_on(
        self, backend: str, acquire: Leases, obtainable: Obtainable
    ) -> None:
        """A renewed lease that survives the move is renewed soon afterwards."""
        lease = acquire(lease=100)
        for _ in range(3):
            move_clock(60, backend=backend)
            eventually(lambda: lease.remaining() > 80, within=SLACK, what="a renewal")
        assert not obtainable()
        assert lease.release() is True

    def test_loss_is_told(self, backend: str, acquire: Leases) -> None:
        """The holder's callback is called."""
        lease = acquire(lease=600)
        told = threading.Event()
        lease.on_lost(lambda lease: told.set())
        move_clock(601, backend=backend)
        assert told.wait(DEADLINE)

    def test_cooling_ends(self, backend: str, lock: Locks) -> None:
        """A key cools down by the moved clock."""
        with lock(hold_at_least=300):
            pass
        move_clock(290, backend=backend)
        assert lock().try_acquire() is None
        move_clock(10, backend=backend)
        lock().acquire(timeout=0).release()

    def test_max_hold(self, backend: str, acquire: Leases, lock: Locks) -> None:
        """The holding limit counts by the moved clock."""
        lease = acquire(lease=30, max_hold=40)
        move_clock(20, backend=backend)
        eventually(lambda: lease.remaining() > 15, within=SLACK, what="a renewal")
        move_clock(20.1, backend=backend)
        assert not lease.held
        with lock(timeout=0, owner="next"):
            pass

    def test_waiter_finds_out(
        self, backend: str, acquire: Leases, lock: Locks, other: OtherThread
    ) -> None:
        """A waiter has the key within a moment, or gives up at its moved timeout."""
        acquire(lease=300, renew=False)
        # A grant that is being received while the clock moves is left to lapse.
        patient = other.start(lock(lease=0.5).acquire, timeout=1000)
        eventually(lambda: patient.running(), what="the waiter")
        with takes(at_most=SLACK):
            move_clock(301, backend=backend)
            patient.result(timeout=DEADLINE).release()

    def test_waiter_gives_up(
        self, backend: str, acquire: Leases, lock: Locks, other: OtherThread
    ) -> None:
        """Waiting ends by the moved clock."""
        # However often the clock is moved on a busy machine, the lease lasts.
        acquire(lease=300_000, renew=False)
        hasty = other.start(lock().try_acquire, timeout=1000)
        time.sleep(0.05)
        with takes(at_most=SLACK):
            while not hasty.done():
                move_clock(500, backend=backend)
                time.sleep(0.05)
        assert hasty.result() is None

    def test_in_async_code(self, backend: str, lock: Locks) -> None:
        """There is an async form."""

        async def main() -> None:
            with pytest.raises(LeaseLost):
                async with lock(lease=30):
                    await amove_clock(31, backend=backend)

        async_to_sync(main)()

    @pytest.mark.needs("has_table")
    @pytest.mark.usefixtures("two_writers")
    def test_in_a_transaction(self, lock: Locks, key: str) -> None:
        """In the test's transaction too, the locks alone grow older."""
        with hold_elsewhere(key, lease=30), transaction.atomic():
            move_clock(31)
            lock().acquire(timeout=0).release()
            transaction.set_rollback(True)
        assert DistributedLock.objects.free().filter(pk=key).exists()

    @pytest.mark.needs("has_table")
    def test_rows_grow_older(self, acquire: Leases, key: str) -> None:
        """Queries for stuck locks find what has been held for long."""
        acquire(lease=30, renew=False)
        before = DistributedLock.objects.get(pk=key)
        move_clock(31)
        after = DistributedLock.objects.expired().get(pk=key)
        assert before.acquired_at is not None
        assert after.acquired_at is not None
        for moved in (
            before.acquired_at - after.acquired_at,
            before.expires_at - after.expires_at,
        ):
            assert abs(moved - timedelta(seconds=31)) < timedelta(milliseconds=2)

    @pytest.mark.parametrize("value", [-1, float("nan"), float("inf")], ids=repr)
    def test_forward_only(self, value: float) -> None:
        """The clock is never set back."""
        with pytest.raises(ValueError, match="seconds"):
            move_clock(value)

    @pytest.mark.parametrize("value", [1e10, timedelta(days=36_600), 10**400], ids=str)
    def test_not_too_far(self, backend: str, acquire: Leases, value: Any) -> None:
        """Nor is it moved by more than a century, which databases can't count."""
        lease = acquire()
        with pytest.raises(ValueError, match="seconds must be"):
            move_clock(value, backend=backend)
        assert lease.held

    def test_other_clocks(self, settings: Any) -> None:
        """The clock of an engine that is neither is refused, and so is clearing."""
        settings.DBLOCKS = {
            "other": {"BACKEND": "tests.test_testing_support.OtherBackend"}
        }
        with pytest.raises(NotImplementedError, match="'other'"):
            move_clock(1, backend="other")
        with pytest.raises(NotSupportedError, match="'other'"):
            clear_locks("other")


class OtherBackend(BaseBackend):
    """An engine with a clock of its own."""

    def try_acquire(self, request: Any, patience: float) -> Any:
        raise NotImplementedError

    def reenter(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def read_all(self, keys: Any, patience: float | None = None) -> Any:
        raise NotImplementedError

    def renew(self, renewals: Any, patience: float = 1.0) -> Any:
        raise NotImplementedError

    def release(self, grant: Any, **options: Any) -> bool:
        raise NotImplementedError


@pytest.mark.needs("has_cooling")
def test_clear_locks(backend: str, acquire: Leases, lock: Locks, key: str) -> None:
    """What is held or cooling becomes free; its holder finds it force-released."""
    lease = acquire()
    with lock(key + "!", hold_at_least=300):
        pass
    clear_locks(backend)
    for name in (key, key + "!"):
        with lock(name, owner="next", timeout=0) as ours:
            assert ours.held
            if backends[backend].has_fencing_tokens:
                assert (ours.fencing_token or 0) > 1
    with pytest.raises(LeaseLost) as caught:
        lease.renew()
    assert caught.value.reason in {"forced", "taken"}


@pytest.mark.needs("has_cooling")
def test_clear_locks_in_async_code(backend: str, acquire: Leases, lock: Locks) -> None:
    """There is an async form."""
    acquire()
    run(aclear_locks(backend))
    assert not lock().locked()


def test_clear_locks_of_permits(backend: str, acquire: Leases, lock: Locks) -> None:
    """Permits become free like plain keys."""
    for owner in ("one", "other"):
        acquire(permits=2, owner=owner)
    assert lock(permits=2).locked()
    clear_locks(backend)
    assert not lock(permits=2).locked()


@pytest.mark.needs("has_table")
class InsideTestCase(TestCase):
    """Django's ``TestCase``: everything runs in a transaction that is rolled back."""

    def held(self, key: str) -> bool:
        return DistributedLock.objects.held().filter(pk=key).exists()

    def test_lock(self) -> None:
        """A lock is taken, re-entered and released in the test's transaction."""
        with distributed_lock("inside", lease=30) as lease:
            assert lease.held
            assert self.held("inside")
            with distributed_lock("inside", timeout=0) as again:
                assert again.fencing_token == lease.fencing_token
        assert not self.held("inside")

    def test_held_elsewhere(self) -> None:
        """Somebody else's lock is on the test's connection."""
        with hold_elsewhere("inside"):
            assert self.held("inside")
            assert distributed_lock("inside").try_acquire() is None
        distributed_lock("inside").acquire(timeout=0).release()

    def test_run_locked(self) -> None:
        """A command takes its lock on the test's connection, or finds it taken."""
        distributed_lock("written").acquire(timeout=0).release()
        call_command("run_locked", "inside", "--", "true")
        assert not self.held("inside")
        with hold_elsewhere("inside"), pytest.raises(CommandError) as caught:
            call_command("run_locked", "inside", "--wait", "0.1", "--", "true")
        assert caught.value.returncode == 75
        call_command("run_locked", "inside", "again", "--", "true")
        assert not self.held("again")

    def test_force_release(self) -> None:
        """Who is forced out learns of it when a renewal was due, at an operation."""
        lease = distributed_lock("inside", lease=scaled(1.5)).acquire()
        DistributedLock.objects.force_release("inside")

        def is_lost() -> bool:
            distributed_lock("something else").locked()
            return not lease.held

        eventually(is_lost, within=scaled(0.5) + SLACK, what="the loss")
        assert lease.lost_reason == "forced"

    def test_transaction(self) -> None:
        """The test's own transactions end where they end; its TestCase's doesn't count.

        A lock released inside is kept until then.
        """
        with transaction.atomic():
            distributed_lock("inside").acquire(timeout=0).release()
            assert self.held("inside")
        assert not self.held("inside")

    def test_reentry_that_is_rolled_back(self) -> None:
        """An owner's entry in a block that is rolled back leaves its first one held."""
        with distributed_lock("inside", owner="x", timeout=0) as lease:
            with (
                pytest.raises(ZeroDivisionError),
                transaction.atomic(),
                distributed_lock("inside", owner="x", timeout=0),
            ):
                1 / 0  # noqa: B018
            assert distributed_lock("inside").try_acquire() is None
            lease.renew()
        assert not distributed_lock("inside").locked()

    def test_broken_transaction(self) -> None:
        """The error that broke the test's transaction comes out, not the next one."""
        with (  # noqa: PT012
            pytest.raises(IntegrityError),
            transaction.atomic(),
            hold_elsewhere("inside"),
        ):
            account = Account.objects.create(name="once")
            Account.objects.create(pk=account.pk, name="twice")
        assert not self.held("inside")

    def test_clock(self) -> None:
        """Leases run out without waiting, and somebody else may follow."""
        with pytest.raises(LeaseLost), distributed_lock("inside", lease=30) as lease:  # noqa: PT012
            move_clock(31)
            assert not lease.held
            with hold_elsewhere("inside") as theirs:
                assert theirs.fencing_token > lease.fencing_token
                assert self.held("inside")

    def test_replaced_holder_cannot_commit(self) -> None:
        """A holder that was replaced is refused at its commit."""
        account = Account.objects.create(name="guarded")
        with (  # noqa: PT012
            pytest.raises(LeaseLost),
            distributed_lock("inside", lease=30, atomic=True),
        ):
            Account.objects.filter(pk=account.pk).update(balance=1)
            move_clock(31)
            with hold_elsewhere("inside"):
                pass
        account.refresh_from_db()
        assert account.balance == 0

    def test_renewal(self) -> None:
        """A lease that is held for longer than its length stays held."""
        with distributed_lock("inside", lease=scaled(1.2)) as lease:
            until = time.monotonic() + scaled(3)
            while time.monotonic() < until:
                assert lease.held
                assert distributed_lock("inside", owner="x").try_acquire() is None
                time.sleep(0.05)

    def test_renewal_before_other_verbs(self) -> None:
        """Nor do the manager or a row lock find it overdue."""
        locks = DistributedLock.objects
        with hold_elsewhere("inside", lease=scaled(1)) as theirs:
            for refused in (
                lambda: locks.acquire("inside", owner="x", lease=30) is None,
                lambda: locks.for_update("inside", skip_locked=True) is None,
                lambda: locks.request_release("inside"),
            ):
                time.sleep(scaled(1.3))
                with transaction.atomic():
                    assert refused()
                assert theirs.held

    def test_renewal_before_the_clock_is_moved(self) -> None:
        """A longer lease is renewed when the clock has been moved."""
        with distributed_lock("inside", lease=30) as lease:
            for _ in range(2):
                move_clock(20)
                eventually(lambda: lease.remaining() > 20, what="the renewal")
            assert self.held("inside")

    def test_renewal_in_a_broken_transaction(self) -> None:
        """One that couldn't be made is still owed."""
        lease = scaled(3)
        with hold_elsewhere("inside", lease=lease) as theirs:
            taken = time.monotonic()
            time.sleep(0.93 * lease)
            with transaction.atomic():
                transaction.set_rollback(True)
                with pytest.raises(TransactionManagementError):
                    distributed_lock("something else").locked()
            time.sleep(max(0.0, taken + 1.03 * lease - time.monotonic()))
            locks = DistributedLock.objects
            assert locks.acquire("inside", owner="x", lease=30) is None
            assert theirs.held

    def test_renewal_in_a_decorated_function(self) -> None:
        """What one call has undone, the next makes again, though its block is one."""
        lease = scaled(3)

        @transaction.atomic
        def take(error: type[Exception] | None) -> object:
            row = DistributedLock.objects.acquire("inside", owner="x", lease=30)
            if error is not None:
                raise error
            return row

        with hold_elsewhere("inside", lease=lease) as theirs:
            taken = time.monotonic()
            time.sleep(0.93 * lease)
            with pytest.raises(KeyError):
                take(KeyError)
            time.sleep(max(0.0, taken + 1.03 * lease - time.monotonic()))
            assert take(None) is None
            assert theirs.held

    def test_renewal_in_replaced_settings(self) -> None:
        """So it does if the test has replaced the setting meanwhile."""
        with distributed_lock("inside", lease=scaled(1)) as lease:
            time.sleep(scaled(1.5))
            with override_settings(DBLOCKS={"default": {"TIMEOUT": 0}}):
                assert distributed_lock("inside", owner="x").try_acquire() is None
            assert lease.held

    async def test_async(self) -> None:
        """Async test methods lock on the test's connection too."""
        async with distributed_lock("inside", lease=30) as lease:
            assert await sync_to_async(self.held)("inside")
            tasks = [
                asyncio.create_task(distributed_lock("inside").atry_acquire())
                for _ in range(3)
            ]
            assert await asyncio.gather(*tasks) == [None] * 3
            await lease.arenew()
        async with hold_elsewhere("inside"):
            assert await distributed_lock("inside").atry_acquire() is None
        with pytest.raises(LeaseLost):
            async with distributed_lock("inside", lease=30):
                await amove_clock(31)

    async def test_waiting(self) -> None:
        """Waiting opens no connection beside the test's."""
        before = set(own_connections._open)
        async with hold_elsewhere("inside"):
            assert await distributed_lock("inside").atry_acquire(timeout=0.2) is None
            assert set(own_connections._open) <= before

    async def test_cancelled(self) -> None:
        """A cancelled task gives its lock back on the test's connection."""
        for after in (0, 0.001, 0.003):
            task = asyncio.create_task(distributed_lock("inside").aacquire())
            await asyncio.sleep(after)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await (await task).arelease()
            async with distributed_lock("inside", timeout=SLACK):
                pass

    def test_nothing_else_is_open(self) -> None:
        """No second connection stays open beside the test's."""
        with transaction.atomic(), distributed_lock("inside"):
            pass
        assert not own_connections._thread.beside


def run_case(test: Callable[[], object], kind: type[Any] = TestCase) -> None:
    """Run a function as the only test of a test case, whose end it has to itself."""

    class Case(kind):  # type: ignore[misc]
        def runTest(self) -> None:
            test()

    result = unittest.TestResult()
    unittest.TestSuite([Case()]).run(result)
    assert result.wasSuccessful(), result.failures + result.errors


@pytest.mark.needs("has_table")
class TestLeftovers:
    """What a failed test leaves behind is no later test's affair."""

    @pytest.fixture
    def left(self, committed: None, key: str) -> Iterator[list[Lease]]:
        """Return where the lease of the failed test stays referred to."""
        left: list[Lease] = []

        def fail() -> None:
            # Tokens begin anew after the rollback.
            for _ in range(3):
                distributed_lock(key).acquire(timeout=0).release()
            left.append(distributed_lock(key).acquire(timeout=0))

        run_case(fail)
        yield left
        assert left[0].release() is False

    def test_lease(self, left: list[Lease]) -> None:
        """With the transaction that it was granted in, a lease is over."""
        assert not left[0].held
        assert left[0].remaining() == 0

    @pytest.mark.parametrize("kind", [TestCase, TransactionTestCase])
    def test_later_test(self, left: list[Lease], key: str, kind: type[Any]) -> None:
        """Who takes the key in a later test has it, and keeps it."""

        def hold() -> None:
            for _ in range(2):
                with hold_elsewhere(key) as theirs:
                    distributed_lock(f"{key}:other").locked()
                    assert theirs.held
                    assert theirs.lost_reason is None
                with distributed_lock(key, timeout=0) as lease:
                    assert lease.held

        run_case(hold, kind)

    def test_thread_of_a_later_test(
        self, left: list[Lease], lock: Locks, key: str, obtainable: Obtainable
    ) -> None:
        """Nor are other threads refused what only the failed test had."""
        assert obtainable()

    def test_renewal_that_was_due(self, committed: None, key: str) -> None:
        """A later test neither renews it nor hears of its loss."""
        left: list[Lease] = []
        lost: list[str] = []

        def hear(key: str, **facts: object) -> None:
            lost.append(key)

        def leave() -> None:
            left.append(distributed_lock(key, lease=scaled(1)).acquire(timeout=0))
            time.sleep(scaled(0.5))

        def count() -> None:
            with CaptureQueriesContext(connection) as statements:
                distributed_lock(f"{key}:other").locked()
            assert len(statements) == 1

        run_case(leave)
        lock_lost.connect(hear)
        try:
            run_case(count)
            news.settle(SLACK)
        finally:
            lock_lost.disconnect(hear)
            left[0].release()
        assert lost == []

    def test_of_the_class(self, committed: None, key: str) -> None:
        """What a whole class of tests holds stays held between them."""

        class Case(TestCase):
            @classmethod
            def setUpClass(cls) -> None:
                super().setUpClass()
                cls.lease = distributed_lock(key).acquire(timeout=0)

            def test_one(self) -> None:
                assert self.lease.held
                with pytest.raises(LockTimeout), hold_elsewhere(key):
                    pass

            test_two = test_one

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
        assert result.wasSuccessful(), result.failures + result.errors
        assert not Case.lease.held
        assert Case.lease.release() is False

    def test_renewals_of_the_class(self, committed: None, key: str) -> None:
        """Each test undoes those that it made, so the next one makes them again."""

        class Case(TestCase):
            @classmethod
            def setUpClass(cls) -> None:
                super().setUpClass()
                cls.lease = distributed_lock(key, lease=scaled(1)).acquire(timeout=0)

            def test_one(self) -> None:
                time.sleep(scaled(1.1))
                assert distributed_lock(key, owner="x").try_acquire() is None

            def test_two(self) -> None:
                assert self.lease.held
                assert distributed_lock(key, owner="x").try_acquire() is None
                assert self.lease.held

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
        assert result.wasSuccessful(), result.failures + result.errors
        assert Case.lease.release() is False

    def test_block_of_the_class(self, committed: None, key: str) -> None:
        """A block around all tests of a class ends quietly, after Django's rollback."""

        class Case(TestCase):
            @classmethod
            def setUpClass(cls) -> None:
                super().setUpClass()
                block = ExitStack()
                cls.addClassCleanup(block.close)
                cls.lease = block.enter_context(distributed_lock(key, timeout=0))

            def test_one(self) -> None:
                assert self.lease.held

            test_two = test_one

        result = unittest.TestResult()
        unittest.defaultTestLoader.loadTestsFromTestCase(Case).run(result)
        assert result.wasSuccessful(), result.failures + result.errors
        assert not Case.lease.held

    def test_emptied_table(self, committed: None, key: str) -> None:
        """Nor does a leftover of a table that was emptied end what comes after."""
        for _ in range(3):
            distributed_lock(key).acquire(timeout=0).release()
        leftover = distributed_lock(key).acquire(timeout=0)
        wipe()
        with hold_elsewhere(key) as theirs:
            assert theirs.fencing_token < leftover.fencing_token
            assert theirs.held
            assert theirs.lost_reason is None
        assert leftover.release() is False


@pytest.mark.needs("has_table")
class InsideTransactionTestCase(TransactionTestCase):
    """Django's ``TransactionTestCase``: everything is committed."""

    def test_lock(self) -> None:
        """Locks and competitors work as in production."""
        with distributed_lock("committed", lease=30) as lease:
            assert lease.held
        with hold_elsewhere("committed", lease=30):
            assert distributed_lock("committed").try_acquire() is None
            move_clock(31)
            distributed_lock("committed").acquire(timeout=0).release()


def test_holder_that_cant_release(
    lock: Callable[..., Lock], backend: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The competitor's own failure is raised, unless the block has failed already."""
    errors = backends[backend].errors

    def fail(*arguments: Any, **options: Any) -> Any:
        raise errors[0]("out of reach")

    def hold(key: str, error: Exception | None) -> None:
        with hold_elsewhere(key, backend=backend):
            monkeypatch.setattr(backends[backend], "release", fail)
            monkeypatch.setattr(backends[backend], "release_all", fail)
            if error is not None:
                raise error

    with pytest.raises(errors, match="out of reach"):
        hold(key, None)
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError):
        hold(f"{key}:2", ZeroDivisionError())
