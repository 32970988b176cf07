"""A session lock that somebody keeps for ever, whoever it is."""

from __future__ import annotations

import time

from dblocks import distributed_lock
from tests.support.fixtures import OtherThread
from tests.support.processes import Workers
from tests.support.timing import DEADLINE, scaled
from tests.topologies.conftest import Orphan

GRACE = 0.25
PROCESSES = 4
#: They take turns by chance: some sixteen for each.
SECONDS = 16


def delay(
    key: str, workers: Workers, other: OtherThread, hold: float
) -> tuple[float, float]:
    """Return how long after the release by another process a waiter has the key.

    Counted from before the release, and from after it.
    """
    holder = workers.start("hold", key=key, timeout=DEADLINE)
    holder.expect("held")
    waiter = other.start(wait, key)
    time.sleep(hold)
    before = time.monotonic()
    holder.tell("release")
    released = holder.expect("released")["at"]
    holder.until_done()
    granted = waiter.result(DEADLINE)
    return granted - before, granted - released


def wait(key: str) -> float:
    with distributed_lock(key, timeout=DEADLINE):
        return time.monotonic()


def test_cost_of_a_grant(
    orphan: Orphan, workers: Workers, other: OtherThread, key: str
) -> None:
    """Once a process knows, it waits for no longer than the grace after a release."""
    orphan(key)
    delay(key, workers, other, hold=0.6)
    delays = [delay(key, workers, other, hold=0.6) for _ in range(3)]
    assert min(most for most, _ in delays) > GRACE * 0.9, delays
    assert min(least for _, least in delays) < GRACE + scaled(0.15), delays


def test_cost_of_a_free_key(orphan: Orphan, key: str, workers: Workers) -> None:
    """Who comes just after a release waits for the rest of the grace."""
    orphan(key)
    delays = []
    for _ in range(3):
        workers.start("attempt", key=key).until_done()
        asked = time.monotonic()
        with distributed_lock(key, timeout=DEADLINE):
            delays.append(time.monotonic() - asked)
    assert min(delays) < GRACE + scaled(0.1), delays


def test_nobody_starves(orphan: Orphan, workers: Workers, key: str) -> None:
    """Processes that contend beside it are all served, nearly as often as can be."""
    orphan(key)
    row = {"key": key, "seconds": SECONDS, "hold": 0.005, "timeout": DEADLINE}
    crowd = workers.start_all("contend", [row] * PROCESSES)
    ends = [worker.until_done(2 * DEADLINE)[-1] for worker in crowd]
    grants = [end["grants"] for end in ends]
    assert min(grants) >= 4, grants
    assert sum(grants) >= SECONDS / (GRACE + scaled(0.1)), grants
    tokens = [token for end in ends for token in end["tokens"]]
    assert len(set(tokens)) == len(tokens)
