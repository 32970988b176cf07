"""I8: whichever safety condition is taken out, some test notices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, transaction

from dblocks import distributed_lock
from dblocks.models import DistributedLock
from tests.faults.mutants import (
    MUTANTS,
    TIME_LIMIT,
    Mutant,
    Outcome,
    survives,
)
from tests.faults.scale import FULL
from tests.support.factories import let_expire, stored
from tests.support.fixtures import in_memory

ENGINE = settings.DATABASES["default"]["ENGINE"].rpartition(".")[2]
VENDOR = {"sqlite3": "sqlite"}.get(ENGINE, ENGINE)
HERE = [m for m in MUTANTS if VENDOR in (m.engines if FULL else [m.quick])]
CONTROL = Mutant(
    "none",
    *("models.py", "class DistributedLock(", "class DistributedLock("),
    tests=tuple(sorted({test for mutant in HERE for test in mutant.tests})),
    quick=VENDOR,
)
AT_A_TIME = int(os.environ.get("DBLOCKS_FAULTS_JOBS") or 2)

Verdict = Callable[[Mutant], Outcome]


@pytest.fixture(scope="module")
def verdict(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Verdict]:
    """Try all that were asked for, the control too, some at a time; wait for one."""
    if VENDOR == "sqlite" and settings.DATABASES["default"]["NAME"] == ":memory:":
        pytest.skip("a database in memory belongs to one process")
    chosen = [
        item.callspec.params["mutant"]
        for item in request.session.items
        if "mutant" in getattr(getattr(item, "callspec", None), "params", {})
    ]
    if "test_no_mutant_lives" in {item.name for item in request.session.items}:
        chosen.insert(0, CONTROL)
    trials: dict[str, Future[Outcome]] = {}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for number, mutant in enumerate(chosen):
            folder = tmp_path_factory.mktemp(f"mutant{number}", numbered=False)
            trials[mutant.name] = pool.submit(survives, mutant, folder)
        yield lambda mutant: trials[mutant.name].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("mutant", HERE, ids=lambda mutant: mutant.name)
@pytest.mark.timeout(len(MUTANTS) * TIME_LIMIT)
def test_mutant_dies(
    mutant: Mutant, committed: None, verdict: Verdict, figures: dict[str, Any]
) -> None:
    """A lock without this condition turns the tests red."""
    survived, output = verdict(mutant)
    assert not survived, f"{mutant.name} survives\n{output}"
    figures["killed"] = 1


@pytest.mark.timeout(len(MUTANTS) * TIME_LIMIT)
def test_no_mutant_lives(committed: None, verdict: Verdict) -> None:
    """The control: the tests that kill pass in a copy that nothing was changed in."""
    survived, output = verdict(CONTROL)
    assert survived, output


def test_locks_work(committed: None, key: str) -> None:
    """Where nobody competes, locks work; every mutant must still do this."""
    lock = distributed_lock(key, lease=20, timeout=0)
    for _ in range(2):
        with lock as lease, lock as inner:
            assert inner.fencing_token == lease.fencing_token
            lease.renew()
            with transaction.atomic():
                lease.guard()
            assert lease.held
            assert lease.remaining() > 15
        assert not lock.locked()
    with distributed_lock(key, timeout=0, atomic=True):
        assert lock.locked()
    assert not lock.locked()


def test_overdue_stays_overdue(committed: None, key: str) -> None:
    """A renewal that comes too late brings nothing back, though nobody took over."""
    assert DistributedLock.objects.acquire(key, owner="me", lease=20)
    version = stored(key).version
    let_expire(key)
    end = stored(key).expires_at
    assert not DistributedLock.objects.renew(key, owner="me", version=version, lease=20)
    assert stored(key).expires_at == end


def test_late_in_a_transaction(two_writers: None, key: str) -> None:
    """A lease that the manager takes late in a transaction is no shorter for that."""
    assert not in_memory()
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        pause = "PG_SLEEP(1)" if VENDOR == "postgresql" else "SLEEP(1)"
        cursor.execute(f"SELECT {pause}")
        began = time.monotonic()
        assert DistributedLock.objects.acquire(key, owner="me", lease=20)
    # Not inside, where the same clock might set the end and read it.
    remaining = DistributedLock.objects.with_state().get(pk=key).remaining
    # However long the commit took; what came before it would be missing as well.
    assert remaining > 19.9 - (time.monotonic() - began)
