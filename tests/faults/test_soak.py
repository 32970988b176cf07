"""F22: everything at once, for a while: kills, stops, dead networks, dead servers."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import DEFAULT_DB_ALIAS, DatabaseError, connection, connections

from dblocks.models import DistributedLock
from tests.faults.clocks import faketime
from tests.faults.crew import Crew, Member
from tests.faults.history import Event, row_name, verify
from tests.faults.kinds import KINDS, Asked
from tests.faults.proxy import Proxy
from tests.faults.scale import FULL, SEED, counts, pick
from tests.support import services
from tests.support.factories import AccountFactory
from tests.support.timing import DEADLINE, SLACK, eventually
from tests.testapp.models import Account

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

LEASE = 1.0


class Weather:
    """Makes one fault after another happen to workers, their network and server."""

    def __init__(self, place: Place, work: dict[str, Any]) -> None:
        self._place = place
        self._work = work
        self._chance = random.Random(SEED)
        self._serial = SEED
        self._clear_at: dict[str, float] = {}
        self._stopped: dict[Member, float] = {}
        self.counts: Counter[str] = Counter()
        self.members: list[Member] = []
        self._mortal: set[Member] = set()

    def hire(self, crew: Crew, number: int, **more: Any) -> None:
        """Fork workers; those that are told to measure themselves are never killed."""
        rows = []
        for _ in range(number):
            self._serial += 1
            rows.append({**self._work, "seed": self._serial, **more})
        hired = crew.fork_all("soak", rows)
        self.members += hired
        if "measure" not in more:
            self._mortal.update(hired)

    def pass_over(self, crew: Crew, until: float) -> None:
        """Let faults happen until a moment."""
        faults = [self.kill, self.stop]
        if self._place.proxy is not None:
            faults += [self.end_session] * 2
            faults += [self.swallow, self.slow_down, self.lose_a_reply]
        next_crash = time.monotonic() + pick(2.0, 15.0)
        while time.monotonic() < until:
            crew.take_in(wait=self._chance.uniform(0.05, pick(0.3, 1.0)))
            self.clear_up()
            self._chance.choice(faults)(crew)
            if self._place.server is not None and time.monotonic() > next_crash:
                self.crash()
                next_crash = time.monotonic() + self._chance.uniform(10, 25)
        self.clear_up(all_of_it=True)

    def clear_up(self, *, all_of_it: bool = False) -> None:
        """End what has lasted long enough."""
        now = time.monotonic()
        proxy = self._place.proxy
        for what, end in list(self._clear_at.items()):
            if all_of_it or now >= end:
                del self._clear_at[what]
                assert proxy is not None
                setattr(proxy, what, {"delay": (0.0, 0.0)}.get(what, 0))
        for member, end in list(self._stopped.items()):
            if all_of_it or now >= end:
                del self._stopped[member]
                member.resume()

    def someone(self) -> Member:
        return self._chance.choice(
            [m for m in self.members if not m.ended and m not in self._stopped]
        )

    def kill(self, crew: Crew) -> None:
        """F1, F2: holders and waiters die."""
        mortal = [m for m in self.members if not m.ended and m in self._mortal]
        if not mortal:
            return
        member = self._chance.choice(mortal)
        self._stopped.pop(member, None)
        member.kill()
        self.counts["kills"] += 1
        self.hire(crew, 1)

    def stop(self, crew: Crew) -> None:
        """F4, F5: they are stopped, wherever they are."""
        if len(self._stopped) < 4:
            member = self.someone()
            member.stop()
            length = self._chance.choice([0.5, 1.5, 3.0]) * LEASE
            self._stopped[member] = time.monotonic() + length
            self.counts["stops"] += 1

    def end_session(self, crew: Crew) -> None:
        """F9: the server ends a connection."""
        if self._place.end_session(self._chance):
            self.counts["sessions"] += 1

    def swallow(self, crew: Crew) -> None:
        """F10: nothing passes for a while, and nothing is closed."""
        self.begin("swallow", True, self._chance.uniform(0.2, 1.5) * LEASE)

    def slow_down(self, crew: Crew) -> None:
        """F11: answers are late, and connections are reset."""
        self.begin("delay", (0.01, 0.05), self._chance.uniform(0.5, 2.0))
        self.begin("resets", 0.02, self._chance.uniform(0.5, 2.0))

    def lose_a_reply(self, crew: Crew) -> None:
        """F3: an answer never comes."""
        assert self._place.proxy is not None
        self._place.proxy.lose_replies = 1
        self.counts["replies"] += 1

    def begin(self, what: str, value: object, seconds: float) -> None:
        if what not in self._clear_at:
            setattr(self._place.proxy, what, value)
            self._clear_at[what] = time.monotonic() + seconds
            self.counts[{"swallow": "black holes"}.get(what, what)] += 1

    def crash(self) -> None:
        """F8: the server is killed and comes back."""
        assert self._place.server is not None
        self._place.server.kill()
        self._place.server.start()
        connections[self._place.alias].close()
        self.counts["crashes"] += 1


class Place:
    """Where the soak happens: a database, if possible a server that may die."""

    def __init__(
        self, alias: str, server: services.Server | None, proxy: Proxy | None
    ) -> None:
        self.alias = alias
        self.server = server
        self.proxy = proxy

    def end_session(self, chance: random.Random) -> bool:
        queries = {
            "mysql": (
                "SELECT id FROM information_schema.processlist"
                " WHERE db = DATABASE() AND id <> CONNECTION_ID()",
                "KILL {}",
            ),
            "postgresql": (
                "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
                " AND backend_type = 'client backend'",
                "SELECT pg_terminate_backend({})",
            ),
        }
        find, end = queries[connection.vendor]
        with suppress(DatabaseError), connections[self.alias].cursor() as cursor:
            cursor.execute(find)
            if sessions := [number for (number,) in cursor.fetchall()]:
                cursor.execute(end.format(int(chance.choice(sessions))))
                return True
        return False


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A server of its own at +05:00, behind a proxy; on SQLite the test's database."""
    if connection.vendor == "sqlite":
        yield Place(DEFAULT_DB_ALIAS, None, None)
        return
    private = request.getfixturevalue("private")
    with Proxy(private.port, seed=SEED) as proxy:
        proxy.after = b"dblocks_"
        yield Place("private", private, proxy)


