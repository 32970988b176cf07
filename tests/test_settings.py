"""The setting ``DBLOCKS``: aliases, defaults, routers, and what is refused."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import NotSupportedError, connections
from django.test import override_settings

from dblocks import LockTimeout, distributed_lock
from dblocks.backends.base import BaseBackend
from dblocks.backends.locmem import LocMemBackend
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support.timing import SLACK, scaled, takes

pytestmark = pytest.mark.usefixtures("committed")

DATABASE = "dblocks.backends.database.DatabaseBackend"
MEMORY = "dblocks.backends.locmem.LocMemBackend"


def remaining(key: str, **options: Any) -> float:
    """Return how long a fresh lease on the key lasts."""
    lease = distributed_lock(key, **options).acquire(timeout=0)
    try:
        return lease.remaining()
    finally:
        lease.release()


@pytest.mark.parametrize(
    "value", [None, {}, {"other": {"BACKEND": MEMORY}}, {"default": {}}], ids=repr
)
def test_defaults(settings: Any, key: str, value: Any) -> None:
    """Without settings the database keeps the locks, for 30 s."""
    settings.DBLOCKS = value
    with distributed_lock(key) as lease:
        assert DistributedLock.objects.filter(pk=key).exists()
        assert lease.backend == "default"
    assert 26 < remaining(key) <= 27


def test_no_setting(settings: Any, key: str) -> None:
    """The setting may be missing altogether."""
    del settings.DBLOCKS
    with distributed_lock(key) as lease:
        assert lease.held


def test_default_timeout(key: str, settings: Any) -> None:
    """Without a timeout of its own a lock waits for 3 s."""
    settings.DBLOCKS = {}
    with hold_elsewhere(key), takes(3, 3 + SLACK), pytest.raises(LockTimeout) as it:
        distributed_lock(key).acquire()
    assert it.value.timeout == 3


SHORT = scaled(0.3)


@pytest.mark.parametrize("value", [SHORT, timedelta(seconds=SHORT)], ids=str)
def test_timeout(settings: Any, key: str, value: Any) -> None:
    """TIMEOUT is what a lock waits for that says nothing itself."""
    settings.DBLOCKS = {"default": {"TIMEOUT": value}}
    with hold_elsewhere(key), takes(SHORT, SHORT + SLACK), pytest.raises(LockTimeout):
        distributed_lock(key).acquire()
    with hold_elsewhere(key), takes(at_most=scaled(0.25)), pytest.raises(LockTimeout):
        distributed_lock(key, timeout=0).acquire()


def test_endless_timeout(settings: Any, key: str) -> None:
    """A TIMEOUT of None waits for as long as it takes."""
    settings.DBLOCKS = {"default": {"TIMEOUT": None}}
    other = distributed_lock(key, owner="other", lease=scaled(0.5), renew=False)
    lease = other.acquire(timeout=0)
    with takes(0.1, scaled(0.5) + SLACK):
        distributed_lock(key).acquire().release()
    assert not lease.held


@pytest.mark.parametrize("value", [10, timedelta(seconds=10)], ids=str)
def test_lease(settings: Any, key: str, value: Any) -> None:
    """LEASE is how long a lock is held that says nothing itself."""
    settings.DBLOCKS = {"default": {"LEASE": value}}
    assert 8 < remaining(key) <= 9
    assert 17 < remaining(key, lease=20) <= 18


def test_settings_of_each_alias(settings: Any, key: str) -> None:
    """Each alias has its own; what it leaves out are the defaults."""
    settings.DBLOCKS = {"default": {"LEASE": 10}, "long": {"LEASE": 100}, "plain": {}}
    found = [
        round(remaining(key, backend=alias)) for alias in ("default", "long", "plain")
    ]
    assert found == [9, 90, 27]


def test_override(key: str) -> None:
    """override_settings holds for its block, for locks made before it too."""
    lock = distributed_lock(key, timeout=0)
    with override_settings(DBLOCKS={"default": {"LEASE": 100}}), lock as lease:
        assert 89 < lease.remaining() <= 90
    with override_settings(DBLOCKS={"default": {"BACKEND": MEMORY}}), lock:
        assert not DistributedLock.objects.held().filter(pk=key).exists()
    with lock as lease:
        assert lease.remaining() <= 27


@pytest.mark.parametrize("form", ["block", "acquire", "locked"])
def test_unknown_alias(form: str, key: str) -> None:
    """An alias that isn't there is an error that names those that are."""
    lock = distributed_lock(key, backend="nowhere")
    with pytest.raises(ImproperlyConfigured, match=r"'nowhere'.*default"):  # noqa: PT012
        if form == "block":
            lock.__enter__()
        else:
            getattr(lock, form)()


