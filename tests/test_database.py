"""What only the database backend promises: statements, reasons, settings."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection, transaction
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext

from dblocks import Lease, LeaseLost, Lock, LockTimeout, clock, distributed_lock
from dblocks.backends.database import own_connections, several_rows
from dblocks.backends.values import Grant, Reading, Request
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.test import move_clock
from dblocks.waiting.attempt import Attempt
from tests.support.factories import LockFactory, let_expire, now, stored
from tests.support.fixtures import OtherThread, in_memory
from tests.support.processes import in_forked_child
from tests.support.timing import DEADLINE, SLACK, eventually, scaled, takes

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

PATH = "dblocks.backends.database.DatabaseBackend"

locks = DistributedLock.objects
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]


def test_two_statements_and_no_begin(key: str) -> None:
    """Acquire and release of a key that exists: two statements, no transaction."""
    with distributed_lock(key):
        pass
    with CaptureQueriesContext(connection) as queries, distributed_lock(key):
        pass
    sent = [query["sql"] for query in queries.captured_queries]
    assert len(sent) == 2, sent
    assert not [
        sql for sql in sent if re.match(r"BEGIN|COMMIT|SAVEPOINT", sql, re.IGNORECASE)
    ]


def test_child_of_a_database_in_memory(key: str) -> None:
    """It has a copy, which it uses as its parent uses the original."""
    if not in_memory():
        pytest.skip("about a database in memory")
    distributed_lock(key).acquire().release()

    def statements() -> int:
        with CaptureQueriesContext(connection) as queries, distributed_lock(key):
            pass
        return len(queries)

    assert in_forked_child(statements) == statements() == 2


def test_statements_find_their_rows_by_the_primary_key(key: str) -> None:
    """However many rows there are: none reads others, or would wait for their locks.

    MySQL and MariaDB lock whatever a statement reads on its way.
    """
    if connection.vendor != "mysql":
        pytest.skip("elsewhere a statement locks only the rows that it changes")
    permits = {"permits": 4, "timeout": 0}
    for number in range(4):
        distributed_lock(key, owner=f"{number}", **permits).acquire().release()
    together = distributed_lock(f"{key}:1", f"{key}:2", timeout=0)
    together.acquire().release()
    LockFactory.create_batch(100)
    first = distributed_lock(key, owner="first", **permits).acquire()
    with CaptureQueriesContext(connection) as queries:
        for permit in (0, 1, 2):
            # One of them is taken, so that at least one looks for another.
            with patch.object(Attempt, "_first_permit", return_value=permit):
                lease = distributed_lock(key, **permits).acquire()
            lease.renew()
            lease.release()
        leases = together.acquire()
        leases.renew()
        with transaction.atomic():
            leases.guard()
        leases.release()
    first.release()
    texts = [query["sql"] for query in queries.captured_queries]
    texts = [re.sub(r"^SET STATEMENT .*? FOR ", "", text) for text in texts]
    explained = [text for text in texts if "dblocks_distributedlock" in text]
    assert len(explained) > 10
    for text in explained:
        assert not _reads_whole_table(text), text


def _reads_whole_table(sql: str) -> bool:
    with connection.cursor() as cursor:
        table = "" if connection.mysql_is_mariadb else "FORMAT=TRADITIONAL"
        cursor.execute(f"EXPLAIN {table} {sql}")
        names = [column[0] for column in cursor.description]
        plan = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    return any(
        step["table"] == "dblocks_distributedlock" and step["type"] in {"ALL", "index"}
        for step in plan
    )


def test_incomplete_set_is_undone_alone(key: str) -> None:
    """What was granted is given back; the others' rows may be locked, and are left."""
    names = [f"{key}:{number}" for number in range(3)]
    request = Request(names[0], "somebody", 30.0)
    with CaptureQueriesContext(connection) as queries:
        found = several_rows._complete(connection, request, names, {names[1]: 1})
    assert found is None
    [undone] = [query["sql"] for query in queries.captured_queries]
    assert [name in undone for name in names] == [False, True, False]


