"""Stops processes at the worst moment, and counts the pauses that prove something."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

from tests.faults.crew import Crew, Member
from tests.faults.scale import FULL, SEED
from tests.support.timing import DEADLINE, SLACK

#: Seconds in which somebody takes over from a process that is stopped.
PATIENCE = 3 * SLACK


class Nemesis:
    """Stops processes just when they have read and not yet written."""

    def __init__(self, crew: Crew, members: list[Member], lease: float) -> None:
        self._crew = crew
        self._by_who = {member.who: member for member in members}
        self._lease = lease
        self._chance = random.Random(SEED)
        self._stopped: dict[int, float] = {}
        #: By key and permit, the latest token under which something was written.
        self._written: dict[tuple[str, int], int] = {}
        self.pauses = 0

    def pause(self, number: int, lengths: list[float], within: float) -> None:
        """Stop processes so many times, each for a number of leases.

        Only a pause in which somebody else has written counts. Whoever was writing by
        the time it stood may have its row pinned; on a busy machine that may be each of
        them.
        """
        until = time.monotonic() + within
        while (self.pauses < number or self._stopped) and time.monotonic() < until:
            for told in self._crew.take_in(wait=0.02):
                if told["event"] == "write":
                    place, token = place_of(told), told["token"]
                    self._written[place] = max(token, self._written.get(place, 0))
                enough = self.pauses + len(self._stopped) >= number
                if told["event"] != "inside" or enough:
                    continue
                busy = {self._by_who[who].told[0]["key"] for who in self._stopped}
                if told["key"] not in busy and told["who"] not in self._stopped:
                    self._by_who[told["who"]].stop()
                    length = self._lease * self._chance.choice(lengths)
                    self._stopped[told["who"]] = time.monotonic() + length
            for who in list(self._stopped):
                member = self._by_who[who]
                if self._may_go_on(member):
                    member.resume()
                    del self._stopped[who]
        for who in self._stopped:
            self._by_who[who].resume()
        for member in self._by_who.values():
            if not member.ended:
                os.kill(member.pid, signal.SIGTERM)
        self._crew.finish(self._by_who.values(), within=4 * DEADLINE)

    def _may_go_on(self, member: Member) -> bool:
        """Tell whether to resume a stopped process; count a pause that counts."""
        over = time.monotonic() - self._stopped[member.who]
        between = member.told[-1]["event"] == "inside"
        replaced = between and any(
            self._written.get(place_of(grant), 0) > grant["token"]
            for grant in last_grants(member)
        )
        if not between and not FULL:
            return True
        # Who was stopped while it renewed may have its row locked.
        if over < 0 or (between and not replaced and over < PATIENCE):
            return False
        self.pauses += replaced
        return True


def last_grants(member: Member) -> Iterator[dict[str, Any]]:
    """Yield what a process that has just read holds."""
    for told in reversed(member.told[:-1]):
        if told["event"] != "grant":
            return
        yield told


def place_of(told: dict[str, Any]) -> tuple[str, int]:
    return told["key"], told["permit"]
