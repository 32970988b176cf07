"""Locks that are broken on purpose: one safety condition less in a copy of dblocks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from django.conf import settings
from django.db import connection

from tests.support.timing import scaled

ROOT = Path(__file__).resolve().parent.parent.parent

SQLITE, MYSQL, POSTGRESQL = "sqlite", "mysql", "postgresql"
ALL = (SQLITE, MYSQL, POSTGRESQL)
SERVERS = (MYSQL, POSTGRESQL)
#: Seconds after which a test of a mutant has failed.
TIME_LIMIT = scaled(60.0)
#: A mutant for which this fails proves nothing: it is broken for everybody.
SMOKE = "tests/faults/test_mutants.py::test_locks_work"
DJANGO_APPS = ("admin", "auth", "contenttypes", "sessions")


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
    #: Its tests have a second database, ``locks``.
    apart: bool = False

    def apply(self, package: Path) -> None:
        """Change the source; it is an error if that is no longer what it was."""
        path = package / self.file
        text = path.read_text()
        if text.count(self.before) != 1:
            raise AssertionError(f"{self.name}: {self.file} has changed; adapt it")
        path.write_text(text.replace(self.before, self.after))
        # Not to be taken for the changed one, whatever the clock says.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()


STATEMENTS = "backends/database/statements.py"
TABLE = "backends/database/table.py"
HOLDS = "holding/holds.py"
JOINT = "tests/test_sets_and_permits.py"
OWN = 'f"{self.this_key} AND owner = %(owner)s "\n'
CURRENT = OWN + "            f\"AND version = {d.integer('version')}\"\n"
NOW = "__import__('datetime').datetime.now(__import__('datetime').timezone.utc)"

MUTANTS = [
    Mutant(
        "no version in the WHERE",
        STATEMENTS,
        CURRENT,
        OWN,
        ("tests/test_manager.py::test_not_the_current_grant",),
        quick=SQLITE,
    ),
    Mutant(
        "no owner in the WHERE",
        STATEMENTS,
        CURRENT,
        CURRENT.replace(" AND owner = %(owner)s", ""),
        ("tests/test_manager.py::test_not_the_current_grant",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "no time in the WHERE",
        STATEMENTS,
        'self.over = f"expires_at <= {d.now}"',
        "self.over = self.this_key",
        (
            # On SQLite the gate keeps most rivals from the statement.
            "tests/test_manager.py::test_taken_key_gives_none_and_changes_nothing",
            "tests/faults/test_contention.py::test_exclusion",
        ),
        quick=MYSQL,
    ),
    Mutant(
        "whoever asks re-enters",
        TABLE,
        "    if seen.owner != request.owner or seen.remaining <= 0:\n"
        "        return seen\n"
        "    grant = Grant(request.key, request.owner, seen.version)",
        "    if seen.remaining <= 0:\n"
        "        return seen\n"
        "    grant = Grant(request.key, seen.owner, seen.version)",
        ("tests/test_manager.py::test_taken_key_gives_none_and_changes_nothing",),
        quick=SQLITE,
    ),
    Mutant(
        "the version is not raised",
        STATEMENTS,
        'd.next_version("version + 1")',
        'd.next_version("version + 0")',
        ("tests/faults/test_contention.py::test_exclusion",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "the client's clock",
        TABLE,
        "return make(*size, queued, *how), values",
        "return make(*size, queued, *how).replace("
        "f'<= {dialect.now}', "
        f"f\"<= '{{{NOW}:%Y-%m-%d %H:%M:%S.%f}}'\"), values",
        (
            "tests/test_clock.py::test_client_clock_a_day_off",
            "tests/test_processes.py::test_holder_that_never_unlocks",
        ),
        quick=MYSQL,
    ),
    Mutant(
        "the session's clock",
        "backends/database/dialects/mysql.py",
        'now = "UTC_TIMESTAMP(6)"',
        'now = "NOW(6)"',
        ("tests/test_clock.py::test_session_in_another_time_zone",),
        quick=MYSQL,
        engines=(MYSQL,),
    ),
    Mutant(
        "the transaction's clock",
        "backends/database/dialects/postgresql.py",
        'now = "STATEMENT_TIMESTAMP()"',
        'now = "TRANSACTION_TIMESTAMP()"',
        ("tests/faults/test_mutants.py::test_late_in_a_transaction",),
        quick=POSTGRESQL,
        engines=(POSTGRESQL,),
    ),
    Mutant(
        "session locks used behind a pooler",
        "backends/database/dialects/postgresql.py",
        "connection.connection.info.backend_pid",
        'ask(connection, "SELECT PG_BACKEND_PID()")[0]',
        ("tests/topologies/test_pgbouncer.py::test_nothing_is_left_behind",),
        quick=POSTGRESQL,
        engines=(POSTGRESQL,),
    ),
    Mutant(
        "the row is deleted at release",
        TABLE,
        "    return write(connection, name, grant, count=count)",
        "    current = write(connection, name, grant, count=count)\n"
        "    delete = f\"DELETE FROM {dialects.TABLE} WHERE owner = ''\"\n"
        "    execute(connection, delete, {})\n"
        "    return current",
        ("tests/faults/test_contention.py::test_exclusion",),
        quick=SQLITE,
    ),
    Mutant(
        "renewal of whoever has the key",
        STATEMENTS,
        "        current = self._all_current(size)\n",
        '        current = f"{d.key} IN ({_keys(size)})"\n',
        ("tests/test_manager.py::test_not_the_current_grant",),
        quick=MYSQL,
    ),
    Mutant(
        "renewal by upsert",
        TABLE,
        "            _renew_batch(connection, outcome, batch, lease, wait, overdue)",
        "            for grant in batch:\n"
        "                apps = __import__('django.apps').apps.apps\n"
        "                rows = apps.get_model('dblocks', 'DistributedLock')\n"
        "                rows._base_manager.using(\n"
        "                    connection.alias\n"
        "                ).update_or_create(\n"
        "                    pk=grant.key,\n"
        "                    defaults=dict(\n"
        "                        owner=grant.owner, version=grant.version,\n"
        f"                        hold_count=1, expires_at={NOW}\n"
        "                        + __import__('datetime').timedelta(seconds=lease)))\n"
        "                outcome.extended.add(grant)",
        (
            "tests/test_manager.py::test_key_without_a_row",
            "tests/test_manager.py::test_former_holder_can_do_nothing",
        ),
        quick=SQLITE,
    ),
    Mutant(
        "renewal of what is overdue",
        STATEMENTS,
        "        if not overdue:\n"
        '            current += f" AND expires_at > {d.now}"\n',
        "",
        ("tests/faults/test_mutants.py::test_overdue_stays_overdue",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "release before the commit",
        "lease_blocks.py",
        "        if counts and at_end and at_end(",
        "        if False and at_end(",
        ("tests/test_transactions.py::test_release_waits_for_the_end",),
        quick=MYSQL,
        engines=SERVERS,
    ),
    Mutant(
        "guarded in a transaction that ends first",
        "backends/database/guards.py",
        "        return all(outermost)",
        "        return True",
        (
            "tests/test_transaction_ends.py::TestPinApart"
            "::test_overdue_after_a_block_on_the_locks_database",
        ),
        quick=POSTGRESQL,
        engines=SERVERS,
        apart=True,
    ),
    Mutant(
        "the guard is skipped",
        TABLE,
        "    missing = [grant for grant in grants "
        "if (grant.key, grant.version) not in pinned]",
        "    missing = []",
        ("tests/faults/test_killed_and_stopped.py::test_stopped_holders_are_refused",),
        quick=SQLITE,
    ),
    Mutant(
        "the guard doesn't pin",
        STATEMENTS,
        'f"WHERE {which} ORDER BY {d.key} {d.strength}"',
        'f"WHERE {which} ORDER BY {d.key}"',
        (
            "tests/faults/test_killed_and_stopped.py::test_stopped_between_guard_and_commit",
        ),
        quick=POSTGRESQL,
        engines=SERVERS,
    ),
    Mutant(
        "the owner is the process",
        "holding/owners.py",
        "class _Thread(threading.local):",
        "class _Thread:",
        ("tests/test_ownership.py::test_threads_are_different_owners",),
        quick=SQLITE,
    ),
    Mutant(
        "a forked child keeps the lease",
        HOLDS,
        '        self._ends("forked")',
        "        pass",
        ("tests/faults/test_children.py::test_fork_while_holding",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "pruning without the floor",
        "backends/database/deletion.py",
        'update(value=Greatest(F("value"), highest))',
        'update(value=F("value"))',
        ("tests/test_manager.py::test_tokens_rise_over_prune_and_re_creation",),
        quick=MYSQL,
    ),
    Mutant(
        "pruning of what is held",
        "managers.py",
        "self.filter(expires_at__lte=After(UtcNow(), Value(-age)))",
        "self.filter(expires_at__gt=After(UtcNow(), Value(-age)))",
        ("tests/test_manager.py::test_prune_deletes_what_is_long_over",),
        quick=SQLITE,
    ),
    Mutant(
        "the lease counts from the answer",
        "waiting/attempt.py",
        "self.in_time([answer], request.sent)",
        "self.in_time([answer], clock.monotonic())",
        ("tests/faults/test_late_answers.py::test_answer_to_an_acquire",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "a re-entry counts from the answer",
        HOLDS,
        "if self.extend(sent, lease):\n",
        "if self.extend(clock.monotonic(), lease):\n",
        ("tests/faults/test_late_answers.py::test_answer_to_a_re_entry",),
        quick=SQLITE,
    ),
    Mutant(
        "a renewal counts from the answer",
        "holding/renewal.py",
        "hold.note_answer(outcome, sent)",
        "hold.note_answer(outcome, clock.monotonic())",
        ("tests/faults/test_late_answers.py::test_answer_to_a_renewal",),
        quick=MYSQL,
    ),
    Mutant(
        "a lost lease comes back",
        HOLDS,
        "        if not self.is_live():\n"
        "            return False\n"
        "        lease = self.terms.lease if lease is None else lease\n",
        "        self._end.clear()\n"
        "        lease = self.terms.lease if lease is None else lease\n",
        ("tests/faults/test_late_answers.py::test_answer_after_the_loss",),
        quick=SQLITE,
    ),
    Mutant(
        "no news while a renewal hangs",
        "holding/renewal.py",
        "                hold.note_overdue()\n",
        "                if not hold.failing:\n"
        "                    hold.note_overdue()\n",
        ("tests/faults/test_late_answers.py::test_answer_after_the_loss",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "a lost reply is a new try",
        TABLE,
        "if seen.is_of(grant) and _lasts(",
        "if False and _lasts(",
        ("tests/faults/test_network.py::test_lost_reply_to_an_acquire",),
        quick=MYSQL,
        engines=SERVERS,
    ),
    Mutant(
        "a grant that is found again lasts a whole lease",
        TABLE,
        "seen.is_of(grant) and _lasts(seen, request.lease, age)",
        "seen.is_of(grant)",
        ("tests/test_lost_replies.py::test_grant_of_an_earlier_request",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "a row lock leaves an overdue grant",
        "backends/database/row_waits.py",
        "    several_rows.undo(connection, grants)\n",
        "    pass\n",
        ("tests/test_transaction_lock.py::test_overdue_holder_afterwards[in_block]",),
        quick=SQLITE,
    ),
    Mutant(
        "a force release keeps the version",
        STATEMENTS,
        "SET version = version + 1, hold_count = 0, ",
        "SET version = version, hold_count = 0, ",
        ("tests/test_manager.py::test_force_release",),
        quick=SQLITE,
    ),
    Mutant(
        "force release ends what its holder has released",
        STATEMENTS,
        'owner = \'\', expires_at = {d.now} "\n            f"WHERE {self.current}"',
        'owner = \'\', expires_at = {d.now} "\n            f"WHERE {self.this_key} "\n'
        "            f\"AND version = {d.integer('version')}\"",
        ("tests/test_manager.py::test_force_release_of_what_is_being_released",),
        quick=SQLITE,
    ),
    Mutant(
        "a getter notes a loss",
        HOLDS,
        "            return self._overdue()\n",
        "            self.note_overdue()\n            return self._overdue()\n",
        ("tests/faults/test_late_answers.py::test_getters_only_look",),
        quick=SQLITE,
    ),
    Mutant(
        "a release outside the hold's mutex",
        HOLDS,
        "        with self.mutex:\n            held = self._give_back(committed)",
        "        if True:\n            held = self._give_back(committed)",
        ("tests/test_releases_in_threads.py::test_release_overtaken_by_the_next",),
        quick=SQLITE,
    ),
    Mutant(
        "a lost reply leaves a ghost",
        TABLE,
        "    for _attempt in range(3):\n",
        "    if not request.explicit:\n"
        "        request.owner = request.owner[1:] + request.owner[0]\n"
        "    for _attempt in range(3):\n",
        ("tests/faults/test_network.py::test_lost_reply_to_an_acquire",),
        quick=POSTGRESQL,
        engines=SERVERS,
    ),
    Mutant(
        "a lost reply to a release is a loss",
        TABLE,
        "    seen = read(connection, grant.key)\n    if count",
        "    seen = None\n    if count",
        ("tests/faults/test_network.py::test_lost_reply_to_a_release",),
        quick=MYSQL,
        engines=SERVERS,
    ),
    Mutant(
        "who is refused writes",
        "backends/database/one_writer.py",
        "    if is_alone(connection) or (request.queued and is_one):\n",
        "    if True:\n",
        ("tests/test_sqlite.py::test_who_is_refused_only_reads",),
        quick=SQLITE,
        engines=(SQLITE,),
    ),
    Mutant(
        "another statement's reply",
        "backends/database/execution.py",
        "        if disturbed:\n",
        "        if False:\n",
        ("tests/test_reentrant_code.py::test_grant_has_its_own_token",),
        quick=MYSQL,
        engines=(MYSQL,),
    ),
    Mutant(
        "a re-entry overrides max_hold",
        STATEMENTS,
        '            f"expires_at = {self.extended} WHERE {unlocked(live)}"\n',
        '            f"expires_at = {self.lease_end} WHERE {unlocked(live)}"\n',
        ("tests/test_explicit_owners.py::test_limit_binds_co_owners",),
        quick=SQLITE,
    ),
    Mutant(
        "the holder forgets max_hold",
        HOLDS,
        "        length = min(lease, self.limit - sent)\n",
        "        length = lease\n",
        ("tests/test_lock.py::TestMaxHold::test_explicit_renewal_is_bounded",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "a pin ends before the outermost commit",
        "lease_blocks.py",
        "        self._committed = guarded\n",
        "        self._committed = guarded\n"
        "        from .backends.database import own_connections as apart\n"
        "        for alias in list(apart._thread.pins):\n"
        "            apart._discard(apart._thread.pins, alias)\n",
        (
            "tests/test_transaction_ends.py::TestPinApart"
            "::test_overdue_before_the_outer_commit",
        ),
        quick=MYSQL,
        apart=True,
    ),
    Mutant(
        "nobody undoes what a cancelled task acquires",
        "waiting/threads.py",
        "            undo(self._result)\n",
        "            pass\n",
        ("tests/test_async_threads.py::test_grant_that_nobody_receives_is_undone",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "foreign code in the timer",
        "holding/news.py",
        "        )\n\n    apart(news)\n\n\ndef tell_request",
        "        )\n\n    news()\n\n\ndef tell_request",
        ("tests/test_losses.py::test_loss_that_cant_be_logged[blocks-default]",),
        quick=SQLITE,
    ),
    Mutant(
        "one key forgotten in the guard",
        "lease_blocks.py",
        "            yield holds\n",
        "            yield holds[:2]\n",
        (f"{JOINT}::test_one_lost_key_stops_the_commit",),
        quick=SQLITE,
    ),
    Mutant(
        "keys in the order of arrival",
        "locks.py",
        "return sorted(set(keys)) if len(keys) > 1 else keys",
        "return list(dict.fromkeys(keys))",
        (f"{JOINT}::test_who_waits_has_nothing_behind_it",),
        quick=MYSQL,
    ),
    Mutant(
        "an incomplete set is kept",
        "waiting/together.py",
        "        if due:\n            await",
        "        if not due:\n            await",
        (f"{JOINT}::test_refused_set_leaves_nothing",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "a set is had with a part that was lost",
        "waiting/together.py",
        "next((hold for hold in found if not hold.is_live()), None)",
        "None",
        (f"{JOINT}::test_lost_while_the_others_are_waited_for",),
        quick=SQLITE,
    ),
    Mutant(
        "one permit too many",
        "permits.py",
        "for number in range(permits)]",
        "for number in range(permits + 1)]",
        (f"{JOINT}::test_never_more_than_permits",),
        quick=POSTGRESQL,
    ),
    Mutant(
        "an owner gets a second permit",
        "backends/database/permit_rows.py",
        "    if request.explicit:\n        return take_again",
        "    if False:\n        return take_again",
        (f"{JOINT}::test_owner_in_another_process_has_the_same_permit",),
        quick=MYSQL,
    ),
    Mutant(
        "the number of a permit is misread",
        "backends/database/permit_rows.py",
        "Grant(row_key(request.key, permit), request.owner, version)",
        "Grant(row_key(request.key, request.permit), request.owner, version)",
        (f"{JOINT}::test_each_permit_rises_by_itself",),
        quick=MYSQL,
        engines=(MYSQL,),
    ),
    Mutant(
        "async verbs in asgiref's thread",
        "waiting/threads.py",
        "    start = _start_in_test if backend.is_in_test_case() else workers.start\n",
        "    start = _start_in_test\n",
        (
            "tests/test_async_threads.py::test_sync_code_holds_up_no_verb[default-acquire]",
        ),
        quick=SQLITE,
    ),
    Mutant(
        "a pruned row is made anew in the waiter's transaction",
        "backends/database/row_locks.py",
        "unseen and dialects.of(connection).keeps_row_locks",
        "unseen",
        (
            "tests/test_pruned_rows.py"
            "::test_tries_while_a_transaction_has_a_row_made_anew",
        ),
        quick=POSTGRESQL,
        engines=(POSTGRESQL,),
    ),
    Mutant(
        "a row that is gone counts as taken",
        "backends/database/row_locks.py",
        '                if fresh:\n                    raise StaleSnapshot(f"The row',
        "                return wait.refuse(None)\n"
        '                if fresh:\n                    raise StaleSnapshot(f"The row',
        (
            "tests/test_pruned_rows.py"
            "::test_row_goes_while_it_is_queued_for[in_a_transaction]",
        ),
        quick=MYSQL,
        engines=(MYSQL,),
    ),
    Mutant(
        "waits that MySQL rounds to nothing",
        "backends/database/dialects/mysql.py",
        "    shortest_queueing = 1.0\n",
        "    shortest_queueing = 0.1\n",
        (
            "tests/test_dialects.py"
            "::test_waits_for_session_locks_are_whole_seconds[default-1.55]",
        ),
        quick=MYSQL,
        engines=(MYSQL,),
    ),
    Mutant(
        "a thread waits for the rows of a test's transaction",
        "backends/database/backend.py",
        "        return bool(_of_tests) and any(",
        "        return False and any(",
        ("tests/test_test_case_threads.py::test_try_for_what_was_released",),
        quick=POSTGRESQL,
        engines=SERVERS,
    ),
    Mutant(
        "a hook's own transaction ends the outer one",
        "backends/database/transactions.py",
        "            if not outer:\n",
        "            if True:\n",
        (
            "tests/test_transaction_ends.py"
            "::test_hook_with_a_transaction[default-make_an_account]",
        ),
        quick=MYSQL,
    ),
    Mutant(
        "a release that fails drops the others",
        "backends/database/transactions.py",
        "            first = first or error\n",
        "            raise\n",
        (
            "tests/test_transaction_ends.py::test_interrupted_statement[default-RolledBack]",
        ),
        quick=SQLITE,
    ),
    Mutant(
        "a dropped lease is renewed",
        HOLDS,
        "        return any(ref() is not None for ref in list(self.leases))\n",
        "        return bool(self.leases)\n",
        ("tests/test_losses.py::test_dropped_inner_lease[default-inner]",),
        quick=SQLITE,
    ),
    Mutant(
        "a lease that is left to lapse is renewed",
        "lease_blocks.py",
        "            if each._close():\n                each._hold.forsake()\n",
        "            pass\n",
        ("tests/test_losses.py::test_left_to_lapse[default]",),
        quick=MYSQL,
    ),
    Mutant(
        "a lost hold of an owner is still counted",
        HOLDS,
        "                registry.forfeit(self.backend, self.grant, self.written)\n"
        "            registry.discard(self)\n",
        "                pass\n            registry.discard(self)\n",
        (
            "tests/test_explicit_owners.py"
            "::test_taken_again_in_the_margin[default-before-the same thread]",
        ),
        quick=SQLITE,
    ),
    Mutant(
        "guarded in a transaction that is rolled back",
        "lease_blocks.py",
        "            self._committed = guarded\n",
        "            self._committed = True\n",
        (
            "tests/test_transaction_ends.py"
            "::test_marked_for_rollback_and_overdue[default-in_block]",
        ),
        quick=POSTGRESQL,
    ),
    Mutant(
        "a co-owner's release cools nothing",
        STATEMENTS,
        "        return self._counted_to(self.cooled)\n",
        '        return self._counted_to(f"ELSE {self.dialect.now}")\n',
        (
            "tests/test_explicit_owners.py"
            "::test_cooling_after_a_release_by_the_manager[default]",
        ),
        quick=MYSQL,
    ),
    Mutant(
        "the row of an explicit owner's lease is waited for",
        "transaction_locks.py",
        "            if lease.held and lease._backend.is_in_database(using):\n",
        "            if lease._hold.explicit:\n"
        "                continue\n"
        "            if lease.held and lease._backend.is_in_database(using):\n",
        ("tests/test_nested_forms.py::test_row_inside_a_lease[the job-in_block]",),
        quick=SQLITE,
    ),
    Mutant(
        "a row is locked after its savepoint",
        "backends/database/transactions.py",
        "        if not goes_back or connection.needs_rollback:\n",
        "        if True:\n",
        ("tests/test_nested_forms.py::test_lease_after_going_back[at first]",),
        quick=POSTGRESQL,
        engines=SERVERS,
    ),
    Mutant(
        "a row is locked while any transaction is open",
        "backends/database/transactions.py",
        "    if depth is None or not in_transaction(connections[alias]):\n",
        "    if depth is None or not transaction_is_open():\n",
        (
            "tests/test_nested_forms.py"
            "::test_lease_beside_another_databases_transaction[in_block]",
        ),
        quick=SQLITE,
        apart=True,
    ),
    Mutant(
        "a thread that ends leaves its connection",
        "backends/database/own_connections.py",
        "        if self._pid == os.getpid():\n            for connection",
        "        if False:\n            for connection",
        ("tests/test_connections.py::test_threads_that_end[for ever-lease]",),
        quick=MYSQL,
        engines=SERVERS,
    ),
    Mutant(
        "a connection stays open beside Django's",
        "backends/database/own_connections.py",
        "        _close_together(connections[alias], _thread.beside)\n",
        "",
        ("tests/test_connections.py::test_closed_with_djangos[close_all-lease]",),
        quick=POSTGRESQL,
        engines=SERVERS,
    ),
    Mutant(
        "renewals wait as long as the project",
        "backends/database/own_connections.py",
        "if not 0 < float(options.get(name) or 0) <= limit:",
        "if not 0 < float(options.get(name) or 0):",
        ("tests/test_connections.py::test_renewals_network_timeouts[longer]",),
        quick=POSTGRESQL,
        engines=SERVERS,
    ),
    Mutant(
        "a guard beside a test's transaction",
        "backends/database/guards.py",
        "transactions.in_test_case(connection) or self._ends_last(aliases)",
        "self._ends_last(aliases)",
        ("tests/test_transaction_ends.py::TestApartInATestCase::test_commits[1]",),
        quick=SQLITE,
        # Elsewhere too, but InnoDB would make it wait for half a minute.
        engines=(SQLITE, POSTGRESQL),
        apart=True,
    ),
    Mutant(
        "a gate that can't be opened keeps its place",
        "backends/database/session_locks.py",
        "        except BaseException:\n"
        "            self.drop(new)\n"
        "            raise\n"
        "        return new\n",
        "        except BaseException:\n            raise\n        return new\n",
        ("tests/test_dialects.py::test_connection_that_cant_be_made",),
        quick=MYSQL,
        engines=SERVERS,
    ),
    Mutant(
        "the guard has the transaction's snapshot",
        "backends/database/dialects/mysql.py",
        'self.pin_prefix = self._setting("innodb_snapshot_isolation=OFF")',
        'self.pin_prefix = ""',
        ("tests/test_dialects.py::test_renewal_after_the_snapshot[default]",),
        quick=MYSQL,
        engines=(MYSQL,),
    ),
    Mutant(
        "a release is a loss if another takes over",
        TABLE,
        "    return freed or clock.monotonic() < deadline\n",
        "    return freed\n",
        ("tests/test_lost_replies.py::test_released_and_taken_over[held]",),
        quick=POSTGRESQL,
        engines=SERVERS,
    ),
]


class Outcome(NamedTuple):
    """What became of a mutant, and what its tests printed."""

    survived: bool
    output: str


def survives(mutant: Mutant, folder: Path) -> Outcome:
    """Run its tests on a changed copy, and tell whether all of them passed.

    Raises:
        AssertionError: It can't be said to have died: locks don't work at all, or a
            test ended by another error than an assertion.
    """
    copy, report = folder / "copy", folder / "report.xml"
    # What is compiled stays, for it goes by the time and size of its source.
    ignore = shutil.ignore_patterns("*.sqlite3*", "screenshots")
    for name in ("dblocks", "tests", "testproject"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in ("manage.py", "tox.ini", "setup.cfg"):
        shutil.copy(ROOT / name, copy / name)
    mutant.apply(copy / "dblocks")
    with (copy / "tests" / "settings.py").open("a") as settings:
        # Django's own tables are made at once, which is quicker.
        settings.write(f"MIGRATION_MODULES = {dict.fromkeys(DJANGO_APPS)}\n")
    command = [
        *(sys.executable, "-m", "pytest", "--exitfirst", "--quiet"),
        *("-p", "pytest_django.plugin", "-p", "pytest_timeout"),
        *("-p", "no:cacheprovider"),
        *("-o", f"timeout={TIME_LIMIT}", f"--junitxml={report}"),
        *("--rootdir", str(copy), SMOKE, *mutant.tests),
    ]
    environment = {
        **os.environ,
        "DATABASE_URL": url(folder),
        "DBLOCKS_FAULTS": "",
        # Others take long to load, and one shuffles: a mutant has to be known to work
        # before it has to fail.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for name in ("LOCKS_DATABASE_URL", "DBLOCKS_FAULTS_FIGURES"):
        environment.pop(name, None)
    if mutant.apart:
        environment["LOCKS_DATABASE_URL"] = url(folder, "locks")
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
            # The control has many.
            timeout=(2 + len(mutant.tests)) * TIME_LIMIT,
            check=False,
        )
    if result.returncode not in {0, 1}:
        raise AssertionError(f"{mutant.name}: no tests\n{written.read_text()}")
    if result.returncode == 1 and not died(report):
        raise AssertionError(f"{mutant.name} is no lock\n{written.read_text()}")
    return Outcome(result.returncode == 0, written.read_text())


def died(report: Path) -> bool:
    """Tell whether an assertion of its tests failed, and not that locks work at all."""
    smoke = SMOKE.rpartition(":")[2]
    for case in ElementTree.parse(report).iter("testcase"):
        failure = case.find("failure")
        if failure is None:
            continue
        message = failure.get("message", "")
        asserted = message.startswith(("AssertionError", "assert ", "Failed: "))
        if not asserted or message.startswith("Failed: Timeout"):
            return False
        return case.get("name") != smoke
    return False


def url(folder: Path, name: str = "mutant") -> str:
    """Return a database of its own, beside the tests' on the same server."""
    if connection.vendor == "sqlite":
        return f"sqlite:///{folder / name}.sqlite3"
    config = settings.DATABASES["default"]
    scheme = {"mysql": "mysql", "postgresql": "postgres"}[connection.vendor]
    password = f":{config['PASSWORD']}" if config["PASSWORD"] else ""
    address = f"{config['USER']}{password}@{config['HOST']}:{config['PORT']}"
    return f"{scheme}://{address}/{name}{os.getpid()}_{folder.name[-12:]}"