def test_row_remains_after_release(key: str) -> None:
    """A release frees the row; it doesn't delete it."""
    with distributed_lock(key) as lease:
        pass
    row = stored(key)
    assert (row.version, row.hold_count) == (lease.fencing_token, 0)
    assert locks.free().filter(pk=key).exists()


def test_row_says_who_holds(acquire: Leases, key: str) -> None:
    """The row has the lease's owner, token and note and one hold per acquisition."""
    lease = acquire(note="why")
    acquire()
    row = stored(key)
    assert (row.owner, row.version, row.note) == (
        lease.owner,
        lease.fencing_token,
        "why",
    )
    assert row.hold_count == 2


def test_outermost_note_rules(acquire: Leases, key: str) -> None:
    """An inner acquisition's note doesn't replace the outer one's."""
    acquire(note="outer")
    acquire(note="inner")
    assert stored(key).note == "outer"


def test_cooling_row(key: str) -> None:
    """After an early release the row is cooling, without owner or holds."""
    with distributed_lock(key, hold_at_least=5):
        assert locks.held().filter(pk=key).exists()
    assert locks.cooling().filter(pk=key).exists()
    assert stored(key).hold_count == 0


def test_force_release_ends_cooling(key: str, obtainable: Obtainable) -> None:
    """A force release lets the next one in before hold_at_least is over."""
    with distributed_lock(key, hold_at_least=60):
        pass
    assert not obtainable()
    assert locks.force_release(key) is True
    assert obtainable()


def test_lost_by_force(acquire: Leases, key: str) -> None:
    """A force-released holder learns it within a third of its lease."""
    lease = acquire(lease=scaled(1.5))
    told: list[Lease] = []
    lease.on_lost(told.append)
    assert locks.force_release(key) is True
    eventually(lambda: told, within=scaled(0.5) + SLACK, what="the loss")
    assert lease.lost_reason == "forced"
    assert not lease.held
    assert lease.release() is False


def test_lost_to_somebody_else(acquire: Leases, key: str) -> None:
    """Where somebody else has the key by then, the reason is taken."""
    lease = acquire(lease=60)
    let_expire(key)
    theirs = distributed_lock(key, owner="somebody else").acquire(timeout=0)
    # It is due for its renewal only now.
    clock.advance(lease.remaining() / 2)
    eventually(lambda: not lease.held, within=scaled(0.5 + 0.5), what="the loss")
    assert lease.lost_reason == "taken"
    assert theirs.release() is True


def test_forced_and_taken_since(acquire: Leases, key: str) -> None:
    """A force-released key that somebody else took meanwhile is lost as taken."""
    lease = acquire(lease=600, renew=False)
    locks.force_release(key)
    with (
        distributed_lock(key, owner="somebody else"),
        pytest.raises(LeaseLost) as caught,
    ):
        lease.renew()
    assert caught.value.reason == "taken"


def test_explicit_renewal_finds_a_forced_loss(acquire: Leases, key: str) -> None:
    """renew() of a force-released lease raises LeaseLost, reason forced."""
    lease = acquire(lease=600, renew=False)
    locks.force_release(key)
    with pytest.raises(LeaseLost) as caught:
        lease.renew()
    assert caught.value.reason == lease.lost_reason == "forced"
    assert not lease.held


def test_release_of_a_forced_lease(acquire: Leases, key: str) -> None:
    """release() of a force-released lease says False and touches nothing."""
    lease = acquire(lease=600, renew=False)
    locks.force_release(key)
    version = stored(key).version
    assert lease.release() is False
    assert stored(key).version == version


def test_leaving_after_a_forced_loss(key: str) -> None:
    """Leaving a force-released block raises LeaseLost even before a renewal."""
    with pytest.raises(LeaseLost) as caught, distributed_lock(key, lease=600):
        locks.force_release(key)
    assert caught.value.reason == "forced"


def test_renewal_never_makes_a_row(acquire: Leases, key: str) -> None:
    """A row that was deleted by hand stays deleted; its holder loses the lease."""
    lease = acquire(lease=0.9)
    QuerySet(DistributedLock).filter(pk=key).delete()
    eventually(lambda: not lease.held, within=0.9 + SLACK, what="the loss")
    assert not QuerySet(DistributedLock).filter(pk=key).exists()


