"""The database's clock in UTC decides, whatever server, session and client think."""

from __future__ import annotations

import datetime as datetime_module
import time
from collections.abc import Callable, Iterator
from concurrent.futures import TimeoutError as NotInTime
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections, transaction
from django.db.backends.signals import connection_created
from django.db.models import Max, Subquery, Window
from django.db.models.functions import RowNumber
from django.utils import timezone as django_timezone

from dblocks import Lease, Lock, LockTimeout, distributed_lock, transaction_lock
from dblocks.admin.force_release import is_busy
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support.factories import let_expire, stored
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

locks = DistributedLock.objects
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]

REAL_TIME = time.time


def utc(value: datetime) -> datetime:
    """Return the moment in UTC; a naive one is taken to be so already."""
    return value if value.tzinfo else value.replace(tzinfo=timezone.utc)


def real_now() -> datetime:
    """Return the true time, whatever the clocks have been patched to."""
    return datetime.fromtimestamp(REAL_TIME(), timezone.utc)


def assert_grant_is_right(key: str, acquire: Leases, obtainable: Obtainable) -> None:
    """A lease's times are right in UTC; it keeps others out and ends on time."""
    lease = acquire(lease=600)
    row = stored(key)
    assert abs(utc(row.acquired_at) - real_now()) < timedelta(seconds=5)
    assert abs(utc(row.expires_at) - real_now() - timedelta(seconds=600)) < timedelta(
        seconds=5
    )
    assert locks.held().filter(pk=key).exists()
    assert not obtainable()
    lease.release()
    assert locks.free().filter(pk=key).exists()
    assert obtainable()
    before = time.monotonic()
    short = acquire(lease=0.5, renew=False)
    eventually(obtainable, within=0.5 + SLACK, what="the end of the lease")
    # SQLite's clock counts milliseconds.
    assert time.monotonic() - before >= 0.5 - 0.002
    assert not short.held


@pytest.fixture(params=["+05:00", "-11:00"])
def session_time_zone(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every new session is in another time zone."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no sessions with a time zone")
    statement = {
        "mysql": f"SET time_zone = '{request.param}'",
        "postgresql": f"SET TIME ZONE INTERVAL '{request.param}' HOUR TO MINUTE",
    }[connection.vendor]

    def move(connection: Any, **kwargs: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement)

    connection.close()
    connection_created.connect(move)
    yield request.param
    connection_created.disconnect(move)
    connection.close()


def test_session_in_another_time_zone(
    session_time_zone: str, key: str, acquire: Leases, obtainable: Obtainable
) -> None:
    """A server or session whose local time isn't UTC changes nothing."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT CURRENT_TIMESTAMP")
    assert_grant_is_right(key, acquire, obtainable)


def test_prune_in_another_time_zone(
    session_time_zone: str, key: str, acquire: Leases
) -> None:
    """Pruning judges ages in UTC too."""
    acquire().release()
    locks.prune(older_than=60)
    assert locks.filter(pk=key).exists()
    let_expire(key)
    locks.prune(older_than=30)
    assert not locks.filter(pk=key).exists()


@pytest.mark.parametrize("use_tz", [True, False], ids=["USE_TZ", "naive"])
def test_use_tz(
    settings: Any, key: str, acquire: Leases, obtainable: Obtainable, use_tz: bool
) -> None:
    """With and without USE_TZ the model's times are right in UTC."""
    settings.USE_TZ = use_tz
    settings.TIME_ZONE = "Asia/Karachi"
    connections.close_all()
    assert_grant_is_right(key, acquire, obtainable)


@pytest.fixture
def database_time_zone(settings: Any) -> Iterator[None]:
    """The database's TIME_ZONE setting says that its columns are five hours ahead."""

    def forget() -> None:
        connection.close()
        for name in ("timezone", "timezone_name"):
            # Not the proxy's, which has none of what the connection has cached.
            connections["default"].__dict__.pop(name, None)

    before = connection.settings_dict["TIME_ZONE"]
    connection.settings_dict["TIME_ZONE"] = "Asia/Karachi"
    forget()
    yield
    connection.settings_dict["TIME_ZONE"] = before
    forget()


def test_database_time_zone_setting(
    database_time_zone: None, key: str, acquire: Leases, obtainable: Obtainable
) -> None:
    """DATABASES[...]["TIME_ZONE"] changes nothing."""
    assert_grant_is_right(key, acquire, obtainable)


def test_moments_of_a_subquery(
    database_time_zone: None, key: str, acquire: Leases
) -> None:
    """A moment that a subquery selects is the same moment, and as exact."""
    acquire(lease=600)
    rows = locks.filter(pk=key)
    ends = rows.values("expires_at")
    assert rows.filter(expires_at__in=ends).exists()
    found = rows.annotate(end=Subquery(ends)).get()
    last = rows.distinct().aggregate(end=Max("expires_at"))["end"]
    assert found.end == last == found.expires_at


def test_moments_of_rows_found_by_a_window(
    database_time_zone: None, key: str, acquire: Leases
) -> None:
    """A filter by a window function, which Django puts around a subquery, as well."""
    acquire(lease=600)
    rows = locks.filter(pk=key)
    first = rows.annotate(number=Window(RowNumber())).filter(number=1)
    assert first.get().expires_at == rows.get().expires_at


