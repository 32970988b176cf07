"""What fault tests start from: a crew of processes, counts, a seed, figures."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import django
import pytest
from django.db import connection, connections

from dblocks.models import DistributedLock, TokenFloor
from tests.faults.crew import Crew
from tests.faults.proxy import Proxy
from tests.faults.scale import SEED
from tests.support import services
from tests.support.fixtures import beside, in_memory
from tests.testapp.models import Account


@pytest.fixture(scope="session")
def nursery(django_db_setup: None) -> Iterator[Crew]:
    """Keep the forking process between tests; starting it costs a second of Django."""
    crew = Crew()
    yield crew
    crew.close()


@pytest.fixture
def crew(committed: None, request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Run programs of ``tests.faults.crew_worker``; they see the database."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    crew: Crew = request.getfixturevalue("nursery")
    yield crew
    crew.forget()


@pytest.fixture
def server(committed: None) -> str:
    """Apply the test only to databases that have a server."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has neither a server nor a network")
    return str(connection.vendor)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Collect what a run measured; ``python -m tests.faults`` prints it.

    What is measured, and not counted, has its unit in brackets: "worst (ms)".
    """
    found: dict[str, Any] = {}
    began = time.monotonic()
    yield found
    path = os.environ.get("DBLOCKS_FAULTS_FIGURES")
    if path:
        row = {
            "test": request.node.name,
            "job": os.environ.get("DBLOCKS_FAULTS_JOB", ""),
            "engine": connection.vendor,
            "versions": versions(),
            "seconds": round(time.monotonic() - began, 1),
            "figures": found,
        }
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


def versions() -> str:
    """Say on what this was run."""
    if connection.vendor == "sqlite":
        database = f"SQLite {sqlite3.sqlite_version}"
    elif connection.vendor == "mysql":
        name = "MariaDB" if connection.mysql_is_mariadb else "MySQL"
        database = f"{name} {'.'.join(map(str, connection.mysql_version))}"
    else:
        number = connection.pg_version
        database = f"PostgreSQL {number // 10000}.{number % 10000}"
    return (
        f"{database}, Django {django.__version__}, Python {platform.python_version()}"
    )


@pytest.fixture
def proxy(server: str) -> Iterator[Proxy]:
    """Stand a proxy before the database's server."""
    with Proxy(int(connection.settings_dict["PORT"]), seed=SEED) as proxy:
        yield proxy


@pytest.fixture
def distant(proxy: Proxy, settings: Any) -> Iterator[Callable[..., str]]:
    """Make a backend whose database is reached through the proxy."""

    def make(**options: Any) -> str:
        place = {"HOST": "127.0.0.1", "PORT": str(proxy.port)}
        return beside(settings, "distant", **place, OPTIONS=options)

    yield make
    proxy.swallow = False
    with suppress(AttributeError, KeyError):
        connections["distant"].close()
        del connections["distant"]
    connections.settings.pop("distant", None)


@pytest.fixture
def private(server: str) -> Iterator[services.Server]:
    """Start a server of the same kind whose clock shows another zone's time."""
    kind: type[services.Server] = services.PostgreSQL
    if server == "mysql":
        is_mariadb = connection.mysql_is_mariadb
        kind = services.MariaDB if is_mariadb else services.MySQL
    with kind(time_zone="+05:00") as private:
        private.url("faults")
        config = dict(connections.settings["default"])
        config |= {"HOST": "127.0.0.1", "PORT": str(private.port), "NAME": "faults"}
        config |= {"USER": {"mysql": "root", "postgresql": "postgres"}[server]}
        connections.settings["private"] = config | {"PASSWORD": ""}
        try:
            with connections["private"].schema_editor() as editor:
                for model in (DistributedLock, TokenFloor, Account):
                    editor.create_model(model)
            yield private
        finally:
            with suppress(AttributeError):
                connections["private"].close()
                del connections["private"]
            del connections.settings["private"]
