"""Redlock: several independent servers, of which a majority must agree.

The algorithm is that of redis.io ("Distributed Locks with Redis"): ask all servers; if
a majority grants the key, hold it for the rest of the lease, otherwise undo everywhere.
It has no fencing tokens, because each server counts for itself (M. Kleppmann, "How to
do distributed locking", 2016; S. Sanfilippo, "Is Redlock safe?", 2016).
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from redis.exceptions import ConnectionError, RedisError, TimeoutError

from ... import clock
from ...permits import row_keys
from ...workers import Workers
from ..values import (
    Described,
    Entry,
    Grant,
    Granted,
    Reading,
    Renewal,
    Renewed,
    Request,
    first_free,
)
from .client import TIMEOUTS, may_pass
from .counted import CountedHolds
from .server import Server
from .servers import Servers

T = TypeVar("T")

SOCKET_TIMEOUT = 0.25
"""Seconds after which a server that doesn't answer is out of reach, by default."""

STEPS = 4
"""How many such times a majority waits for the other servers."""

RETRY_AFTER = 0.25
"""Seconds, at most, before the servers are asked again after too few answered."""

DRIFT = 0.01
"""The part of a lease by which the servers' clocks may drift apart."""

workers = Workers("dblocks-redlock")


def _identity() -> str:
    """Return the identity of a new grant; a later one is greater in this process."""
    return f"{time.monotonic_ns():016x}{os.urandom(8).hex()}"


class UnansweredError(ConnectionError):
    """Too few servers answered, for reasons that may pass."""