@pytest.fixture(params=[timedelta(days=1), timedelta(days=-1)], ids=["ahead", "behind"])
def wrong_clock(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> timedelta:
    """The client's wall clock is a day off; its monotonic clock isn't."""
    shift: timedelta = request.param

    class AnyDatetime(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, datetime)

    class Shifted(datetime, metaclass=AnyDatetime):
        """A datetime whose now() is wrong."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromtimestamp(REAL_TIME(), tz) + shift

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(timezone.utc).replace(tzinfo=None)

    monkeypatch.setattr(time, "time", lambda: REAL_TIME() + shift.total_seconds())
    monkeypatch.setattr(
        time, "time_ns", lambda: int((REAL_TIME() + shift.total_seconds()) * 1e9)
    )
    monkeypatch.setattr(datetime_module, "datetime", Shifted)
    monkeypatch.setattr(django_timezone, "now", lambda: Shifted.now(timezone.utc))
    return shift


def test_client_clock_a_day_off(
    wrong_clock: timedelta, key: str, acquire: Leases, obtainable: Obtainable
) -> None:
    """A client a day ahead or behind changes no grant."""
    assert abs(django_timezone.now() - real_now()) > timedelta(hours=23)
    assert_grant_is_right(key, acquire, obtainable)


def test_retry_after_by_the_right_clock(
    wrong_clock: timedelta,
    acquire: Leases,
    lock: Callable[..., Lock],
    other: OtherThread,
) -> None:
    """The time left that LockTimeout tells doesn't come from the client's clock."""
    acquire(lease=100)
    with pytest.raises(LockTimeout) as caught:
        other.do(lock().acquire, timeout=0)
    assert 90 < caught.value.retry_after <= 100


def test_client_clock_jumps_while_holding(
    acquire: Leases, obtainable: Obtainable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wall clock that jumps takes nothing from a lease and adds nothing."""
    length = scaled(2.4)
    lease = acquire(lease=length)
    for jump in (+200, -200):
        monkeypatch.setattr(time, "time", lambda jump=jump: REAL_TIME() + jump)
        always(lambda: lease.held and not obtainable(), during=length, what="held")


def test_lease_taken_late_in_a_transaction(
    two_writers: None, key: str, other: OtherThread
) -> None:
    """A lease counts from its grant, not from the start of the caller's transaction."""
    ends = []
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        for name in (f"{key}:early", f"{key}:late"):
            with distributed_lock(name, lease=60, renew=False):
                ends.append(other.do(stored, name).expires_at)
            at = time.monotonic()
            eventually(lambda after=at: time.monotonic() > after + 0.4)
    assert ends[1] - ends[0] > timedelta(seconds=0.3)


# Frozen clocks, as freezegun makes them


@contextmanager
def frozen_clocks() -> Iterator[None]:
    """Stop the clocks that Python offers."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter"):
            now = getattr(time, name)()
            patch.setattr(time, name, lambda now=now: now)
        yield


def when_frozen(other: OtherThread, function: Callable[[], Any]) -> Any:
    """Call a function in another thread while the clocks stand still."""
    with frozen_clocks():
        future = other.start(function)
        try:
            # A release waits for SQLite's one writer for as long as Django does: 20 s.
            return future.result(timeout=2 * DEADLINE)
        except NotInTime:
            pytest.fail("it waits for ever")


@contextmanager
def busy(key: str) -> Iterator[None]:
    """Keep the row, on SQLite the whole database, from being written."""
    with transaction.atomic():
        assert locks.filter(pk=key).update(note="busy")
        yield


@pytest.mark.usefixtures("readers_beside_a_writer")
class TestFrozenClocks:
    """Who waits for a database finds out when the time is over."""

    @pytest.fixture(autouse=True)
    def row(self, committed: None, key: str) -> None:
        """Let the key have a row."""
        distributed_lock(key).acquire(timeout=0).release()

    @pytest.mark.parametrize("timeout", [0, 0.2])
    def test_acquire(self, key: str, other: OtherThread, timeout: float) -> None:
        """An acquire ends, however busy the database."""
        lock = distributed_lock(key)
        with busy(key):
            lease = when_frozen(other, lambda: lock.try_acquire(timeout=timeout))
        assert lease is None

    def test_release(self, key: str, other: OtherThread) -> None:
        """A release is done or an error."""
        if connection.vendor != "sqlite":
            pytest.skip("the server lets it wait for the row")
        lease = other.do(distributed_lock(key, lease=2, renew=False).acquire)

        def release() -> bool:
            try:
                return bool(lease.release())
            except DatabaseError:
                return True

        with busy(key):
            assert when_frozen(other, release)

    def test_pessimistic_form(self, key: str, other: OtherThread) -> None:
        """So does the wait for a lease's end inside a transaction."""

        def wait() -> None:
            with transaction.atomic(), transaction_lock(key, timeout=0.2):
                pytest.fail("locked")

        with hold_elsewhere(key), pytest.raises(LockTimeout):
            when_frozen(other, wait)

    @pytest.mark.usefixtures("two_writers")
    def test_manager(self, key: str, other: OtherThread) -> None:
        """So does the manager's try for a row that a transaction has locked."""
        with busy(key):
            row = when_frozen(other, lambda: locks.acquire(key, owner="me", lease=30))
        assert row is None

    @pytest.mark.usefixtures("two_writers")
    def test_admin(self, key: str, other: OtherThread) -> None:
        """So does the admin's look at such a row."""
        if not connection.features.has_select_for_update_skip_locked:
            pytest.skip("it can't look at locked rows")
        with busy(key):
            assert when_frozen(other, lambda: is_busy(key, patience=0.2))
