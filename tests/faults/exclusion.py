"""Processes that contend for keys, for sets and for permits while faults befall them.

On any engine: the crew's environment says where its locks are.
"""

from __future__ import annotations

import time

import pytest

from tests.faults.crew import Crew, Member
from tests.faults.history import numbered, verify
from tests.support.timing import DEADLINE, scaled


def exclude(
    crew: Crew, key: str, backend: str, *, length: float, **options: float
) -> int:
    """Six processes contend; one is killed, another stopped beyond its lease.

    No two may hold a key, or more a permit than there are.

    Args:
        length: Of the leases, in seconds.
        options: Of the locks.

    Returns:
        The number of grants.
    """
    start = time.monotonic() + 1
    end = start + scaled(7)
    table = [
        {
            "keys": [
                f"{key}:0",
                f"{key}:1",
                [f"{key}:0", f"{key}:1"],
                {"key": f"{key}:p", "permits": [2, 3]},
            ],
            "start": start,
            "until": end,
            "seed": number,
            "timeout": 1.0 if number else 0,
            "hold": 0.05 if number in {1, 2} else 0.002,
            "backend": backend,
            **options,
        }
        for number in range(6)
    ]
    members = crew.fork_all("contend", table)
    stopped, killed = members[1:3]
    stop_while_holding(crew, killed)
    killed.kill()
    while True:
        stop_while_holding(crew, stopped)
        pause(crew, 1.4 * length)
        stopped.resume()
        pause(crew, scaled(0.2))
        if time.monotonic() > end - 2:
            break
    crew.finish(members, 3 * DEADLINE)
    history = crew.history()
    verify(history if history[0].token is not None else numbered(history))
    # Who stood for longer than its lease was told so when it gave back.
    assert stopped.who in {error["who"] for error in crew.errors()}
    return sum(event.what == "grant" for event in history)


def pause(crew: Crew, seconds: float) -> None:
    """Let so much time go by, and take in what is told meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        crew.take_in(wait=0.02)


def stop_while_holding(crew: Crew, member: Member) -> None:
    """Suspend a process that has been granted a lock and hasn't given it back."""

    def holds() -> bool:
        return bool(member.told) and member.told[-1]["event"] == "grant"

    until = time.monotonic() + 2 * DEADLINE
    while time.monotonic() < until:
        crew.until(holds, what="a grant")
        member.stop()
        pause(crew, 0.05)
        if holds():
            return
        member.resume()
    pytest.fail(f"process {member.who} wasn't stopped while it had a lock")
