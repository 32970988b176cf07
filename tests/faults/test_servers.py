"""Servers that die and come back, refuse, or live in another time zone."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, connection, connections

from dblocks import distributed_lock
from dblocks.backends.database import connections as database_connections
from dblocks.models import DistributedLock, TokenFloor
from tests.faults.clocks import faketime
from tests.faults.crew import Crew
from tests.faults.history import Event, verify
from tests.faults.kinds import KINDS, Asked, grants_in, row_of
from tests.faults.scale import FULL, SEED, counts, pick
from tests.support import services
from tests.support.factories import stored
from tests.support.fixtures import OtherThread
from tests.support.timing import (
    DEADLINE,
    SLACK,
    always,
    eventually,
    scaled,
    takes,
)
from tests.testapp.models import Account

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

Figures = dict[str, Any]


@pytest.fixture
def crew_there(private: services.Server, crew: Crew) -> None:
    """Send the crew to the private server."""
    names = ["HOST", "PORT", "NAME", "USER", "PASSWORD"]
    crew.database = {name: connections.settings["private"][name] for name in names}


@pytest.fixture
def locks_there(private: services.Server, settings: Any) -> None:
    """Keep this process's locks on the private server."""
    path = "dblocks.backends.database.DatabaseBackend"
    settings.DBLOCKS = {"default": {"BACKEND": path, "OPTIONS": {"using": "private"}}}


@pytest.mark.usefixtures("crew_there")
def test_server_killed(
    private: services.Server, crew: Crew, key: str, figures: Figures
) -> None:
    """F7, F8: over kill -9 of a server at +05:00, leases go on and tokens grow.

    Of one key, of two at once and of a permit.
    """
    wanted, lease = counts(1, 30), 12.0
    until = time.monotonic() + counts(120.0, 1200.0)
    held = [Asked.of_kind(kind, f"{key}:{kind}") for kind in KINDS]
    holders = crew.fork_all(
        "hold", [{**one.told, "until": until, "lease": lease} for one in held]
    )
    for holder in holders:
        holder.expect("held")
    contenders = crew.fork_all(
        "contend",
        [
            {
                "keys": [
                    f"{key}:a",
                    [f"{key}:a", f"{key}:b"],
                    {"key": f"{key}:p", "permits": [2]},
                ],
                "until": until,
                "seed": SEED + n,
                "timeout": 0.5,
                # A release that the server's death prevents is left to lapse.
                "lease": 1.0,
                "stubborn": True,
            }
            for n in range(3)
        ],
    )

    def grants() -> int:
        crew.take_in()
        return sum(m.saw("grant") is not None for m in contenders) and sum(
            told["event"] == "grant" for m in contenders for told in m.told
        )

    downtimes, recoveries = list[float](), list[float]()
    for _ in range(wanted):
        before = grants()
        crew.until(lambda before=before: grants() > before + 20, DEADLINE, "work")
        down = time.monotonic()
        private.kill()
        private.start()
        connections["private"].close()
        downtimes.append(time.monotonic() - down)
        before, up = grants(), time.monotonic()
        crew.until(lambda before=before: grants() > before + 20, DEADLINE, "work again")
        recoveries.append(time.monotonic() - up)
    lost = [m for m in holders if m.saw("loss") is not None]
    verify(crew.history())
    figures |= {
        "kills": wanted,
        "longest downtime (s)": round(max(downtimes), 1),
        "work again after (s)": round(max(recoveries), 1),
        "grants": grants(),
        "leases lost": len(lost),
    }
    if max(downtimes) < lease / 2:
        assert not lost
    connections["private"].close()
    rows = DistributedLock.objects.using("private").held().with_state()
    for one, holder in zip(held, holders, strict=True):
        names = [row_of(grant) for grant in grants_in(holder.told)]
        assert len(names) == len(one.keys)
        left = [row.remaining for row in rows.filter(key__in=names)]
        assert lost or len(left) == len(names)
        assert all(0 < seconds <= lease for seconds in left)


