"""Locks in memory, beyond what the contract suite asks of every engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import NotSupportedError
from django.dispatch import Signal
from django.test import SimpleTestCase, override_settings

from dblocks import LeaseLost, LockTimeout, distributed_lock, signals
from dblocks.backends.locmem import LocMemBackend
from dblocks.conf import backends
from dblocks.holding.registry import registry
from dblocks.test import clear_locks, hold_elsewhere, move_clock
from tests.test_ownership import in_forked_child

LOCMEM = {"BACKEND": "dblocks.backends.locmem.LocMemBackend"}


@pytest.fixture(autouse=True)
def in_memory(settings: Any) -> Iterator[None]:
    """All locks of the test are in memory, and none are left."""
    settings.DBLOCKS = {"default": LOCMEM, "second": LOCMEM}

    def clear() -> None:
        for alias in ("default", "second"):
            clear_locks(alias)

    # Other tests may have left some.
    clear()
    yield
    clear()


def table() -> LocMemBackend:
    backend = backends["default"]
    assert isinstance(backend, LocMemBackend)
    return backend


def test_needs_no_database(key: str) -> None:
    """Locks work where tests may not touch the database."""
    with distributed_lock(key, lease=30) as lease:
        lease.renew()
        with distributed_lock(key):
            pass
        assert distributed_lock(key, owner="other").try_acquire() is None
        assert distributed_lock(key).locked()


def test_aliases_are_apart(key: str) -> None:
    """Each alias has locks of its own."""
    with (
        hold_elsewhere(key),
        distributed_lock(key, backend="second", timeout=0) as lease,
    ):
        assert lease.backend == "second"


def test_settings_change_while_held(key: str) -> None:
    """What is held stays so when settings are overridden."""
    with hold_elsewhere(key) as theirs:
        with override_settings(DBLOCKS={"default": LOCMEM | {"TIMEOUT": 0}}):
            assert distributed_lock(key).try_acquire() is None
        theirs.renew()
    distributed_lock(key).acquire(timeout=0).release()


def test_tokens_rise_over_everything(key: str) -> None:
    """No token comes twice: not after release, expiry, force release or clearing."""
    tokens = []

    def take() -> None:
        with distributed_lock(key, lease=30, timeout=0) as lease:
            assert lease.fencing_token is not None
            tokens.append(lease.fencing_token)

    take()
    take()
    with hold_elsewhere(key) as theirs:
        tokens.append(theirs.fencing_token or 0)
        move_clock(31)
        take()
    with hold_elsewhere(key):
        assert table().force_release(key)
        take()
    with hold_elsewhere(key):
        clear_locks()
        take()
    clear_locks()
    take()
    assert tokens == sorted(set(tokens))


def test_no_guard(key: str) -> None:
    """There is nothing to pin in a transaction."""
    with distributed_lock(key) as lease, pytest.raises(NotSupportedError):
        lease.guard()


@pytest.mark.django_db
def test_atomic_checks_before_the_commit(key: str) -> None:
    """atomic=True refuses to commit once the lease is over."""
    with distributed_lock(key, atomic=True):
        pass
    with pytest.raises(LeaseLost), distributed_lock(key, atomic=True, lease=30):
        move_clock(31)


class TestForceRelease:
    """``LocMemBackend.force_release`` does what the manager's does."""

    @pytest.fixture
    def told(self) -> Iterator[list[dict[str, Any]]]:
        told: list[dict[str, Any]] = []

        def hear(signal: Signal, sender: Any, **said: Any) -> None:
            told.append(said)

        with ExitStack() as listening:
            signals.lock_force_released.connect(hear)
            listening.callback(signals.lock_force_released.disconnect, hear)
            yield told

    def test_holder_is_fenced_off(self, key: str, told: list[dict[str, Any]]) -> None:
        """The key is free, its holder learns of it, and it is told by whom and why."""
        with pytest.raises(LeaseLost) as caught, distributed_lock(key) as lease:  # noqa: PT012
            assert table().force_release(key, by="operator", reason="stuck")
            assert not distributed_lock(key).locked()
            lease.renew()
        assert caught.value.reason == lease.lost_reason == "forced"
        (said,) = told
        assert (said["key"], said["backend"], said["owner"]) == (
            key,
            "default",
            lease.owner,
        )
        assert said["fencing_token"] == lease.fencing_token
        assert (said["by"], said["reason"]) == ("operator", "stuck")

    def test_only_that_grant(self, key: str) -> None:
        """With a version or an age, another grant is left alone."""
        with hold_elsewhere(key, lease=100) as theirs:
            token = theirs.fencing_token
            assert token is not None
            assert not table().force_release(key, version=token - 1)
            assert not table().force_release(key, older_than=60)
            assert theirs.held
            move_clock(61)
            assert table().force_release(key, version=token, older_than=60)

    def test_nothing_to_release(self, key: str, told: list[dict[str, Any]]) -> None:
        """A free key is left as it is, in silence."""
        assert not table().force_release(key)
        with distributed_lock(key):
            pass
        assert not table().force_release(key)
        assert not told

    def test_permit(self, key: str, told: list[dict[str, Any]]) -> None:
        """One permit is freed, the others stay held."""
        first, second = (
            distributed_lock(key, permits=2, owner=owner).acquire(timeout=0)
            for owner in ("one", "other")
        )
        assert not table().force_release(key)
        assert table().force_release(key, permit=second.permit)
        assert [(kwargs["key"], kwargs["permit"]) for kwargs in told] == [
            (key, second.permit)
        ]
        with pytest.raises(LeaseLost):
            second.renew()
        first.renew()
        assert first.release()

    def test_ends_cooling(self, key: str) -> None:
        """A cooling key is free at once."""
        with distributed_lock(key, hold_at_least=60):
            pass
        assert table().force_release(key)
        distributed_lock(key).acquire(timeout=0).release()


