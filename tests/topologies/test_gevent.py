"""Workers of greenlets: whoever waits for a lock doesn't stop the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections

from dblocks import Lease, distributed_lock
from dblocks.models import DistributedLock, TokenFloor
from tests.fixtures import OtherThread
from tests.processes import ROOT
from tests.services import MariaDB
from tests.timing import DEADLINE, eventually, scaled

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
def queued_for(server: MariaDB, key: str, other: OtherThread) -> Lease:
    """Return a lease that was waited for: its session lock is taken with it."""
    lock = distributed_lock(key, backend=ALIAS, timeout=DEADLINE)
    first = lock.acquire()
    waiting = other.start(lock.acquire)
    eventually(lambda: DistributedLock.objects.using(ALIAS).waiters(key))
    first.release()
    lease: Lease = waiting.result(DEADLINE)
    return lease


def test_waiting_stops_no_other_greenlet(
    server: MariaDB, queued_for: Lease, key: str, other: OtherThread
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
            other.do(queued_for.release)
            report = json.loads(worker.communicate(timeout=DEADLINE)[0])
        finally:
            worker.kill()
    assert report["longest"] < 1
    assert report["held"]