def test_renewal_never_takes_back(acquire: Leases, key: str) -> None:
    """A renewal leaves the row of the one who took over as it is."""
    lease = acquire(lease=0.9)
    let_expire(key)
    with distributed_lock(key, owner="somebody else", lease=600, renew=False) as theirs:
        end = stored(key).expires_at
        eventually(lambda: not lease.held, within=0.9 + SLACK, what="the loss")
        row = stored(key)
        assert (row.owner, row.version, row.expires_at) == (
            theirs.owner,
            theirs.fencing_token,
            end,
        )


def test_one_renewal_for_all_holds_of_an_owner(acquire: Leases, key: str) -> None:
    """Renewal of a re-entered lock moves the row's end on."""
    length = scaled(1.2)
    acquire(lease=length)
    acquire(lease=length)
    end = stored(key).expires_at
    eventually(lambda: stored(key).expires_at > end, within=length, what="the renewal")


def test_waiting_only_reads(
    acquire: Leases, lock: Callable[..., Lock], key: str
) -> None:
    """While a key is taken, a waiter reads its row and writes nothing."""
    acquire()
    with CaptureQueriesContext(connection) as queries:
        assert distributed_lock(key, owner="waiter").try_acquire(timeout=1) is None
    sent = [query["sql"].lstrip("( ").split()[0] for query in queries.captured_queries]
    assert sent.count("SELECT") >= 2, sent
    assert len([verb for verb in sent if verb != "SELECT"]) <= 2, sent


def test_refusal_writes_nothing(acquire: Leases, key: str) -> None:
    """A refused attempt leaves the row as it was."""
    acquire(lease=600, renew=False)
    before = QuerySet(DistributedLock).filter(pk=key).values().get()
    assert distributed_lock(key, owner="somebody else", note="x").try_acquire() is None
    assert QuerySet(DistributedLock).filter(pk=key).values().get() == before


def configured(**options: Any) -> dict[str, Any]:
    """Return a DBLOCKS setting with these options."""
    path = "dblocks.backends.database.DatabaseBackend"
    return {"default": {"BACKEND": path, **options}}


def test_settings_give_the_defaults(
    settings: Any, acquire: Leases, key: str, other: OtherThread
) -> None:
    """LEASE and TIMEOUT come from the setting, also for a lock that was made before."""
    the_lock = distributed_lock(key)
    settings.DBLOCKS = configured(LEASE=100, TIMEOUT=0.4)
    lease = acquire()
    assert 85 < lease.remaining() <= 90
    with takes(0.4, 0.4 + SLACK), pytest.raises(LockTimeout):
        other.do(the_lock.acquire)


def test_defaults_without_any_setting(settings: Any, acquire: Leases) -> None:
    """Without the setting a lease has 30 seconds."""
    del settings.DBLOCKS
    assert 26 < acquire().remaining() <= 27


def test_argument_goes_before_the_setting(settings: Any, acquire: Leases) -> None:
    """A lock's own lease rules over the setting's."""
    settings.DBLOCKS = configured(LEASE=100)
    assert acquire(lease=10).remaining() <= 9


@pytest.mark.parametrize(
    "name", ["KEY", "key ", "k\u00e9y", "ke\u0301y", "\N{KEY}", "key"]
)
def test_similar_names_are_different_locks(name: str) -> None:
    """Names that a collation takes for one are locked independently."""
    names = [
        "Key",
        "KEY",
        "key",
        "key ",
        "k\u00e9y",
        "ke\u0301y",
        "\N{KEY}",
        "\N{LOCK}",
    ]
    with distributed_lock(name, lease=60):
        for similar in names:
            taken = distributed_lock(similar, owner="somebody else").try_acquire()
            assert (taken is None) == (similar == name), similar
            if taken is not None:
                taken.release()


