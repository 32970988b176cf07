"""Many processes, few keys: grants apart, tokens in order, nobody forgotten."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from django.db import connection

from dblocks import distributed_lock
from dblocks.models import DistributedLock
from tests.factories import stored
from tests.faults.crew import Crew
from tests.faults.history import check, report
from tests.faults.scale import SEED, counts
from tests.timing import DEADLINE

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

Figures = dict[str, Any]


def soon() -> float:
    """A moment at which all children are there."""
    return time.monotonic() + 0.5


def assert_good(crew: Crew) -> None:
    """Fail with the offending events unless the history is one of a lock."""
    faults = check(crew.history())
    assert not faults, report(faults, SEED)


def grants(crew: Crew) -> int:
    return sum(event.what == "grant" for event in crew.history())


def test_tokens_under_force_release(crew: Crew, key: str, figures: Figures) -> None:
    """Tokens grow and never repeat while holders are released over their heads."""
    start = soon()
    end = start + counts(DEADLINE, 240.0)
    keys = [f"{key}:{number}" for number in range(2)]
    table = [
        {
            "keys": keys,
            "start": start,
            "until": end,
            "rounds": counts(40, 10**6),
            "seed": SEED + n,
            "timeout": 1.0,
        }
        for n in range(4)
    ]
    members = crew.fork_all("contend", table)
    forced = 0
    while not all(member.ended for member in members):
        assert time.monotonic() < end + DEADLINE
        for name in keys:
            forced += DistributedLock.objects.force_release(name)
            crew.take_in(wait=0.01)
    crew.finish(members)
    # A force release ends a grant under its holder: what it saw until then may be late.
    events = [event for event in crew.history() if event.what != "held"]
    faults = [fault for fault in check(events) if fault.kind != "overlap"]
    assert not faults, report(faults, SEED)
    figures |= {"grants": grants(crew), "force releases": forced}
    assert figures["grants"] > 20


def test_exclusion(crew: Crew, key: str, figures: Figures) -> None:
    """No two hold a key at once, with one key and several, queued and not."""
    start = soon()
    end = start + counts(DEADLINE, 240.0)
    table = [
        {
            "keys": [key, f"{key}:b"],
            "start": start,
            "until": end,
            "rounds": counts(50, 10**6),
            "seed": SEED + n,
            "timeout": timeout,
        }
        for n, timeout in enumerate([0, 0, 1.0, 1.0, 1.0])
    ]
    crew.finish(crew.fork_all("contend", table), within=counts(30.0, 300.0))
    assert_good(crew)
    figures["grants"] = grants(crew)
    assert figures["grants"] > 20


def test_tokens_that_are_not_current(crew: Crew, key: str, figures: Figures) -> None:
    """Renew, release and force release with another token or owner change nothing."""
    rounds = counts(200, 10_000)
    member = crew.fork("stale_tokens", key=key, rounds=rounds, seed=SEED)
    tried = member.expect("tried", within=counts(15.0, 300.0))
    assert (tried["changed"], tried["same"]) == (0, True)
    figures["tries"] = rounds


def test_new_keys_are_raced_for(crew: Crew, key: str, figures: Figures) -> None:
    """F13: processes race to create a key that has no row: one winner, no error."""
    processes, number = counts(6, 64), counts(15, 1000)
    start = time.monotonic() + counts(1.0, 10.0)
    keys = [f"{key}:{n}" for n in range(number)]
    starts = [start + n * counts(0.05, 0.2) for n in range(number)]
    for chunk in range(0, number, 50):
        names = keys[chunk : chunk + 50]
        begin = time.monotonic() + counts(0.5, 3.0)
        starts = [begin + n * counts(0.05, 0.2) for n in range(len(names))]
        table = [{"keys": names, "starts": starts, "lease": 600}] * processes
        crew.finish(crew.fork_all("create", table), within=4 * DEADLINE)
    winners = Counter(told["key"] for told in crew.told() if told["event"] == "won")
    assert winners == dict.fromkeys(keys, 1)
    figures |= {"processes": processes, "keys": number}


def test_pruning_under_contention(crew: Crew, key: str, figures: Figures) -> None:
    """F14: rows are pruned and made again all the time; no token repeats."""
    start = soon()
    end = start + counts(DEADLINE, 120.0)
    table = [
        {
            "keys": [f"{key}:{n % 2}"],
            "start": start,
            "until": end,
            "rounds": counts(50, 10**6),
            "seed": SEED + n,
            "timeout": 0.5,
        }
        for n in range(4)
    ]
    members = crew.fork_all("contend", table)
    deleted = 0
    while not all(member.ended for member in members):
        assert time.monotonic() < end + DEADLINE
        rows = DistributedLock.objects.filter(key__startswith=key)
        deleted += rows.prune(older_than=0)
        crew.take_in(wait=0.005)
    crew.finish(members)
    assert_good(crew)
    figures |= {"grants": grants(crew), "pruned": deleted}
    assert deleted


def test_force_release_while_held(crew: Crew, key: str, figures: Figures) -> None:
    """F15: the holder learns of it by its next renewal, or by its lease's deadline."""
    lease, delays = 1.5, []
    for number in range(counts(3, 500)):
        name = f"{key}:{number}"
        holder = crew.fork("hold", key=name, until=time.monotonic() + 30, lease=lease)
        holder.expect("grant")
        forced = time.monotonic()
        assert DistributedLock.objects.force_release(name, by="a test")
        delays.append(holder.expect("lost")["at"] - forced)
        assert stored(name).owner == ""
    crew.forget()
    figures |= {"forced": len(delays), "slowest (s)": round(max(delays), 3)}
    assert max(delays) < lease


