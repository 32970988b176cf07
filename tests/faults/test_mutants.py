"""I8: whichever safety condition is taken out, some test notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, transaction

from dblocks.models import DistributedLock
from tests.factories import let_expire, stored
from tests.faults.mutants import MUTANTS, Mutant, survives
from tests.faults.scale import FULL
from tests.fixtures import in_memory
from tests.timing import eventually

ENGINE = settings.DATABASES["default"]["ENGINE"].rpartition(".")[2]
VENDOR = {"sqlite3": "sqlite"}.get(ENGINE, ENGINE)
HERE = [m for m in MUTANTS if VENDOR in (m.engines if FULL else [m.quick])]
if settings.DATABASES["default"]["NAME"] == ":memory:" or "locks" in settings.DATABASES:
    HERE = []


@pytest.mark.parametrize("mutant", HERE, ids=lambda mutant: mutant.name)
@pytest.mark.timeout(180)
def test_mutant_dies(
    mutant: Mutant, committed: None, tmp_path: Path, figures: dict[str, Any]
) -> None:
    """A lock without this condition turns the tests red."""
    output = survives(mutant, tmp_path)
    assert output is None, f"{mutant.name} survives\n{output}"
    figures["killed"] = mutant.name


@pytest.mark.skipif(not FULL, reason="the tests themselves pass every day")
def test_no_mutant_lives(committed: None, tmp_path: Path) -> None:
    """The control: the tests that kill pass in a copy that nothing was changed in."""
    tests = tuple(sorted({test for mutant in HERE for test in mutant.tests}))
    assert survives(Mutant("none", "models.py", "import", "import", tests), tmp_path)


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
        pause = (
            "SELECT PG_SLEEP(0.5)" if VENDOR == "postgresql" else "SELECT SLEEP(0.5)"
        )
        cursor.execute(pause)
        assert DistributedLock.objects.acquire(key, owner="me", lease=20)
        [row] = DistributedLock.objects.with_state().filter(pk=key)
        assert row.remaining > 19.7
    eventually(lambda: DistributedLock.objects.filter(pk=key).exists())