def test_setting_without_an_alias(settings: Any, key: str) -> None:
    """Who forgets the alias is shown where it goes."""
    for value in ({"LEASE": 30}, {"OPTIONS": {"using": "default"}}):
        settings.DBLOCKS = value
        with pytest.raises(ImproperlyConfigured) as caught:
            distributed_lock(key).locked()
        assert "DBLOCKS maps aliases to dicts" in str(caught.value)
        assert f"Write DBLOCKS = {{'default': {value!r}}}." in str(caught.value)
        settings.DBLOCKS = {"default": value}
        assert not distributed_lock(key).locked()


@pytest.mark.parametrize(
    ("config", "known"),
    [
        ({"LEASES": 5}, "BACKEND, LEASE, OPTIONS, TIMEOUT"),
        ({"OPTIONS": {"database": "x"}}, "session_locks, using"),
        ({"BACKEND": MEMORY, "OPTIONS": {"using": "x"}}, "none"),
    ],
    ids=repr,
)
def test_names_that_are_known(settings: Any, key: str, config: Any, known: str) -> None:
    """An unknown name is answered with those that are known."""
    settings.DBLOCKS = {"default": config}
    with pytest.raises(ImproperlyConfigured, match=f"; it may have {known}[.]"):
        distributed_lock(key).locked()


def test_forgotten_app(settings: Any, key: str) -> None:
    """A project without the app is told to add it, unless its locks are no rows."""
    apps = [app for app in settings.INSTALLED_APPS if not app.startswith("dblocks")]
    settings.DBLOCKS = {"memory": {"BACKEND": MEMORY}}
    with override_settings(INSTALLED_APPS=apps):
        with pytest.raises(ImproperlyConfigured, match="'dblocks' to INSTALLED_APPS"):
            distributed_lock(key).try_acquire()
        with distributed_lock(key, backend="memory"):
            pass
    with distributed_lock(key):
        pass


BAD: dict[str, tuple[Any, str]] = {
    "no dict": ("default", "DBLOCKS"),
    "empty list": ([], "DBLOCKS"),
    "a list": ([{"BACKEND": DATABASE}], "DBLOCKS"),
    "entry": ({"default": None}, "default"),
    "entry of a string": ({"default": DATABASE}, "default"),
    "alias of None": ({None: {}}, "None"),
    "alias of bytes": ({b"default": {}}, "b'default'"),
    "unknown name": ({"default": {"LEASES": 5}}, "LEASES"),
    "lower case": ({"default": {"lease": 5}}, "lease"),
    "unknown option": ({"default": {"OPTIONS": {"database": "x"}}}, "database"),
    "options": ({"default": {"OPTIONS": None}}, "OPTIONS"),
    "options of a list": ({"default": {"OPTIONS": ["using"]}}, "OPTIONS"),
    "unknown database": ({"default": {"OPTIONS": {"using": "x"}}}, "'x'"),
    "no module": ({"default": {"BACKEND": "no.such.Backend"}}, "no.such.Backend"),
    "no class": ({"default": {"BACKEND": "dblocks.backends.Nothing"}}, "Nothing"),
    "no path": ({"default": {"BACKEND": "redis"}}, "redis"),
    "path that ends": ({"default": {"BACKEND": "."}}, "'.'"),
    "relative path": ({"default": {"BACKEND": "..locmem"}}, "'..locmem'"),
    "path of bytes": ({"default": {"BACKEND": DATABASE.encode()}}, "b'dblocks"),
    "class": ({"default": {"BACKEND": object}}, "object"),
    "abstract class": (
        {"default": {"BACKEND": "dblocks.backends.base.BaseBackend"}},
        "BaseBackend",
    ),
    "no backend": ({"default": {"BACKEND": "datetime.datetime"}}, "datetime"),
    "function": ({"default": {"BACKEND": "dblocks.distributed_lock"}}, "distributed"),
    "lease of a string": ({"default": {"LEASE": "30"}}, "LEASE"),
    "lease of None": ({"default": {"LEASE": None}}, "LEASE"),
    "short lease": ({"default": {"LEASE": 0.05}}, "LEASE"),
    "long lease": ({"default": {"LEASE": 366 * 86400 + 1}}, "LEASE"),
    "timeout of a string": ({"default": {"TIMEOUT": "3"}}, "TIMEOUT"),
    "negative timeout": ({"default": {"TIMEOUT": -1}}, "TIMEOUT"),
    "timeout of no number": ({"default": {"TIMEOUT": Decimal("sNaN")}}, "TIMEOUT"),
    "endless timeout": ({"default": {"TIMEOUT": float("inf")}}, "TIMEOUT"),
}


