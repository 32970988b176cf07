"""Who is measured: dblocks, its peers, and the least that a database can do.

The peers are used as their documentation says, with their defaults. What each needs is
imported when it is first used: not every one runs on every database.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from django.db import connection

WAIT = 5.0
"""Seconds that a contender waits for its lock, where it can be told."""

LEASE = 30.0
"""Seconds for which it has its lock, where it can be told."""


@dataclass(frozen=True)
class Contender:
    """One way to lock a key."""

    name: str
    #: Makes a context manager that waits for the key.
    lock: Callable[[str], AbstractContextManager[object]]
    servers: frozenset[str]
    #: The distribution whose version is reported.
    package: str | None
    writes: str
    waits: str
    #: Whether what says "taken" survives the server's crash.
    durable: bool = True
    #: Whether it waits for a key that is taken.
    can_wait: bool = True
    #: Whether it locks only what has a row already.
    needs_row: bool = False


def _dblocks(key: str) -> AbstractContextManager[object]:
    from dblocks import distributed_lock

    return distributed_lock(key)


class Bare:
    """Two conditional updates of plain SQL on Django's connection."""

    _ACQUIRE = {
        "mysql": (
            "UPDATE benchmarks_barelock SET version = LAST_INSERT_ID(version + 1),"
            " expires_at = UTC_TIMESTAMP(6) + INTERVAL 30 SECOND, owner = %s"
            " WHERE `key` = %s AND expires_at <= UTC_TIMESTAMP(6)"
        ),
        "postgresql": (
            "UPDATE benchmarks_barelock SET version = version + 1,"
            " expires_at = clock_timestamp() + interval '30 seconds', owner = %s"
            " WHERE key = %s AND expires_at <= clock_timestamp() RETURNING version"
        ),
        "sqlite": (
            "UPDATE benchmarks_barelock SET version = version + 1,"
            " expires_at = strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '+30 seconds'),"
            " owner = %s WHERE key = %s"
            " AND expires_at <= strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')"
            " RETURNING version"
        ),
    }
    _NOW = {
        "mysql": "UTC_TIMESTAMP(6)",
        "postgresql": "clock_timestamp()",
        "sqlite": "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now')",
    }
    _RELEASE = (
        "UPDATE benchmarks_barelock SET expires_at = {now}, owner = ''"
        " WHERE {key} = %s AND owner = %s AND version = %s"
    )

    def __init__(self, key: str) -> None:
        self.key = key
        self.owner = os.urandom(16).hex()
        self.version = 0

    def __enter__(self) -> None:
        vendor = connection.vendor
        with connection.cursor() as cursor:
            cursor.execute(self._ACQUIRE[vendor], [self.owner, self.key])
            if vendor == "mysql":
                self.version = cursor.lastrowid if cursor.rowcount else 0
            else:
                row = cursor.fetchone()
                self.version = row[0] if row else 0
        if not self.version:
            raise RuntimeError(f"{self.key!r} is taken, or has no row.")

    def __exit__(self, *exc_info: object) -> None:
        vendor = connection.vendor
        key = "`key`" if vendor == "mysql" else "key"
        with connection.cursor() as cursor:
            cursor.execute(
                self._RELEASE.format(now=self._NOW[vendor], key=key),
                [self.key, self.owner, self.version],
            )


