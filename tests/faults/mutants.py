"""Locks that are broken on purpose: one safety condition less in a copy of dblocks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.db import connection

ROOT = Path(__file__).resolve().parent.parent.parent

ALL = ("sqlite", "mysql", "postgresql")
SERVERS = ("mysql", "postgresql")


@dataclass(frozen=True)
class Mutant:
    """A change of the source, and the tests that must notice it.

    ``engines``: the databases on which it is a fault at all, where the full run has it.
    ``quick``: the one where the tests of every day run it too, if any.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    engines: tuple[str, ...] = ALL
    quick: str | None = None
    times: int = 1

    def apply(self, package: Path) -> None:
        """Change the source; it is an error if that is no longer what it was."""
        path = package / self.file
        text = path.read_text()
        if text.count(self.before) < self.times:
            raise AssertionError(f"{self.name}: {self.file} has changed; adapt it")
        path.write_text(text.replace(self.before, self.after, self.times))


MUTANTS = [
    Mutant(
        "no version in the WHERE",
        "models.py",
        "_CURRENT = Q(key=_KEY, owner=_OWNER, version=_VERSION)",
        "_CURRENT = Q(key=_KEY, owner=_OWNER)",
        ("tests/test_manager.py", "tests/test_state_machine.py"),
    ),
    Mutant(
        "no owner in the WHERE",
        "models.py",
        "_CURRENT = Q(key=_KEY, owner=_OWNER, version=_VERSION)",
        "_CURRENT = Q(key=_KEY, version=_VERSION)",
        ("tests/test_manager.py", "tests/test_state_machine.py"),
    ),
    Mutant(
        "no time in the WHERE",
        "models.py",
        "free, prefix = Q(key=_KEY) & _OVER",
        "free, prefix = Q(key=_KEY)",
        ("tests/test_processes.py::test_processes_are_different_owners",),
        engines=("mysql",),
    ),
    Mutant(
        "the version is not raised",
        "models.py",
        '"version": Announced(F("version") + 1)',
        '"version": Announced(F("version") + 0)',
        ("tests/test_processes.py::test_processes_are_different_owners",),
        quick="postgresql",
    ),
    Mutant(
        "the client's clock",
        "models.py",
        "_OVER = Q(expires_at__lte=UtcNow())",
        "_OVER = Q(expires_at__lte=Value(__import__('datetime').datetime.now("
        "__import__('datetime').timezone.utc)))",
        (
            "tests/test_clock.py",
            "tests/test_processes.py::test_holder_that_never_unlocks",
        ),
    ),
    Mutant(
        "the transaction's clock",
        "functions.py",
        "STATEMENT_TIMESTAMP()",
        "TRANSACTION_TIMESTAMP()",
        (
            "tests/faults/test_mutants.py::test_late_in_a_transaction",
            "tests/test_clock.py",
        ),
        engines=("postgresql",),
        times=1,
        quick="postgresql",
    ),
    Mutant(
        "the row is deleted at release",
        "models.py",
        "        return bool(_affected(connection, _free(connection), values))",
        "        return bool(DistributedLock._base_manager.using(connection.alias)"
        ".filter(key=grant.key, version=grant.version)._raw_delete(connection.alias))",
        (
            "tests/test_processes.py::test_processes_are_different_owners",
            "tests/faults/test_contention.py::test_exclusion",
        ),
    ),
    Mutant(
        "renewal of whoever has the key",
        "models.py",
        'RowIn(["key", "owner", "version"], grants),',
        "Q(),",
        ("tests/test_manager.py", "tests/test_state_machine.py"),
    ),
    Mutant(
        "renewal of what is overdue",
        "models.py",
        "    if not overdue:\n        current &= ~_OVER\n",
        "",
        (
            "tests/faults/test_mutants.py::test_overdue_stays_overdue",
            "tests/test_manager.py",
            "tests/test_state_machine.py",
        ),
    ),
    Mutant(
        "release before the commit",
        "locks.py",
        "        if self.lost_reason is None and transactions.transaction_is_open():",
        "        if False:",
        ("tests/test_transactions.py",),
        engines=SERVERS,
        quick="mysql",
    ),
    Mutant(
        "the guard is skipped",
        "models.py",
        "    with _pin(connection).execute(connection, grant._asdict()) as cursor:",
        "    return True\n"
        "    with _pin(connection).execute(connection, grant._asdict()) as cursor:",
        ("tests/faults/test_processes.py::test_stopped_holders_are_refused",),
        quick="sqlite",
    ),
    Mutant(
        "the guard doesn't pin",
        "models.py",
        '    return Statement(f"{text} FOR {strength}", params)',
        "    return Statement(text, params)",
        ("tests/test_transactions.py",),
        engines=SERVERS,
    ),
    Mutant(
        "the owner is the process",
        "ownership.py",
        "class _Thread(threading.local):",
        "class _Thread:",
        ("tests/test_ownership.py::test_threads_are_different_owners",),
        quick="sqlite",
    ),
    Mutant(
        "pruning without the floor",
        "models.py",
        'update(value=Greatest(F("value"), highest))',
        'update(value=F("value"))',
        ("tests/faults/test_contention.py::test_pruning_under_contention",),
    ),
    Mutant(
        "pruning of what is held",
        "models.py",
        "self.filter(expires_at__lt=After(UtcNow(), Value(-age)))",
        "self.filter(expires_at__gt=After(UtcNow(), Value(-age)))",
        ("tests/test_manager.py",),
    ),
    Mutant(
        "the deadline counts from the answer",
        "renewal.py",
        "                hold.extend(sent)",
        "                hold.extend(clock.monotonic() + hold.terms.lease)",
        ("tests/faults/test_network.py::test_black_hole_for_ever",),
        engines=SERVERS,
    ),
    Mutant(
        "a lost reply is a new try",
        "backends/database.py",
        "reenter=request.reenter or doubtful",
        "reenter=request.reenter",
        ("tests/faults/test_network.py::test_lost_reply_to_an_acquire",),
        engines=SERVERS,
        quick="mysql",
    ),
    Mutant(
        "a force release keeps the version",
        "models.py",
        '                version=F("version") + 1,\n                hold_count=0,',
        '                version=F("version"),\n                hold_count=0,',
        ("tests/test_manager.py", "tests/test_state_machine.py"),
    ),
]


