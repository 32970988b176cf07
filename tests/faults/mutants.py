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

SQLITE, MYSQL, POSTGRESQL = "sqlite", "mysql", "postgresql"
ALL = (SQLITE, MYSQL, POSTGRESQL)
SERVERS = (MYSQL, POSTGRESQL)
#: Seconds after which a test of a mutant has failed.
TIME_LIMIT = 60


@dataclass(frozen=True)
class Mutant:
    """A change of the source, and the tests that must notice it.

    ``engines``: the databases on which it is a fault at all, where the full run has it.
    ``quick``: the one on which the tests of every day have it.
    """

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]
    quick: str
    engines: tuple[str, ...] = ALL

    def apply(self, package: Path) -> None:
        """Change the source; it is an error if that is no longer what it was."""
        path = package / self.file
        text = path.read_text()
        if self.before not in text:
            raise AssertionError(f"{self.name}: {self.file} has changed; adapt it")
        path.write_text(text.replace(self.before, self.after, 1))


CURRENT = "_CURRENT = Q(key=_KEY, owner=_OWNER, version=_VERSION)"
NOW = "__import__('datetime').datetime.now(__import__('datetime').timezone.utc)"

MUTANTS = [
    Mutant(
        "no version in the WHERE",
        "models.py",
        CURRENT,
        "_CURRENT = Q(key=_KEY, owner=_OWNER)",
        ("tests/test_manager.py::test_not_the_current_grant",),
        quick=SQLITE,
    ),
    Mutant(
        "no owner in the WHERE",
        "models.py",
        CURRENT,
        "_CURRENT = Q(key=_KEY, version=_VERSION)",
        ("tests/test_manager.py::test_not_the_current_grant",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "no time in the WHERE",
        "models.py",
        'free, prefix = Q(key=_KEY) & _OVER, ""',
        '_OVER = Q(key=_KEY)\n    free, prefix = Q(key=_KEY), ""',
        ("tests/faults/test_contention.py::test_exclusion",),
        quick=MYSQL,
    ),
    Mutant(
        "whoever asks re-enters",
        "models.py",
        "condition = Q(key=_KEY) & (_OVER | Q(owner=_OWNER))",
        "condition = Q(key=_KEY)",
        ("tests/test_manager.py::test_taken_key_gives_none_and_changes_nothing",),
        quick=SQLITE,
    ),
    Mutant(
        "the version is not raised",
        "models.py",
        '"version": Announced(F("version") + 1)',
        '"version": Announced(F("version") + 0)',
        ("tests/faults/test_contention.py::test_exclusion",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "the client's clock",
        "models.py",
        "_OVER = Q(expires_at__lte=UtcNow())",
        f"_OVER = Q(expires_at__lte=Value({NOW}))",
        (
            "tests/test_clock.py::test_client_clock_a_day_off",
            "tests/test_processes.py::test_holder_that_never_unlocks",
        ),
        quick=MYSQL,
    ),
    Mutant(
        "the session's clock",
        "functions.py",
        "UTC_TIMESTAMP(6)",
        "NOW(6)",
        ("tests/test_clock.py::test_session_in_another_time_zone",),
        quick=MYSQL,
        engines=(MYSQL,),
    ),
    Mutant(
        "the transaction's clock",
        "functions.py",
        "STATEMENT_TIMESTAMP()",
        "TRANSACTION_TIMESTAMP()",
        ("tests/faults/test_mutants.py::test_late_in_a_transaction",),
        quick=POSTGRESQL,
        engines=(POSTGRESQL,),
    ),
    Mutant(
        "the row is deleted at release",
        "models.py",
        "        return bool(_affected(connection, _free(connection), values))",
        "        return bool(DistributedLock._base_manager.using(connection.alias)"
        ".filter(key=grant.key, version=grant.version)._raw_delete(connection.alias))",
        ("tests/faults/test_contention.py::test_exclusion",),
        quick=SQLITE,
    ),
    Mutant(
        "renewal of whoever has the key",
        "models.py",
        'RowIn(["key", "owner", "version"], grants), ',
        "Q(), ",
        ("tests/test_manager.py::test_not_the_current_grant",),
        quick=MYSQL,
    ),
    Mutant(
        "renewal by upsert",
        "models.py",
        "            renewed |= _renew_batch(connection, batch, values, wait, overdue)",
        "            for key, owner, version in batch:\n"
        "                DistributedLock._base_manager.using(connection.alias)"
        ".update_or_create(\n"
        "                    pk=key, defaults=dict(owner=owner, version=version,"
        f" hold_count=1, expires_at={NOW} + timedelta(seconds=lease)))\n"
        "                renewed.add(Grant(key, owner, version))",
        (
            "tests/test_manager.py::test_key_without_a_row",
            "tests/test_manager.py::test_former_holder_can_do_nothing",
        ),
        quick=SQLITE,
    ),
    Mutant(
        "renewal of what is overdue",
        "models.py",
        "    if not overdue:\n        current &= ~_OVER\n",
        "",
        ("tests/faults/test_mutants.py::test_overdue_stays_overdue",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "release before the commit",
        "leases.py",
        "        if self.lost_reason is None and transactions.transaction_is_open():",
        "        if False:",
        ("tests/test_transactions.py::test_release_waits_for_the_end",),
        quick=MYSQL,
        engines=SERVERS,
    ),
    Mutant(
        "the guard is skipped",
        "models.py",
        "    with _pin(connection).execute(connection, grant._asdict()) as cursor:",
        "    return True\n"
        "    with _pin(connection).execute(connection, grant._asdict()) as cursor:",
        ("tests/faults/test_processes.py::test_stopped_holders_are_refused",),
        quick=SQLITE,
    ),
    Mutant(
        "the guard doesn't pin",
        "models.py",
        '    return Statement(f"{text} FOR {strength}", params)',
        "    return Statement(text, params)",
        ("tests/faults/test_processes.py::test_stopped_between_guard_and_commit",),
        quick=POSTGRESQL,
        engines=SERVERS,
    ),
    Mutant(
        "the owner is the process",
        "ownership.py",
        "class _Thread(threading.local):",
        "class _Thread:",
        ("tests/test_ownership.py::test_threads_are_different_owners",),
        quick=SQLITE,
    ),
    Mutant(
        "a forked child keeps the lease",
        "renewal.py",
        'hold.lost_reason = hold.lost_reason or "forked"',
        "pass",
        ("tests/faults/test_processes.py::test_fork_while_holding",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "pruning without the floor",
        "models.py",
        'update(value=Greatest(F("value"), highest))',
        'update(value=F("value"))',
        ("tests/test_manager.py::test_tokens_rise_over_prune_and_re_creation",),
        quick=MYSQL,
    ),
    Mutant(
        "pruning of what is held",
        "models.py",
        "self.filter(expires_at__lt=After(UtcNow(), Value(-age)))",
        "self.filter(expires_at__gt=After(UtcNow(), Value(-age)))",
        ("tests/test_manager.py::test_prune_deletes_what_is_long_over",),
        quick=SQLITE,
    ),
    Mutant(
        "the lease counts from the answer",
        "acquisition.py",
        "lease = self._granted(found, sent, lease)",
        "lease = self._granted(found, clock.monotonic(), lease)",
        ("tests/faults/test_late_answers.py::test_answer_to_an_acquire",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "a renewal counts from the answer",
        "renewal.py",
        "                hold.extend(sent)",
        "                hold.extend(clock.monotonic())",
        ("tests/faults/test_late_answers.py::test_answer_to_a_renewal",),
        quick=MYSQL,
    ),
    Mutant(
        "a lost lease comes back",
        "holds.py",
        "            if not self.is_live():\n                return False\n"
        "            self.failing",
        "            self.lost_reason = None\n            self.failing",
        ("tests/faults/test_late_answers.py::test_answer_after_the_loss",),
        quick=SQLITE,
    ),
    Mutant(
        "no news while a renewal hangs",
        "renewal.py",
        "                if hold.deadline <= now:",
        "                if hold.deadline <= now and not hold.failing:",
        ("tests/faults/test_late_answers.py::test_answer_after_the_loss",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "a lost reply is a new try",
        "backends/database.py",
        "reenter=request.reenter or doubtful",
        "reenter=request.reenter",
        ("tests/faults/test_network.py::test_lost_reply_to_an_acquire",),
        quick=MYSQL,
        engines=SERVERS,
    ),
    Mutant(
        "a force release keeps the version",
        "models.py",
        '                version=F("version") + 1,\n                hold_count=0,',
        '                version=F("version"),\n                hold_count=0,',
        ("tests/test_manager.py::test_force_release",),
        quick=SQLITE,
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
        *("-p", "no:cacheprovider", "-o", f"timeout={TIME_LIMIT}"),
        *("--rootdir", str(copy), *mutant.tests),
    ]
    environment = {**os.environ, "DATABASE_URL": url(folder), "DBLOCKS_FAULTS": ""}
    for name in ("LOCKS_DATABASE_URL", "DBLOCKS_FAULTS_FIGURES"):
        environment.pop(name, None)
    # Else an installed package might be found in place of the copy.
    environment["PYTHONPATH"] = str(copy)
    # Not a pipe: a stopped child of the tests would keep it open.
    written = folder / "output"
    with written.open("w") as output:
        result = subprocess.run(
            command,
            cwd=copy,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=3 * TIME_LIMIT,
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
    return f"{scheme}://{address}/mutant{os.getpid()}_{folder.name[-12:]}"