class Vault:
    """What the soak locks, and the accounts that it writes under the guard."""

    def __init__(self, key: str, number: int, using: str) -> None:
        """Make keys, sets of two neighbours among them, and keys with two permits."""
        keys = [f"{key}:{n}" for n in range(number)]
        pairs = zip(keys, keys[1:] + keys[:1], strict=True)
        self.asked = [("key", Asked((name,))) for name in keys]
        self.asked += [("set", Asked(pair)) for pair in list(pairs)[::2]]
        self.asked += [
            ("permits", Asked.of_kind("permits", f"{key}:p{n}"))
            for n in range((number + 1) // 2)
        ]
        names = sorted({name for _, asked in self.asked for name in rows_of(asked)})
        self._accounts = Account.objects.using(using)
        rows = [AccountFactory.build(name=name) for name in names]
        self._accounts.bulk_create(rows)
        self.ids = dict(self._accounts.values_list("name", "pk"))

    @property
    def table(self) -> list[dict[str, Any]]:
        """What the workers are told."""
        return [
            {
                **asked.told,
                "kind": kind,
                "account": [self.ids[name] for name in rows_of(asked)],
            }
            for kind, asked in self.asked
        ]

    def verify(self, writes: list[dict[str, Any]]) -> None:
        """Fail if a write that was acknowledged is lost."""
        values = Counter(
            (row_name(told["key"], told["permit"]), told["value"]) for told in writes
        )
        # Two that wrote the same value had read the same one: one of them is lost.
        assert not [write for write, times in values.items() if times > 1]
        balances = dict(self._accounts.values_list("name", "balance"))
        for name, value in values:
            assert balances[name] >= value


def rows_of(asked: Asked) -> list[str]:
    """Name the rows of a lock, by the order of its keys."""
    return [row_name(key, n) for key in asked.keys for n in range(asked.permits)]


def growth_of(members: list[Member]) -> list[float]:
    """Return by how many percent those grew that measured their memory."""
    growth = []
    for member in members:
        sizes = [t["kilobytes"] for t in member.told if t["event"] == "memory"]
        if len(sizes) == 2:
            growth.append(100 * (sizes[1] / sizes[0] - 1))
    return growth


@pytest.mark.timeout(counts(60, 1200))
def test_soak(place: Place, crew: Crew, key: str, figures: dict[str, Any]) -> None:
    """All that can fail fails, and the invariants hold.

    Of keys, of sets that share them, and of permits.
    """
    database: dict[str, Any] = {}
    if place.proxy is not None:
        names = ["NAME", "USER", "PASSWORD", "HOST"]
        config = connections.settings[place.alias]
        database = {name: config[name] for name in names}
        database["PORT"] = str(place.proxy.port)
    vault = Vault(key, pick(4, 34), place.alias)
    length = max(pick(6.0, 30.0), counts(6.0, 180.0))
    crew.database = database
    crews = [crew]
    if place.proxy is not None:
        # F6: a day ahead, and another time zone.
        strange = Crew(faketime(FAKETIME="+1d", USE_TZ="False", TIME_ZONE="Asia/Tokyo"))
        strange.database = database
        crews.append(strange)
    start = time.monotonic() + pick(0.0, 5.0)
    work = {"table": vault.table, "until": start + length, "lease": LEASE}
    weather = Weather(place, work)
    try:
        weather.hire(crew, pick(4, 12))
        weather.hire(crew, pick(1, 4), measure=start + length / 3)
        for strange in crews[1:]:
            weather.hire(strange, pick(1, 4), measure=start + length / 3)
        weather.pass_over(crew, start + length - 2)
        for each in crews:
            mine = [m for m in weather.members if m.crew is each and not m.ended]
            each.finish(mine, within=2 * DEADLINE)
        events, told = list[Event](), list[dict[str, Any]]()
        for number, each in enumerate(crews):
            told += each.told()
            for event in each.history():
                name = f"{number}:{event.process}"
                events.append(Event(**{**vars(event), "process": name}))
    finally:
        for each in crews[1:]:
            each.forget()
            each.close()
    verify(events)
    writes = [t for t in told if t["event"] == "write"]
    vault.verify(writes)
    held = DistributedLock.objects.using(place.alias).held()
    eventually(lambda: not held.exists(), within=LEASE + SLACK, what="all leases' end")
    growth = growth_of(weather.members)
    assert growth
    kinds = Counter(t["kind"] for t in writes)
    figures |= dict(weather.counts) | {
        "grants": sum(event.what == "grant" for event in events),
        "guarded writes": len(writes),
        "of them of sets": kinds["set"],
        "of permits": kinds["permits"],
        "refused": sum(t["event"] == "refused" for t in told),
        "memory, worst growth (%)": round(max(growth), 1),
    }
    assert len(kinds) == len(KINDS) or (writes and not FULL)
    assert max(growth) < 5 or not FULL