@pytest.mark.parametrize(("value", "word"), BAD.values(), ids=BAD)
def test_bad_setting(settings: Any, key: str, value: Any, word: str) -> None:
    """What can't be used is ImproperlyConfigured and says what is wrong."""
    settings.DBLOCKS = value
    with pytest.raises(ImproperlyConfigured) as caught:
        distributed_lock(key).acquire(timeout=0)
    assert word in str(caught.value)


@pytest.mark.parametrize("value", [value for value, _ in BAD.values()], ids=BAD)
def test_bad_setting_at_the_start(settings: Any, value: Any) -> None:
    """No project fails to start by it: a system check says what is wrong."""
    settings.DBLOCKS = value
    backends.load()


# Which database


class Router:
    """Sends locks to the database ``locks``, and reads them elsewhere."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "default" if model is DistributedLock else None

    def db_for_write(self, model: Any, **hints: Any) -> str | None:
        return "locks" if model is DistributedLock else None


def is_held_in(using: str, key: str) -> bool:
    return DistributedLock.objects.using(using).held().filter(pk=key).exists()


@pytest.fixture
def two_databases() -> Any:
    """Apply the test only where there are two databases."""
    if "locks" not in connections.settings:
        pytest.skip("LOCKS_DATABASE_URL names no second database")
    yield
    with connections["locks"].cursor() as cursor:
        cursor.execute(f"DELETE FROM {DistributedLock._meta.db_table}")


@pytest.mark.needs("has_table")
def test_router(settings: Any, key: str, two_databases: None) -> None:
    """Without using, the router's database for writing has the locks."""
    settings.DATABASE_ROUTERS = [Router()]
    with distributed_lock(key) as lease:
        assert is_held_in("locks", key)
        assert not is_held_in("default", key)
        assert distributed_lock(key).locked()
    assert lease.lost_reason is None


@pytest.mark.needs("has_table")
def test_using_instead_of_the_router(
    settings: Any, key: str, two_databases: None
) -> None:
    """using has precedence over the router."""
    settings.DATABASE_ROUTERS = [Router()]
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": "default"}}}
    with distributed_lock(key):
        assert is_held_in("default", key)
        assert not is_held_in("locks", key)


@pytest.mark.needs("has_table")
def test_manager_follows_the_setting(
    settings: Any, key: str, two_databases: None
) -> None:
    """The manager looks into the database that the setting names."""
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": "locks"}}}
    lease = distributed_lock(key, renew=False).acquire(timeout=0)
    assert DistributedLock.objects.held().filter(pk=key).exists()
    assert DistributedLock.objects.force_release(key)
    assert not is_held_in("locks", key)
    assert lease.release() is False


class Plain(LocMemBackend):
    """An engine that operators can do nothing with."""

    end_grant = BaseBackend.end_grant
    ask_holder = BaseBackend.ask_holder


def test_engine_without_what_operators_need(settings: Any, key: str) -> None:
    """An engine that can't be interfered with says so by its alias, as for its rows."""
    settings.DBLOCKS = {"plain": {"BACKEND": f"{__name__}.Plain"}}
    plain = backends["plain"]
    with pytest.raises(NotSupportedError, match="'plain' can't force a release"):
        plain.force_release(key)
    with pytest.raises(NotSupportedError, match="'plain' can't ask for a release"):
        plain.request_release(key)
    with pytest.raises(NotSupportedError, match="'plain' keeps no rows"):
        _ = plain.using