def test_entries(key: str) -> None:
    """All locks are told, or those of a key and its permits; waiters aren't."""
    with (
        hold_elsewhere(key, note="plain") as plain,
        hold_elsewhere(key, permits=2) as permit,
        hold_elsewhere(key + "?"),
    ):
        assert len(table().entries()) == 3
        found = {entry.permit: entry for entry in table().entries(key)}
        assert set(found) == {None, permit.permit}
        entry = found[None]
        assert (entry.lock_key, entry.owner, entry.version, entry.note) == (
            key,
            plain.owner,
            plain.fencing_token,
            "plain",
        )
        assert entry.state == "held"
        assert table().waiters(key).number is None
    assert {entry.state for entry in table().entries(key)} == {"free"}


def test_readable_by_a_forked_child(key: str) -> None:
    """A child sees what was held at the fork, and can't enter."""
    with distributed_lock(key):
        assert in_forked_child(lambda: distributed_lock(key).try_acquire()) is None
        assert in_forked_child(lambda: distributed_lock(key).locked()) is True


def test_options() -> None:
    """There are no options."""
    wrong = {"default": LOCMEM | {"OPTIONS": {"using": "default"}}}
    with (
        override_settings(DBLOCKS=wrong),
        pytest.raises(ImproperlyConfigured, match="using"),
    ):
        distributed_lock("k").locked()


class InsideSimpleTestCase(SimpleTestCase):
    """A test case without any database."""

    def tearDown(self) -> None:
        clear_locks()

    def test_lock(self) -> None:
        """Locks work, and competitors too."""
        with distributed_lock("simple"):
            pass
        with hold_elsewhere("simple"), pytest.raises(LockTimeout):
            distributed_lock("simple").acquire(timeout=0)

    async def test_async(self) -> None:
        """Tasks exclude each other."""
        inside = 0

        async def enter() -> int:
            nonlocal inside
            async with distributed_lock("simple", timeout=10):
                inside += 1
                seen = inside
                await asyncio.sleep(0)
                inside -= 1
            return seen

        assert await asyncio.gather(*[enter() for _ in range(10)]) == [1] * 10


def test_grant_that_ends_while_lost_holds_are_asked_for() -> None:
    """A signal handler there may use the same lock; what is granted then is held."""
    lock = distributed_lock("reentrant", owner="me", lease=30)
    lost = lock.acquire()
    lost._hold.lose("expired")
    take = registry.take_forfeited
    inside: list[bool] = []

    def interrupted(*args: Any) -> int:
        if not inside:
            inside.append(True)
            lock.acquire().release()
        return take(*args)

    with patch.object(registry, "take_forfeited", interrupted):
        lease = lock.acquire()
    lease.renew()
    assert lease.release() is True
    assert not lock.locked()
