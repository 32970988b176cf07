"""What these tests start from: PostgreSQL, a pooler, processes that go through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import environ
import psycopg
import pytest
from django.db import connection, connections

from dblocks.backends.database import dialects, session_locks
from tests.support.processes import Fleet, Workers
from tests.support.services import PgBouncer

MakePooler = Callable[..., PgBouncer]
Orphan = Callable[[str], None]


@pytest.fixture
def postgres(committed: None) -> int:
    """Return the port of the test's PostgreSQL server."""
    if connection.vendor != "postgresql":
        pytest.skip("needs PostgreSQL")
    return int(connection.settings_dict["PORT"])


@pytest.fixture
def pooler(postgres: int) -> Iterator[MakePooler]:
    """Start a PgBouncer before the test's server."""
    started: list[PgBouncer] = []

    def start(mode: str = "transaction", **options: Any) -> PgBouncer:
        started.append(PgBouncer(upstream=postgres, mode=mode, **options))
        started[-1].start()
        return started[-1]

    yield start
    session_locks.pool.close_idle()
    for server in started:
        server.close()


@pytest.fixture
def workers_through(
    postgres: int,
) -> Iterator[Callable[[str], Workers]]:
    """Start worker processes that reach a database at another URL."""
    fleets: list[tuple[Workers, Fleet]] = []

    def through(url: str) -> Workers:
        place = environ.Env.db_url_config(url)
        fleet = Fleet({name: value for name, value in place.items() if value})
        fleets.append((Workers(fleet), fleet))
        return fleets[-1][0]

    yield through
    for workers, fleet in fleets:
        workers.close()
        fleet.close()


@pytest.fixture
def orphan(postgres: int) -> Iterator[Orphan]:
    """Keep the session lock of a key in a session that nobody of ours knows."""
    place = {name: connection.settings_dict[name] for name in ("HOST", "PORT", "USER")}
    with psycopg.connect(
        host=place["HOST"],
        port=place["PORT"],
        user=place["USER"],
        dbname=connection.settings_dict["NAME"],
        autocommit=True,
    ) as stranger:

        def keep(key: str) -> None:
            name = dialects.of(connection).session_lock_name(connection, key)
            stranger.execute("SELECT PG_ADVISORY_LOCK(%s)", [name])

        yield keep


@pytest.fixture
def another(settings: Any) -> Iterator[Callable[..., str]]:
    """Make a backend whose database is the default one but for changes; its alias."""
    made: list[str] = []
    path = "dblocks.backends.database.DatabaseBackend"

    def make(alias: str, **changes: Any) -> str:
        config = dict(connections.settings["default"])
        options = {**config["OPTIONS"], **changes.pop("OPTIONS", {})}
        connections.settings[alias] = {**config, **changes, "OPTIONS": options}
        made.append(alias)
        settings.DBLOCKS = {
            "default": {"BACKEND": path},
            **{each: {"BACKEND": path, "OPTIONS": {"using": each}} for each in made},
        }
        return alias

    yield make
    for alias in made:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]
        session_locks._without.discard(alias)