@pytest.mark.usefixtures("crew_there")
def test_server_down_for_longer_than_the_lease(
    private: services.Server, crew: Crew, key: str, figures: Figures
) -> None:
    """F8: holders know by their deadline that they have nothing any more."""
    lease, down = pick(scaled(2.0), 1.5), pick(scaled(3.0), 2.5)
    row = {"until": time.monotonic() + 4 * DEADLINE, "lease": lease}
    asked = [Asked.of_kind(kind, f"{key}:{kind}") for kind in KINDS]
    # Both permits are held, so that who waits needs one of these.
    table = [one.told for one in asked for _ in range(one.permits)]
    holders = crew.fork_all("hold", [{**row, **told} for told in table])
    for holder in holders:
        holder.expect("held")
    held = [grant for holder in holders for grant in grants_in(holder.told)]
    tokens = {row_of(grant): grant["token"] for grant in held}
    killed = time.monotonic()
    private.kill()
    for holder in holders:
        lost = holder.expect("loss")
        assert lost["reason"] in {"backend", "expired"}
        assert lost["at"] - killed <= lease + SLACK
    crew.until(lambda: time.monotonic() > killed + down)
    private.start()
    connections["private"].close()
    again = crew.fork_all("wait", [{**told, "timeout": 5} for told in table])
    crew.finish(again)
    granted = [grant for waiter in again for grant in grants_in(waiter.told)]
    assert len(granted) == len(held)
    assert all(grant["token"] > tokens[row_of(grant)] for grant in granted)
    figures["down for longer"] = 1


@pytest.mark.usefixtures("locks_there")
def test_renewals_at_a_server_that_refuses_them(
    key: str, figures: Figures, caplog: Any
) -> None:
    """F8: they are tried on another connection: another server is the primary now."""
    writable = connections["private"]
    writable.ensure_connection()
    read_only = "SET GLOBAL tx_read_only"
    if writable.vendor == "postgresql":
        read_only = "ALTER DATABASE faults SET default_transaction_read_only"
    elif not writable.mysql_is_mariadb:
        read_only = "SET GLOBAL transaction_read_only"
    length = scaled(3)
    lease = distributed_lock(key, lease=length).acquire(timeout=0)
    # Of sessions that begin from now on.
    writable.cursor().execute(f"{read_only} = ON")
    eventually(lambda: "renewal failed" in caplog.text, what="a failed renewal")
    writable.cursor().execute(f"{read_only} = OFF")
    always(lambda: lease.held, during=1.5 * length, what="held")
    assert lease.release() is True
    figures["refused"] = 1