class QuorumBackend(Servers):
    """A majority of several independent servers."""

    has_fencing_tokens = False
    # No server's faults are sat out: a majority without that server is enough.
    patience = 0.0
    client_options = dict.fromkeys(TIMEOUTS, SOCKET_TIMEOUT)

    def __init__(self, alias: str, config: dict[str, Any]) -> None:
        super().__init__(alias, config)
        self._majority = len(self._servers) // 2 + 1
        #: The most servers that may fail, or refuse, while the others are a majority.
        self._spare = len(self._servers) - self._majority
        self._counted = CountedHolds()
        steps = [step for server in self._servers if (step := server.client.step)]
        all_have_one = len(steps) == len(self._servers)
        #: Seconds for which a majority waits for the others; ``None`` without a limit.
        self._others_within = STEPS * max(steps) if all_have_one else None

    # Asking

    def _ask(
        self,
        question: Callable[[Server], T],
        servers: Iterable[Server] | None = None,
    ) -> dict[Server, T]:
        """Ask servers in parallel, by default all; return the answers that come.

        Raises:
            RedisError: Too few are in reach for a majority.
        """
        asked = self._servers if servers is None else servers
        answers, errors = self._answers(question, asked)
        if len(errors) > self._spare:
            raise self._unanswered(errors)
        return answers

    def _unanswered(self, errors: Sequence[RedisError]) -> RedisError:
        kind = UnansweredError if all(map(may_pass, errors)) else ConnectionError
        return kind(
            f"{len(errors)} of {len(self._servers)} servers did not answer, and "
            f"{self._majority} must: {'; '.join(map(str, errors))}"
        )

    def _answers(
        self, question: Callable[[Server], T], servers: Iterable[Server]
    ) -> tuple[dict[Server, T], list[RedisError]]:
        asked: dict[Future[T], Server] = {}
        for server in servers:
            try:
                future = workers.submit(partial(question, server))
            except RuntimeError as refusal:
                # No thread can be started, as when the interpreter ends.
                future = Future()
                future.set_exception(ConnectionError(f"not asked: {refusal}"))
            asked[future] = server
        done, late = wait(asked, self._others_within)
        while late and sum(not each.exception() for each in done) < self._majority:
            more, late = wait(late, self._others_within)
            done |= more
        answers: dict[Server, T] = {}
        errors: list[RedisError] = []
        for future, server in asked.items():
            if future in late:
                # Its name may take long to resolve, which no timeout of a socket ends.
                errors.append(TimeoutError(f"{server.client.name}: no answer in time"))
                continue
            error = future.exception()
            if error is None:
                answers[server] = future.result()
            elif isinstance(error, RedisError):
                errors.append(error)
            else:
                raise error
        return answers, errors

    def _patiently(self, ask: Callable[[], T], patience: float) -> T:
        """Ask; while too few servers answer, ask again until ``patience`` is over."""
        give_up = clock.monotonic() + patience
        while True:
            try:
                return ask()
            except UnansweredError:
                if clock.monotonic() + RETRY_AFTER >= give_up:
                    raise
            time.sleep(RETRY_AFTER * random.uniform(0.5, 1))

    # The verbs

    def try_acquire(self, request: Request, patience: float) -> Granted | Reading:
        return self._patiently(partial(self._try_any, request), patience)

    def _try_any(self, request: Request) -> Granted | Reading:
        if request.permits == 1:
            return self._try(request, request.key)
        keys = row_keys(request.key, request.permits)
        seen = self.read_all(keys)
        owner = request.owner
        mine = [k for k, it in seen.items() if it.owner == owner and it.remaining > 0]
        first = request.permit
        free = (
            key
            for key in keys[first:] + keys[:first]
            if key not in seen or seen[key].remaining <= 0
        )
        for key in mine or free:
            answer = self._try(request, key)
            if isinstance(answer, Granted):
                return answer
        return first_free(self.read_all(keys), keys)

    def _try(self, request: Request, key: str) -> Granted | Reading:
        sent = clock.monotonic()
        alone = replace(request, key=key, permits=1, permit=0, identity=_identity())
        answers, errors = self._answers(
            lambda server: server.acquire(alone), self._servers
        )
        granted = {s: each for s, each in answers.items() if isinstance(each, Granted)}
        votes = Counter(each.grant for each in granted.values()).most_common(1)
        agreed = [each for each in granted.values() if each.grant == votes[0][0]]
        limit = min((each.limit for each in agreed), default=0.0)
        left = min(request.lease, limit) * (1 - DRIFT) - (clock.monotonic() - sent)
        valid = agreed if len(agreed) >= self._majority and left > 0 else []
        counted = {s for s, each in granted.items() if each in valid}
        reached = len(answers)
        if any(each.again for each in valid):
            grant = valid[0].grant
            told, failed = self._extend(grant, request.lease, counted)
            # Not judged by _renewed(), which goes by noted holds, even by lost ones.
            if sum(grant in each.extended for each in told) < self._majority:
                valid, reached = [], reached - len(failed)
                errors = [*errors, *failed]
        useless = {s: [each.grant] for s, each in granted.items() if each not in valid}
        if useless or not valid:
            # New grants, of servers that lack a co-owner's grant, are useless as well.
            asked = [Grant(key, request.owner, None, alone.identity)]
            self._undo(alone, asked, useless)
        if valid:
            if request.explicit:
                self._enter(request, valid[0], counted, alone.identity)
            return valid[0]._replace(limit=limit)
        if reached < self._majority:
            raise self._unanswered(errors)
        return self.read_all([key]).get(key, Reading())

    def _extend(
        self, grant: Grant, lease: float, counted: set[Server]
    ) -> tuple[Collection[Renewed], list[RedisError]]:
        """Extend a grant that its owner has entered again, where that is counted.

        The servers' script doesn't extend it: if only a minority has a grant, it would
        never lapse while its owner keeps asking.
        """
        renewals = [Renewal(grant, lease)]
        answers, errors = self._answers(lambda server: server.renew(renewals), counted)
        return answers.values(), errors

    def _enter(
        self, request: Request, granted: Granted, counted: set[Server], identity: str
    ) -> None:
        """Note an explicit owner's hold, and subtract those that were lost here."""
        # A slow server may yet count a new grant, so all servers are noted.
        is_new = granted.grant.identity == identity
        try:
            if granted.again:
                self._subtract_lost(request, granted.grant)
        finally:
            # Noted last: the subtraction takes the holds that were noted last.
            self._counted.note(granted.grant, self._servers if is_new else counted)

    def _forfeit(self, grant: Grant, holds: int) -> None:
        counted = [self._counted.take(grant) for _ in range(holds)]
        due = Counter(s for each in counted for s in self._servers_of(each))
        self._ask(lambda server: server.forfeit(grant, due[server]), list(due))

    def _servers_of(self, counted: Collection[Server] | None) -> Collection[Server]:
        return self._servers if counted is None else counted

    def try_acquire_all(
        self, request: Request, keys: Sequence[str], patience: float
    ) -> list[Granted] | None:
        return self._patiently(partial(self._try_all, request, keys), patience)

    def _try_all(self, request: Request, keys: Sequence[str]) -> list[Granted] | None:
        sent = clock.monotonic()
        request = replace(request, identity=_identity())
        answers, errors = self._answers(
            lambda server: server.acquire_all(request, keys), self._servers
        )
        granted = [each for each in answers.values() if each is not None]
        if len(granted) >= self._majority:
            limit = granted[0][0].limit
            left = min(request.lease, limit) * (1 - DRIFT) - (clock.monotonic() - sent)
            if left > 0:
                for each in granted[0] if request.explicit else ():
                    self._counted.note(each.grant, self._servers)
                return granted[0]
        grants = [Grant(key, request.owner, None, request.identity) for key in keys]
        granting = [server for server, each in answers.items() if each is not None]
        self._undo(request, grants, dict.fromkeys(granting, grants))
        if len(answers) < self._majority:
            raise self._unanswered(errors)
        return None

    def _undo(
        self,
        request: Request,
        asked: Sequence[Grant],
        granted: Mapping[Server, Sequence[Grant]],
    ) -> None:
        """Undo what was granted, or may have been; the rest lapses.

        An explicit owner may have the key in another thread, so only holds that servers
        are known to have counted just now are undone. For other owners, all servers
        undo this request's grant, and no other: a server that hung may do so after the
        owner has asked again.
        """
        count = None if request.explicit else 0
        if not request.explicit:
            granted = dict.fromkeys(self._servers, asked)

        def undo(server: Server) -> set[Grant]:
            grants = granted[server]
            # An earlier grant, of a co-owner, cools as its hold_at_least demands.
            is_new = all(each.identity == request.identity for each in grants)
            return server.release_all(grants, count=count, undo=is_new)

        self._answers(undo, granted)

    def reenter(self, renewal: Renewal, count: int | None, patience: float) -> Renewed:
        new = "up" if count is None else count
        answers, errors = self._answers(
            lambda server: server.renew([renewal], new), self._servers
        )
        renewed = self._renewed([renewal], answers)
        counted = {s for s, each in answers.items() if each.extended}
        if count is None and renewed.extended:
            self._counted.note(renewal.grant, counted)
        elif count is None:
            # The re-entry counts in this process alone, or not at all: servers undo it.
            grants = [renewal.grant]
            self._answers(lambda s: s.release_all(grants, count=None), counted)
        if len(errors) > self._spare:
            raise self._unanswered(errors)
        return renewed

    def renew(self, renewals: Sequence[Renewal]) -> Renewed:
        answers = self._ask(lambda server: server.renew(renewals))
        return self._renewed(renewals, answers)

    def _renewed(
        self, renewals: Sequence[Renewal], answers: Mapping[Server, Renewed]
    ) -> Renewed:
        """Return what a majority says."""
        renewed = Renewed()
        for grant, _ in renewals:
            # Servers that don't count this process's hold let co-owners free the key.
            counted = self._servers_of(self._counted.last(grant))
            extended = sum(
                grant in each.extended and server in counted
                for server, each in answers.items()
            )
            told = answers.values()
            reasons = [each.lost[grant] for each in told if grant in each.lost]
            if extended >= self._majority:
                renewed.extended.add(grant)
                if any(grant in each.requested for each in told):
                    renewed.requested.add(grant)
            elif len(reasons) > self._spare:
                renewed.lost[grant] = Counter(reasons).most_common(1)[0][0]
                self._counted.forget(grant)
            else:
                renewed.out_of_reach.add(grant)
        return renewed

    def release_all(
        self, grants: Sequence[Grant], *, count: int | None, deadline: float
    ) -> set[Grant]:
        due: dict[Server, list[Grant]] = {}
        for grant in grants:
            counted = None if count is not None else self._counted.take(grant)
            for server in self._servers_of(counted):
                due.setdefault(server, []).append(grant)
        answers = self._ask(lambda s: s.release_all(due[s], count=count), list(due))
        refused = Counter(
            grant for s, current in answers.items() for grant in {*due[s]} - current
        )
        # As with renewals, a grant is lost when no majority can have it any more.
        return {grant for grant in grants if refused[grant] <= self._spare}

    def undo_all(self, grants: Sequence[Grant]) -> None:
        self._ask(lambda server: server.release_all(grants, count=0, undo=True))

    def read_all(
        self, keys: Sequence[str], patience: float | None = None
    ) -> dict[str, Reading]:
        ask = partial(self._ask, lambda server: server.read_all(keys))
        answers = list(self._patiently(ask, patience or 0.0).values())
        return {
            key: self._agreed([each.get(key, Reading()) for each in answers])
            for key in keys
            if any(key in each for each in answers)
        }

    def _agreed(self, seen: Sequence[Reading]) -> Reading:
        """Return the reading that says when a majority will grant the key."""
        readings = sorted(seen, key=lambda each: each.remaining)
        return readings[self._majority - 1]

    def move_clock(self, seconds: float) -> None:
        self._ask(lambda server: server.make_older(seconds))

    # Operators

    def entries(self, key: str | None = None) -> Iterable[Entry]:
        answers = self._ask(lambda server: list(server.entries(key))).values()
        found: dict[str, list[Entry]] = {}
        for entry in (entry for each in answers for entry in each):
            found.setdefault(entry.key, []).append(entry)
        free = self._majority - 1
        for row_key in sorted(found):
            # Servers that never had the key would grant it at once.
            missing = len(answers) - len(found[row_key])
            entries = sorted(found[row_key], key=lambda entry: entry.remaining)
            yield entries[max(0, free - missing)]

    def ask_holder(self, row_key: str, version: int | None) -> Described | None:
        answers = self._ask(lambda server: server.request_release(row_key, version))
        # One server is enough to tell the holder; only a majority proves there is one.
        return self._described(answers.values(), self._majority)

    def end_grant(
        self, row_key: str, version: int | None, age: float
    ) -> Described | None:
        answers = self._ask(lambda server: server.force_release(row_key, version, age))
        # If fewer had a grant, a majority of the servers had none.
        return self._described(answers.values(), len(answers) - self._majority + 1)

    def _described(
        self, answers: Iterable[Described | None], least: int
    ) -> Described | None:
        """Return the grant's owner and holder, if ``least`` servers or more know it."""
        found = [each for each in answers if each is not None]
        if len(found) < least:
            return None
        owner, holder, _ = found[0]
        return owner, holder, None