class SessionLock:
    """The server's own lock, on Django's connection."""

    def __init__(self, key: str) -> None:
        digest = hashlib.sha256(key.encode()).digest()
        self.name: int | str
        if connection.vendor == "mysql":
            self.take, self.free = "SELECT GET_LOCK(%s, 30)", "SELECT RELEASE_LOCK(%s)"
            self.name = digest.hex()[:40]
        else:
            self.take = "SELECT pg_advisory_lock(%s)"
            self.free = "SELECT pg_advisory_unlock(%s)"
            self.name = int.from_bytes(digest[:8], "big", signed=True)

    def __enter__(self) -> None:
        self._ask(self.take)

    def __exit__(self, *exc_info: object) -> None:
        self._ask(self.free)

    def _ask(self, statement: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(statement, [self.name])
            [answer] = cursor.fetchone()
        if answer in (0, False):
            raise RuntimeError(f"{statement} failed.")


@contextmanager
def _queued_bare(key: str) -> Iterator[None]:
    with SessionLock(key), Bare(key):
        yield


@contextmanager
def _select_for_update(key: str) -> Iterator[None]:
    from django.db import transaction

    from benchmarks.models import BareLock

    with transaction.atomic():
        BareLock.objects.select_for_update().get(key=key)
        yield


def _recipe(key: str) -> AbstractContextManager[object]:
    from benchmarks.recipe import Recipe

    return Recipe(key, lock_timeout=LEASE, get_timeout=WAIT)


@contextmanager
def _db_mutex(key: str) -> Iterator[None]:
    from db_mutex.db_mutex import db_mutex
    from db_mutex.exceptions import DBMutexError

    give_up = time.monotonic() + WAIT
    mutex = db_mutex(key)
    while True:
        try:
            mutex.start()
            break
        except DBMutexError:
            if time.monotonic() > give_up:
                raise
            time.sleep(random.uniform(0.005, 0.015))
    try:
        yield
    finally:
        mutex.stop()


@contextmanager
def _database_locks_class(key: str) -> Iterator[None]:
    from database_locks.locks import DBLock

    lock = DBLock(key)
    if not lock.acquire(lock_ttl=LEASE):
        raise RuntimeError(f"{key!r} is taken.")
    try:
        yield
    finally:
        lock.release()


def _database_locks(key: str) -> AbstractContextManager[object]:
    from database_locks import lock

    manager: AbstractContextManager[object] = lock(key, timeout=WAIT, lock_ttl=LEASE)
    return manager


def _django_mysql(key: str) -> AbstractContextManager[object]:
    from django_mysql.locks import Lock

    manager: AbstractContextManager[object] = Lock(key, acquire_timeout=WAIT)
    return manager


def _pglock(key: str) -> AbstractContextManager[object]:
    import pglock

    manager: AbstractContextManager[object] = pglock.advisory(key)
    return manager


@cache
def _redis() -> Any:
    from django.conf import settings
    from redis import Redis

    return Redis.from_url(settings.CACHES["default"]["LOCATION"])


def _redis_py(key: str) -> AbstractContextManager[object]:
    manager: AbstractContextManager[object] = _redis().lock(
        key, timeout=LEASE, blocking_timeout=WAIT
    )
    return manager


def _django_redis(key: str) -> AbstractContextManager[object]:
    from django.core.cache import cache as store

    manager: AbstractContextManager[object] = store.lock(  # type: ignore[attr-defined]
        key, timeout=LEASE, blocking_timeout=WAIT
    )
    return manager


def _python_redis_lock(key: str) -> AbstractContextManager[object]:
    import redis_lock

    lock = redis_lock.Lock(_redis(), key, expire=int(LEASE))
    manager: AbstractContextManager[object] = lock
    return manager


@cache
def _zookeeper() -> Any:
    from django.conf import settings
    from kazoo.client import KazooClient

    client = KazooClient(hosts=settings.DBLOCKS["default"]["LOCATION"])
    client.start()
    return client


def _kazoo(key: str) -> AbstractContextManager[object]:
    manager: AbstractContextManager[object] = _zookeeper().Lock(f"/kazoo/{key}")
    return manager


_SERVERS = frozenset({"mariadb", "postgres"})
_DATABASES = _SERVERS | {"sqlite"}
_REDIS = frozenset({"redis"})
_ZOOKEEPER = frozenset({"zookeeper"})

DBLOCKS = Contender(
    "dblocks",
    _dblocks,
    _DATABASES | _REDIS | _ZOOKEEPER,
    "django-dblocks",
    "two updates of a row; Redis: a hash in memory; ZooKeeper: a node on disk",
    "the server's queue, then reads of the row; SQLite: a lock on a byte of a file; "
    "Redis: a queue and a blocking pop; ZooKeeper: a watch",
)
BARE = Contender(
    "two bare updates",
    Bare,
    _DATABASES,
    None,
    "two updates of a row",
    "does not wait",
    can_wait=False,
    needs_row=True,
)
SESSION_LOCK = Contender(
    "the server's session lock",
    SessionLock,
    _SERVERS,
    None,
    "nothing",
    "the server's queue",
    durable=False,
)
SELECT_FOR_UPDATE = Contender(
    "select_for_update()",
    _select_for_update,
    _SERVERS,
    None,
    "nothing; the row is locked until the transaction ends",
    "the database's lock of the row",
    durable=False,
    needs_row=True,
)
QUEUED_BARE = Contender(
    "the session lock around two bare updates",
    _queued_bare,
    _SERVERS,
    None,
    "two updates of a row",
    "the server's queue",
    needs_row=True,
)
RECIPE = Contender(
    "the published recipe",
    _recipe,
    _DATABASES,
    None,
    "two updates of a row, each after a read, on four connections",
    "looks every 100 ms",
)
DB_MUTEX = Contender(
    "django-db-mutex",
    _db_mutex,
    _DATABASES,
    "django-db-mutex",
    "inserts and deletes a row",
    "does not wait; tried again here after 5 to 15 ms",
)
DATABASE_LOCKS_CLASS = Contender(
    "django-database-locks, DBLock",
    _database_locks_class,
    _DATABASES,
    "django-database-locks",
    "two updates of a row in transactions",
    "does not wait",
    can_wait=False,
)
DATABASE_LOCKS = Contender(
    "django-database-locks, lock()",
    _database_locks,
    _DATABASES,
    "django-database-locks",
    "the same, and a thread for each lock; on SQLite nothing at all",
    "looks every 500 ms",
)
DJANGO_MYSQL = Contender(
    "django-mysql",
    _django_mysql,
    frozenset({"mariadb"}),
    "django-mysql",
    "nothing",
    "the server's queue",
    durable=False,
)
PGLOCK = Contender(
    "django-pglock",
    _pglock,
    frozenset({"postgres"}),
    "django-pglock",
    "nothing",
    "the server's queue",
    durable=False,
)
REDIS_PY = Contender(
    "redis-py",
    _redis_py,
    _REDIS,
    "redis",
    "a key in memory; on disk within about a second",
    "looks every 100 ms",
    durable=False,
)
DJANGO_REDIS = Contender(
    "django-redis",
    _django_redis,
    _REDIS,
    "django-redis",
    "a key in memory; on disk within about a second",
    "looks every 100 ms",
    durable=False,
)
PYTHON_REDIS_LOCK = Contender(
    "python-redis-lock",
    _python_redis_lock,
    _REDIS,
    "python-redis-lock",
    "a key in memory; on disk within about a second",
    "a blocking pop",
    durable=False,
)

KAZOO = Contender(
    "kazoo's Lock",
    _kazoo,
    _ZOOKEEPER,
    "kazoo",
    "a node on disk",
    "a watch",
)

CONTENDERS = [
    DBLOCKS,
    BARE,
    SESSION_LOCK,
    SELECT_FOR_UPDATE,
    QUEUED_BARE,
    RECIPE,
    DB_MUTEX,
    DATABASE_LOCKS_CLASS,
    DATABASE_LOCKS,
    DJANGO_MYSQL,
    PGLOCK,
    REDIS_PY,
    DJANGO_REDIS,
    PYTHON_REDIS_LOCK,
    KAZOO,
]


def on(server: str, *, waiting: bool = False) -> list[Contender]:
    """Return who runs on a server, or those of them that wait for a key."""
    return [
        contender
        for contender in CONTENDERS
        if server in contender.servers and (contender.can_wait or not waiting)
    ]


def prepare(contender: Contender, keys: Iterable[str]) -> None:
    """Make the rows that a contender's keys need."""
    from datetime import datetime, timezone

    from benchmarks.models import BareLock

    if contender.needs_row:
        past = datetime(2000, 1, 1, tzinfo=timezone.utc)
        for key in keys:
            BareLock.objects.get_or_create(key=key, defaults={"expires_at": past})