LEVELS = ["read committed", "repeatable read", "serializable"]


@pytest.mark.parametrize("nested", [False, True], ids=["autocommit", "atomic"])
@pytest.mark.parametrize("level", LEVELS)
def test_isolation_levels(
    server: str, crew: Crew, key: str, level: str, nested: bool, figures: Figures
) -> None:
    """F16: at every level, lock operations pass no database error to their callers."""
    start = soon()
    end = start + counts(DEADLINE, 30.0)
    keys = [f"{key}:{number}" for number in range(4)]
    table = [
        {
            "keys": keys,
            "start": start,
            "until": end,
            "seed": SEED + n,
            "timeout": 1.0,
            "rounds": counts(6, 10**6),
            "isolation": level,
            "nested": nested,
        }
        for n in range(counts(6, 64))
    ]
    crew.finish(crew.fork_all("contend", table), within=60 + DEADLINE)
    assert_good(crew)
    figures["grants"] = grants(crew)
    assert figures["grants"]


def test_every_waiter_is_served(crew: Crew, key: str, figures: Figures) -> None:
    """F12: waiters in threads of many processes are all served, one at a time."""
    processes, threads = counts(4, 20), counts(5, 10)
    start = soon() + counts(0.0, 3.0)
    with distributed_lock(key).acquire(timeout=0):
        table = [
            {
                "key": key,
                "timeout": counts(20.0, 90.0),
                "threads": threads,
                "start": start,
                "hold": 0.005,
            }
        ] * processes
        members = crew.fork_all("wait_in_threads", table)
        # They wait for a while for a key that nobody gives back.
        crew.until(lambda: time.monotonic() > start + counts(0.7, 5.0))
    crew.finish(members, within=counts(30.0, 120.0))
    served = grants(crew)
    assert served == processes * threads
    tokens = [event.token for event in crew.history() if event.what == "grant"]
    assert len(set(tokens)) == served
    told = [member.expect("statements") for member in members]
    rates = [row["count"] / row["seconds"] for row in told]
    figures |= {"waiters": served, "statements/s/process": round(max(rates), 1)}
    assert connection.vendor == "sqlite" or min(rates) < 300
