"""Real clients and a real server, with a network between them that fails."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from dblocks import LockTimeout, current_lease, distributed_lock
from dblocks.models import DistributedLock, TokenFloor
from tests.faults.crew import Crew
from tests.faults.history import late_renewals, verify
from tests.faults.kinds import KINDS, Asked, each, kinds
from tests.faults.proxy import Proxy
from tests.faults.scale import FULL, LATE, POLL, SEED, counts, pick
from tests.support.factories import stored
from tests.support.timing import DEADLINE, always, eventually, scaled

pytestmark = [
    pytest.mark.usefixtures("committed", "server"),
    pytest.mark.database_backend,
]

#: MySQL's and MariaDB's code of it.
NO_SUCH_SESSION = 1094

Figures = dict[str, Any]
Distant = Callable[..., str]


def sessions() -> list[int]:
    """Return the ids of the other sessions in this database."""
    query = {
        "mysql": "SELECT id FROM information_schema.processlist"
        " WHERE db = DATABASE() AND id <> CONNECTION_ID()",
        "postgresql": "SELECT pid FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'",
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(query)
        return [number for (number,) in cursor.fetchall()]


def end_session(number: int) -> None:
    """Have the server end one session; it may be gone already."""
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_terminate_backend(%s)", [number])
            return
        try:
            cursor.execute(f"KILL {int(number)}")
        except OperationalError as error:
            if error.args[0] != NO_SUCH_SESSION:
                raise


def assert_held(asked: Asked, taken: Any) -> None:
    """The table has what was taken, held once, and nothing else that was asked for."""
    leases = {asked.row_of(lease): lease for lease in each(taken)}
    held = DistributedLock.objects.held().filter(key__in=asked.rows)
    assert {row.key: (row.version, row.owner, row.hold_count) for row in held} == {
        name: (lease.fencing_token, lease.owner, 1) for name, lease in leases.items()
    }
    assert {lease.key for lease in leases.values()} == set(asked.keys)


def assert_free(asked: Asked) -> None:
    assert not DistributedLock.objects.held().filter(key__in=asked.rows).exists()


@kinds
@pytest.mark.parametrize("first", [True, False], ids=["new key", "old key"])
def test_lost_reply_to_an_acquire(
    proxy: Proxy, distant: Distant, key: str, first: bool, kind: str, figures: Figures
) -> None:
    """F3: the retry finds its own grant and returns it; no ghost stays.

    Nor a second permit, nor one of two keys by itself.
    """
    backend = distant()
    for number in range(counts(3 if kind == "key" else 2, 200)):
        asked = Asked.of_kind(kind, f"{key}:{number}")
        if first:
            earlier = dict.fromkeys(asked.rows, TokenFloor.objects.get().value)
        else:
            for held in [asked.hold(each) for each in range(asked.permits)]:
                held.release()
            earlier = {name: stored(name).version for name in asked.rows}
        proxy.after = b"INSERT" if first else b"UPDATE"
        connections["distant"].ensure_connection()
        proxy.lose_replies = 1
        try:
            taken = asked.lock(backend=backend, lease=60).acquire(timeout=2)
        except LockTimeout as error:
            pytest.fail(f"waited for its own grant: {error}")
        assert proxy.lost == number + 1
        assert_held(asked, taken)
        # Granted once, and not once more by the retry.
        for lease in each(taken):
            assert lease.fencing_token == earlier[asked.row_of(lease)] + 1
        if asked.permits > 1:
            # The other permit is there for somebody else, and no third one.
            assert asked.hold().release()
        for one in asked.each:
            with ExitStack() as others:
                for other in range(1, one.permits):
                    others.enter_context(one.hold(other))
                assert one.lock().try_acquire() is None
        assert taken.release()
        assert_free(asked)
        connections["distant"].close()
    figures["replies lost"] = proxy.lost


@pytest.mark.parametrize("complete", [True, False], ids=["granted", "refused"])
def test_lost_reply_within_a_set(
    proxy: Proxy, distant: Distant, key: str, complete: bool, figures: Figures
) -> None:
    """F3: whichever answer is lost, a set is had once, or nothing of it.

    The second key has no row, so that they are taken one after the other.
    """
    backend = distant()
    proxy.after = b"dblocks_distributedlock"
    for number in range(counts(12, 240)):
        asked = Asked(tuple(f"{key}:{number}:{each}" for each in (3, 2, 1)))
        last, _, first = asked.keys
        for name in (first, last):
            distributed_lock(name).acquire(timeout=0).release()
        connections["distant"].ensure_connection()
        lost, proxy.skip, proxy.lose_replies = proxy.lost, number % 12, 1
        lock = asked.lock(backend=backend, lease=60)
        if complete:
            with lock.acquire(timeout=2) as taken:
                assert_held(asked, taken)
                assert len({lease.owner for lease in taken.values()}) == 1
        else:
            with distributed_lock(last).acquire(timeout=0):
                assert lock.try_acquire() is None
                assert_held(Asked((last,)), current_lease(last))
                assert_free(Asked(asked.keys[1:]))
        assert_free(asked)
        # The first ones there always are.
        assert proxy.lost == lost + 1 or number % 12 > 3
        connections["distant"].close()
    figures["replies lost"] = proxy.lost


@kinds
def test_lost_reply_to_a_release(
    proxy: Proxy, distant: Distant, key: str, kind: str, figures: Figures
) -> None:
    """The release is repeated, and known to have been carried out.

    Of several keys the one statement that gives back all of them.
    """
    backend, asked = distant(), Asked.of_kind(kind, key)
    for number in range(counts(2, 100)):
        taken = asked.lock(backend=backend, lease=60).acquire(timeout=2)
        proxy.after, proxy.lose_replies = b"UPDATE", 1
        assert taken.release() is True
        assert proxy.lost == number + 1
        assert taken.lost_reason is None
        assert_free(asked)
        connections["distant"].close()
    figures["replies lost"] = proxy.lost


def test_black_hole_for_ever(
    proxy: Proxy, distant: Distant, key: str, figures: Figures
) -> None:
    """F10, I5: the loss is known by the deadline while the socket hangs.

    Somebody else has the key when the lease is over, and not before.
    """
    backend, length = distant(), scaled(1.2)
    lates, waits = list[float](), list[float]()
    for number in range(counts(2, 30)):
        name = f"{key}:{number}"
        proxy.swallow = False
        lease = distributed_lock(name, backend=backend, lease=length).acquire(timeout=2)
        lost: list[float] = []
        told = threading.Event()

        def on_lost(
            lease: Any, lost: list[float] = lost, told: threading.Event = told
        ) -> None:
            lost.append(time.monotonic())
            told.set()

        lease.on_lost(on_lost)
        end = stored(name).expires_at
        eventually(lambda name=name, end=end: stored(name).expires_at > end)
        proxy.swallow = True
        # Nothing extends it any more; what was under way has arrived after this.
        time.sleep(0.05)
        deadline = time.monotonic() + lease.remaining()
        end = stored(name).expires_at
        with distributed_lock(name).acquire(timeout=DEADLINE) as next_one:
            granted = time.monotonic()
            held = lease.held
            assert told.wait(DEADLINE)
            assert next_one.fencing_token > lease.fencing_token
            taken_over = stored(name).acquired_at
        assert not held
        assert granted > deadline
        assert taken_over is not None
        waits.append((taken_over - end).total_seconds())
        lates.append(lost[0] - deadline)
        proxy.reset_all()
        proxy.swallow = False
        connections["distant"].close()
    middle = sorted(lates)[len(lates) // 2]
    figures |= {"for ever": len(lates), "news late, median (ms)": round(1000 * middle)}
    figures |= {"news late, worst (ms)": round(1000 * max(lates))}
    figures |= {"free to taken over, worst (ms)": round(1000 * max(waits))}
    assert middle <= (0.05 if FULL else LATE)
    assert max(lates) <= (0.05 if FULL else LATE)
    assert min(waits) >= 0
    assert max(waits) <= POLL + (0.25 if FULL else LATE)


def test_short_black_hole(
    proxy: Proxy, distant: Distant, key: str, figures: Figures
) -> None:
    """F10: half a lease without a network is no loss; two leases are, for ever."""
    backend = distant()
    for number in range(counts(1, 10)):
        name, length = f"{key}:{number}", scaled(3.0)
        lease = distributed_lock(name, backend=backend, lease=length).acquire(timeout=2)
        end = stored(name).expires_at
        swallow(proxy, 0.5 * length)
        eventually(lambda name=name, end=end: stored(name).expires_at > end)
        assert lease.held
        assert lease.release()
    for number in range(counts(1, 10)):
        name, length = f"{key}:long:{number}", scaled(1.0)
        lease = distributed_lock(name, backend=backend, lease=length).acquire(timeout=2)
        swallow(proxy, 2 * length)
        # What was sent before may arrive now.
        always(lambda lease=lease: not lease.held, during=0.1)
        assert lease.lost_reason == "backend"
        with distributed_lock(name).acquire(timeout=DEADLINE) as next_one:
            assert next_one.fencing_token > lease.fencing_token
            assert lease.release() is False
        connections["distant"].close()
    figures["half a lease"] = figures["two leases"] = counts(1, 10)


def swallow(proxy: Proxy, seconds: float) -> None:
    """Be a black hole for so long."""
    proxy.swallow = True
    opened = time.monotonic() + seconds
    eventually(lambda: time.monotonic() >= opened)
    proxy.swallow = False


def one_of_each(key: str) -> list[Asked]:
    """Return one of each kind."""
    return [Asked.of_kind(kind, f"{key}:{kind}") for kind in KINDS]


def test_sessions_killed_by_the_server(crew: Crew, key: str, figures: Figures) -> None:
    """F9: holders renew and contenders go on over sessions that the server ends.

    Of one key, of two at once and of a permit.
    """
    chance = random.Random(SEED)
    start = time.monotonic() + 0.5
    length = 3.0
    until = start + counts(4.0, 120.0)
    holders = crew.fork_all(
        "hold",
        [{**one.told, "until": until, "lease": length} for one in one_of_each(key)],
    )
    contenders = crew.fork_all(
        "contend",
        [
            {
                "keys": [
                    f"{key}:contended",
                    [f"{key}:contended", f"{key}:contended:too"],
                    {"key": f"{key}:contended:p", "permits": [2]},
                ],
                "start": start,
                "until": until,
                "seed": SEED + n,
                "timeout": 1.0,
                "stubborn": True,
            }
            for n in range(3)
        ],
    )
    for contender in contenders:
        contender.expect("grant")
    killed, wanted = 0, counts(12, 500)
    while killed < wanted and time.monotonic() < until:
        if open_ones := sessions():
            end_session(chance.choice(open_ones))
            killed += 1
        crew.take_in(wait=chance.uniform(0.0, 0.3))
    crew.finish([*holders, *contenders], within=counts(30.0, 240.0))
    lost = [told for told in crew.told() if told["event"] == "loss"]
    left = [told["left"] for told in crew.told() if told["event"] == "renewed"]
    slow = late_renewals(left, length)
    figures |= {"sessions killed": killed, "leases lost": len(lost)}
    figures |= {"renewals": len(left), "recovered late": len(slow)}
    # A session that ends while it is being made is an error; one at work is replaced.
    errors = crew.errors()
    others = [told for told in errors if not told.get("connecting")]
    figures["ended while connecting"] = len(errors) - len(others)
    assert not others, "\n\n".join(told.get("trace", str(told)) for told in others)
    assert killed >= counts(3, 500)
    assert len(left) >= len(holders)
    assert len(slow) <= pick(0.25, 0.01) * len(left)
    assert not lost
    verify(crew.history())
    eventually(lambda: not sessions(), what="the end of all sessions")


def test_slow_network_that_resets(
    proxy: Proxy, crew: Crew, key: str, figures: Figures
) -> None:
    """F11: latency and resets are no loss while a lease is long enough.

    Of one key, of two at once and of a permit.
    """
    length = pick(4.0, 10.0)
    # Of each way, so that a round trip takes 100 to 300 ms.
    proxy.delay = pick(0.025, 0.05), pick(0.05, 0.15)
    crew.database = {"HOST": "127.0.0.1", "PORT": str(proxy.port)}
    until = time.monotonic() + counts(scaled(7.0), 75.0)
    holders = crew.fork_all(
        "hold",
        [
            {**one.told, "until": until, "lease": length, "timeout": 5}
            for n in range(pick(1, 4))
            for one in one_of_each(f"{key}:{n}")
        ],
    )
    for holder in holders:
        holder.expect("grant", within=30)
    # Of the requests about locks; the database's name is in those for a session.
    proxy.resets, proxy.after = 0.05, b"dblocks_distributedlock"
    crew.until(lambda: all(h.saw("renewed") or h.ended for h in holders), 2 * DEADLINE)
    # One that the few renewals of the quick part certainly meet.
    proxy.reset_all()
    crew.until(lambda: all(h.ended for h in holders), counts(40.0, 200.0), "the end")
    lost = [told for told in crew.told() if told["event"] == "loss"]
    # A release may meet one reset after the other until its patience is over.
    lost += [told for told in crew.errors() if "trace" not in told]
    figures |= {"leases": len(holders), "resets": proxy.reset, "lost": len(lost)}
    assert not lost
    silent = [holder.told for holder in holders if not holder.saw("renewed")]
    assert not silent