@pytest.mark.usefixtures("crew_there", "locks_there")
@pytest.mark.parametrize("kind", KINDS)
def test_waiter_when_the_server_restarts(
    private: services.Server,
    crew: Crew,
    threads: Callable[[], OtherThread],
    key: str,
    kind: str,
    figures: Figures,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F8: who was waiting goes on waiting whenever the server is there again."""
    monkeypatch.setattr(database_connections, "OUTAGE", DEADLINE)
    asked = Asked.of_kind(kind, key)
    row = {**asked.told, "until": time.monotonic() + scaled(5), "lease": 30.0}
    for holder in crew.fork_all("hold", [row] * asked.permits):
        holder.expect("held")
    waiter = threads()
    answer = waiter.start(asked.lock(lease=60).acquire, timeout=2 * DEADLINE)
    rows = DistributedLock.objects.using("private")
    eventually(lambda: rows.waiters(sorted(asked.keys)[0]).number, what="the waiter")
    for _ in range(2):
        private.kill()
        time.sleep(0.3)
        private.start()
        # Its own connection is dead for good, and the others are made anew.
        always(lambda: not answer.done(), during=0.5, what="waiting")
    waiter.do(answer.result(timeout=2 * DEADLINE).release)
    connections["private"].close()
    figures["waited on"] = 1


@pytest.mark.usefixtures("crew_there", "locks_there")
def test_waiter_when_the_server_stays_away(
    private: services.Server,
    crew: Crew,
    threads: Callable[[], OtherThread],
    key: str,
    figures: Figures,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F8: who would wait for ever learns of it in the end."""
    monkeypatch.setattr(database_connections, "OUTAGE", 1.0)
    row = {"key": key, "until": time.monotonic() + scaled(5), "lease": 30.0}
    crew.fork_all("hold", [row])[0].expect("held")
    answer = threads().start(distributed_lock(key).acquire, timeout=2 * DEADLINE)
    rows = DistributedLock.objects.using("private")
    eventually(lambda: rows.waiters(key).number, what="the waiter")
    private.kill()
    with pytest.raises(OperationalError):
        answer.result(timeout=DEADLINE)
    private.start()
    connections["private"].close()
    figures["given up"] = 1


@pytest.mark.usefixtures("crew_there", "locks_there")
def test_async_waiters_when_the_server_restarts(
    private: services.Server,
    crew: Crew,
    key: str,
    figures: Figures,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F8: so do tasks, whose looks are made in threads that have asked nothing yet."""
    monkeypatch.setattr(database_connections, "OUTAGE", DEADLINE)
    keys = [f"{key}:{n}" for n in range(25)]
    row = {"key": keys, "until": time.monotonic() + scaled(8), "lease": 30.0}
    crew.fork_all("hold", [row])[0].expect("held")

    async def wait_for(each: str) -> bool:
        lease = await distributed_lock(each, lease=60).aacquire(timeout=2 * DEADLINE)
        return await lease.arelease()

    async def wait_for_all() -> list[bool]:
        waiting = asyncio.gather(*map(wait_for, keys))
        await asyncio.sleep(4)
        await asyncio.to_thread(private.kill)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(private.start)
        return await waiting

    assert all(asyncio.run(wait_for_all()))
    connections["private"].close()
    figures["tasks waited on"] = len(keys)


CLOCKS = ["a day ahead", "jumping", "a day behind"]


@pytest.mark.parametrize("clock", CLOCKS if FULL else CLOCKS[:2])
def test_wrong_wall_clocks(
    server: str, crew: Crew, key: str, clock: str, tmp_path: Path, figures: Figures
) -> None:
    """F6, F7: a client's clock and time zone have no effect on any grant.

    Of one key, of two at once and of permits.
    On SQLite the client's clock is the database's.
    """
    file = tmp_path / "faketime"
    file.write_text("+200s\n")
    environment = {
        "a day ahead": faketime(FAKETIME="+1d", USE_TZ="False"),
        "a day behind": faketime(FAKETIME="-1d", TIME_ZONE="Asia/Tokyo"),
        "jumping": faketime(FAKETIME_TIMESTAMP_FILE=str(file)),
    }[clock]
    chance, over = random.Random(SEED), threading.Event()

    def jump() -> None:
        # In one step: who finds it empty ends.
        new = file.with_suffix(".new")
        while not over.wait(0.05):
            new.write_text(f"{chance.choice([-200, 0, 200]):+d}s\n")
            new.replace(file)

    jumper = threading.Thread(target=jump, daemon=True)
    jumper.start()
    strange = Crew(environment)
    try:
        asked = [Asked.of_kind(kind, f"{key}:{kind}") for kind in KINDS]
        more = {"until": time.monotonic() + 30, "lease": 20.0, "renew": False}
        # All permits, so that there is none left.
        table = [{**one.told, **more} for one in asked for _ in range(one.permits)]
        for holder in strange.fork_all("hold", table):
            holder.expect("held", within=2 * DEADLINE)
        names = [name for one in asked for name in one.rows]
        assert sorted(map(row_of, grants_in(strange.told()))) == sorted(names)
        for name in names:
            row = stored(name)
            assert row.acquired_at is not None
            assert abs((row.expires_at - row.acquired_at).total_seconds() - 20) < 0.001
            left = DistributedLock.objects.with_state().get(pk=name).remaining
            assert 10 < left <= 20
        for one in asked:
            assert one.lock().try_acquire() is None
        row = {
            "keys": [
                f"{key}:a",
                [f"{key}:a", f"{key}:b"],
                {"key": f"{key}:p", "permits": [2, 3]},
            ],
            "until": time.monotonic() + counts(DEADLINE, 20.0),
            "rounds": counts(25, 10**6),
            "timeout": 1.0,
        }
        ours = crew.fork_all("contend", [{**row, "seed": SEED + n} for n in range(2)])
        theirs = strange.fork_all(
            "contend", [{**row, "seed": SEED - n} for n in range(2)]
        )
        crew.finish(ours, within=counts(30.0, 90.0))
        strange.finish(theirs, within=counts(30.0, 90.0))
        history = crew.history() + [
            Event(**{**vars(event), "process": f"strange {event.process}"})
            for event in strange.history()
        ]
    finally:
        over.set()
        jumper.join()
        strange.forget()
        strange.close()
    verify(history)
    figures["grants"] = sum(event.what == "grant" for event in history)


@pytest.fixture
def plain(committed: None, crew: Crew, tmp_path: Path) -> Iterator[int]:
    """Give the crew a SQLite database with Django's own settings; return an account."""
    if connection.vendor != "sqlite":
        pytest.skip("the settings of SQLite")
    config = {"NAME": str(tmp_path / "plain.sqlite3"), "OPTIONS": {}}
    connections.settings["plain"] = {**connections.settings["default"], **config}
    try:
        with connections["plain"].schema_editor() as editor:
            for model in (DistributedLock, TokenFloor, Account):
                editor.create_model(model)
        crew.database = {**config, "ATOMIC_REQUESTS": True}
        yield Account.objects.using("plain").create(name="plain").pk
    finally:
        connections["plain"].close()
        del connections["plain"]
        del connections.settings["plain"]


def test_default_settings_of_sqlite(
    plain: int, crew: Crew, key: str, figures: Figures
) -> None:
    """F28: requests in transactions of their own meet no error because of locks.

    Without locks they do: two that have read can't both write.
    """
    rounds, database = counts(10, 250), crew.database
    errors, answered = dict[bool, int](), dict[bool, int]()
    for locked in (True, False):
        crew.database = database
        row = {"key": key, "account": plain, "rounds": rounds, "locked": locked}
        members = crew.fork_all("serve", [{**row, "seed": SEED + n} for n in range(4)])
        crew.finish(members, within=counts(60.0, 300.0))
        told = Counter(told["event"] for told in crew.told())
        errors[locked], answered[locked] = told["database"], told["answered"]
        assert errors[locked] + answered[locked] == 4 * rounds
        if locked:
            account = Account.objects.using("plain").get(pk=plain)
            assert account.balance == answered[locked]
        crew.forget()
    figures |= {"requests": 8 * rounds, "errors with locks": errors[True]}
    figures["errors without locks"] = errors[False]
    assert not errors[True]
    assert errors[False]


@pytest.fixture
def crowded(server: str, settings: Any) -> Iterator[str]:
    """Make a backend whose user has no connection left."""
    user = f"crowded_{SEED}"
    name = connection.settings_dict["NAME"]
    connections.settings["crowded"] = {
        **connections.settings["default"],
        "USER": user,
        "PASSWORD": "",
    }
    path = "dblocks.backends.database.DatabaseBackend"
    settings.DBLOCKS = {
        "default": {"BACKEND": path},
        "crowded": {"BACKEND": path, "OPTIONS": {"using": "crowded"}},
    }
    with connection.cursor() as cursor:
        if server == "postgresql":
            cursor.execute(f"CREATE ROLE {user} LOGIN CONNECTION LIMIT 1")
        else:
            cursor.execute(f"CREATE USER {user}@'%' WITH MAX_USER_CONNECTIONS 1")
            cursor.execute(f"GRANT ALL ON `{name}`.* TO {user}@'%'")
    taken = connections["crowded"].copy()
    try:
        taken.ensure_connection()
        yield "crowded"
    finally:
        taken.close()
        connections["crowded"].close()
        del connections["crowded"]
        del connections.settings["crowded"]
        with connection.cursor() as cursor:
            if server == "postgresql":
                eventually(lambda: _dropped(cursor, f"DROP ROLE {user}"))
            else:
                cursor.execute(f"DROP USER {user}@'%'")


def _dropped(cursor: Any, query: str) -> bool:
    cursor.execute(query)
    return True


@pytest.mark.parametrize("timeout", [0, 0.5])
def test_out_of_connections(
    crowded: str, key: str, timeout: float, figures: Figures
) -> None:
    """F19: a clear error, in time, and never "not acquired"."""
    with (
        takes(at_most=timeout + 1),
        pytest.raises(OperationalError, match=r"(?i)connections"),
    ):
        distributed_lock(key, backend=crowded).try_acquire(timeout)
    figures["errors"] = 1
