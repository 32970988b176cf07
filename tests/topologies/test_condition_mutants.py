"""What a lock depends on before a pooler and in a cluster, taken out."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.db import connection

from tests.faults.mutants import POSTGRESQL, SQLITE, TABLE, TIME_LIMIT, Mutant, survives

MUTANTS = [
    # The cluster's tests have servers of their own, beside SQLite.
    Mutant(
        "the guard writes nothing in a cluster",
        TABLE,
        "if not missing and dialects.of(connection).certifies:",
        "if False:",
        ("tests/topologies/test_galera.py::test_last_piece_is_sold_once",),
        quick=SQLITE,
    ),
    Mutant(
        "row locks write nothing in a cluster",
        "backends/database/row_locks.py",
        "if dialect.certifies or dialect.snapshots_hide_rows:",
        "if dialect.snapshots_hide_rows:",
        ("tests/topologies/test_galera.py::test_row_locks_on_two_nodes",),
        quick=SQLITE,
    ),
    Mutant(
        "session locks behind a pooler",
        "backends/database/dialects/postgresql.py",
        "session: int = connection.connection.info.backend_pid",
        'session: int = ask(connection, "SELECT PG_BACKEND_PID()")[0]',
        ("tests/topologies/test_pgbouncer.py::test_nothing_is_left_behind",),
        quick=POSTGRESQL,
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.timeout(4 * TIME_LIMIT)
def test_mutant_dies(mutant: Mutant, committed: None, tmp_path: Path) -> None:
    """Without it, the tests turn red."""
    if mutant.quick != connection.vendor:
        pytest.skip(f"is a fault beside {mutant.quick}")
    survived, output = survives(mutant, tmp_path)
    assert not survived, f"{mutant.name} survives\n{output}"