def survives(mutant: Mutant, folder: Path) -> str | None:
    """Run its tests on a changed copy; return their output if none of them failed."""
    copy = folder / "copy"
    ignore = shutil.ignore_patterns("__pycache__", "*.sqlite3*", "screenshots")
    for name in ("dblocks", "tests", "testproject"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("manage.py", "tox.ini", "setup.cfg"):
        shutil.copy(ROOT / name, copy / name)
    mutant.apply(copy / "dblocks")
    command = [
        *(sys.executable, "-m", "pytest", "--exitfirst", "--quiet"),
        *("-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", str(copy)),
        *mutant.tests,
    ]
    # Not a pipe: a stopped child of the tests would keep it open.
    written = folder / "output"
    with written.open("w") as output:
        result = subprocess.run(
            command,
            cwd=copy,
            env={**os.environ, "DATABASE_URL": url(folder), "DBLOCKS_FAULTS": ""},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=150,
            check=False,
        )
    if result.returncode not in {0, 1}:
        raise AssertionError(f"{mutant.name}: no tests\n{written.read_text()}")
    return written.read_text() if result.returncode == 0 else None


def url(folder: Path) -> str:
    """Return a database of its own, beside the tests' on the same server."""
    if connection.vendor == "sqlite":
        return f"sqlite:///{folder / 'mutant.sqlite3'}"
    config = settings.DATABASES["default"]
    scheme = {"mysql": "mysql", "postgresql": "postgres"}[connection.vendor]
    password = f":{config['PASSWORD']}" if config["PASSWORD"] else ""
    address = f"{config['USER']}{password}@{config['HOST']}:{config['PORT']}"
    return f"{scheme}://{address}/mutant{os.getpid()}"
