"""Workers of greenlets: whoever waits for a lock doesn't stop the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections

from dblocks import distributed_lock
from dblocks.backends.database import dialects
from dblocks.models import DistributedLock, TokenFloor
from tests.support.processes import ROOT
from tests.support.services import MariaDB
from tests.support.timing import DEADLINE, scaled

pytestmark = pytest.mark.database_backend

ALIAS = "greenlets"


@pytest.fixture
def server(
    django_db_setup: None, django_db_blocker: Any, settings: Any
) -> Iterator[MariaDB]:
    """Start a server with the lock tables, which an alias and a backend reach."""
    with MariaDB() as server, django_db_blocker.unblock():
        server.url()
        connections.settings[ALIAS] = connections.settings["default"] | {
            "ENGINE": "django.db.backends.mysql",
            "NAME": "dblocks",
            "USER": "root",
            "PASSWORD": "",
            "HOST": "127.0.0.1",
            "PORT": str(server.port),
            "OPTIONS": {"connect_timeout": 5, "read_timeout": 30},
        }
        settings.DBLOCKS = {
            ALIAS: {
                "BACKEND": "dblocks.backends.database.DatabaseBackend",
                "OPTIONS": {"using": ALIAS},
            }
        }
        with connections[ALIAS].schema_editor() as editor:
            for model in (DistributedLock, TokenFloor):
                editor.create_model(model)
        yield server
        connections[ALIAS].close()
        del connections[ALIAS]
        del connections.settings[ALIAS]


@pytest.fixture
def queued_for(server: MariaDB, key: str) -> Iterator[Callable[[], None]]:
    """Hold the key, with its session lock as after a wait; return what frees both."""
    lease = distributed_lock(key, backend=ALIAS).acquire()
    beside = connections[ALIAS].copy()
    dialect = dialects.of(beside)
    name = dialect.session_lock_name(beside, key)
    assert dialect.take_session_lock(beside, name, 0)

    def free() -> None:
        lease.release()
        beside.close()

    yield free
    free()


def test_waiting_stops_no_other_greenlet(
    server: MariaDB, queued_for: Callable[[], None], key: str
) -> None:
    """With mysqlclient, which waits in C, a worker doesn't wait in the server."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.topologies.greenlets", key],
        cwd=ROOT,
        env=os.environ | {"DATABASE_URL": server.url(), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        text=True,
    )
    with worker:
        try:
            assert worker.stdout is not None
            assert worker.stdout.readline() == "ready\n"
            time.sleep(scaled(2.5))
            queued_for()
            report = json.loads(worker.communicate(timeout=DEADLINE)[0])
        finally:
            worker.kill()
    assert report["longest"] < 1
    assert report["held"]