def test_token_rises_over_everything(key: str) -> None:
    """Release, expiry, force, pruning, re-creation: each grant's token is higher."""
    tokens: list[int] = []

    def grant(**options: Any) -> Lease:
        lease = distributed_lock(key, **options).acquire(timeout=3)
        tokens.append(lease.fencing_token)
        return lease

    grant().release()
    expired = grant(lease=0.2, renew=False)
    eventually(locks.expired().filter(pk=key).exists, what="the end of the lease")
    assert expired.release() is False
    forced = grant()
    locks.force_release(key)
    forced.release()
    grant().release()
    QuerySet(DistributedLock).filter(pk=key).update(expires_at=now(-3600))
    locks.prune(older_than=60)
    assert not QuerySet(DistributedLock).filter(pk=key).exists()
    grant().release()
    assert tokens == sorted(set(tokens))


def test_row_made_by_hand(key: str) -> None:
    """A free row of any version is granted with the next one."""
    LockFactory(key=key, version=41, free=True)
    with distributed_lock(key) as lease:
        assert lease.fencing_token > 41


@pytest.mark.usefixtures("readers_beside_a_writer")
def test_pruning_beside_contention(
    key: str, threads: Callable[[], OtherThread]
) -> None:
    """Beside pruning under contention grants don't overlap or repeat a token."""
    grants: list[tuple[float, float, int]] = []
    over = threading.Event()
    start = threading.Barrier(3, timeout=DEADLINE)

    def contend() -> None:
        start.wait()
        for _ in range(50):
            with distributed_lock(key, timeout=DEADLINE, lease=60) as lease:
                begun = time.monotonic()
                grants.append((begun, time.monotonic(), lease.fencing_token))

    def prune() -> None:
        start.wait()
        while not over.is_set():
            locks.prune(older_than=0)
            over.wait(0.005)

    pruning = threads().start(prune)
    contending = [threads().start(contend) for _ in range(2)]
    try:
        for future in contending:
            future.result(timeout=2 * DEADLINE)
    finally:
        over.set()
    pruning.result(timeout=DEADLINE)
    grants.sort()
    tokens = [token for _, _, token in grants]
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 100
    assert all(a[1] <= b[0] for a, b in pairwise(grants))


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("number", [1, 6, 20])
def test_pruning_beside_a_row_that_is_locked(
    key: str, other: OtherThread, number: int
) -> None:
    """A holder's transaction doesn't hold up pruning, which would hold up new keys."""
    for n in range(number):
        distributed_lock(f"{key}:{n}").acquire().release()
    move_clock(7200)
    lease = distributed_lock(f"{key}:held").acquire()
    with other.in_transaction(lease.guard):
        assert locks.prune(older_than=3600) >= number
    assert lease.release() is True


def test_after_a_flush(key: str, obtainable: Obtainable) -> None:
    """Locks work on after every table was emptied, as TransactionTestCase does."""
    call_command("flush", interactive=False, verbosity=0)
    with distributed_lock(key):
        assert not obtainable()
    assert obtainable()
    locks.prune(older_than=0)


# Settings and schema


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_session_locks_that_are_no_boolean(settings: Any, wrong: object) -> None:
    """The option takes True or False; the error names the alias and the value."""
    entry = {"BACKEND": PATH, "OPTIONS": {"session_locks": wrong}}
    settings.DBLOCKS = {"default": entry}
    with pytest.raises(ImproperlyConfigured, match="session_locks must be True or"):
        backends["default"]


def test_constraint_of_the_guard_is_postgresqls() -> None:
    """An existing table gets the guard's index, or loses it, on PostgreSQL alone."""
    [constraint] = DistributedLock._meta.constraints
    with connection.schema_editor(collect_sql=True) as editor:
        made = constraint.create_sql(DistributedLock, editor)
        dropped = constraint.remove_sql(DistributedLock, editor)
    wanted = connection.vendor == "postgresql"
    assert (made is not None, dropped is not None) == (wanted, wanted)


def test_nobody_waits(key: str) -> None:
    """For a key that nobody wants, nobody is known to wait."""
    assert backends["default"].waiters(key).number in {0, None}


def test_nothing_is_known_of_a_grant_without_a_token() -> None:
    """A row can't tell whether a grant without a token was ended by force."""
    assert not Reading(version=2).is_forced_from(Grant("k", "me", None))


def test_own_connections_are_closed() -> None:
    """Those to a database in memory too, which Django leaves open."""
    own = own_connections.separate_connection("default")
    own.ensure_connection()
    own_connections.close(own)
    assert own.connection is None
