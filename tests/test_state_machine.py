"""Small models against the real thing: any sequence of verbs, several owners, keys.

One machine drives the table through its manager, the other one locks and leases on
every backend, under a clock that it moves.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from django.db import transaction
from django.db.models import QuerySet
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dblocks import Lease, LeaseLost, Lock, LockError, distributed_lock
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.test import clear_locks, move_clock
from tests.factories import let_expire

locks = DistributedLock.objects
RUNS = itertools.count()
OWNERS = st.sampled_from(["ann", "Ann", "bob "])
KEYS = st.sampled_from(["a", "A"])
DRIFT = st.sampled_from([0, 0, 0, -1, +1])
FEW = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@dataclass
class Model:
    """What the contract says about one key."""

    owner: str = ""
    holds: int = 0
    version: int = 0
    highest: int = 0
    over: bool = True
    aged: bool = False

    @property
    def held(self) -> bool:
        return bool(self.owner) and not self.over

    def free(self) -> None:
        self.owner, self.holds, self.over, self.aged = "", 0, True, False


class Table(RuleBasedStateMachine):
    """Drives a real table and the model side by side."""

    @initialize()
    def start(self) -> None:
        self.prefix = f"machine:{next(RUNS)}:"
        self.models: dict[str, Model] = {}

    def model(self, key: str) -> Model:
        return self.models.setdefault(key, Model())

    @rule(key=KEYS, owner=OWNERS)
    def acquire(self, key: str, owner: str) -> None:
        model = self.model(key)
        row = locks.acquire(self.prefix + key, owner=owner, lease=600)
        if model.held and model.owner != owner:
            assert row is None
            return
        assert row is not None
        if model.held:
            assert row.version == model.version
            model.holds += 1
            return
        assert row.version > model.highest
        model.owner, model.holds, model.over, model.aged = owner, 1, False, False
        model.version = model.highest = row.version

    @rule(key=KEYS, owner=OWNERS, drift=DRIFT)
    def renew(self, key: str, owner: str, drift: int) -> None:
        model = self.model(key)
        done = locks.renew(
            self.prefix + key, owner=owner, version=model.version + drift, lease=600
        )
        assert done is (model.held and model.owner == owner and drift == 0)

    @rule(key=KEYS, owner=OWNERS, drift=DRIFT)
    def release(self, key: str, owner: str, drift: int) -> None:
        model = self.model(key)
        if model.owner and model.over:
            return
        done = locks.release(
            self.prefix + key, owner=owner, version=model.version + drift
        )
        assert done is (model.held and model.owner == owner and drift == 0)
        if done:
            model.holds -= 1
            if not model.holds:
                model.free()

    @rule(key=KEYS, drift=DRIFT)
    def force_release(self, key: str, drift: int) -> None:
        model = self.model(key)
        if model.owner and model.over:
            return
        done = locks.force_release(self.prefix + key, version=model.version + drift)
        assert done is (model.held and drift == 0)
        if done:
            model.free()

    @rule(key=KEYS)
    def time_passes(self, key: str) -> None:
        let_expire(self.prefix + key)
        self.model(key).over = self.model(key).aged = True

    @rule()
    def prune(self) -> None:
        locks.filter(key__startswith=self.prefix).prune(older_than=30)
        for model in self.models.values():
            if model.over and model.aged:
                model.free()

    @precondition(lambda self: hasattr(self, "models"))
    @invariant()
    def states_agree(self) -> None:
        for key, model in self.models.items():
            row = QuerySet(DistributedLock).filter(pk=self.prefix + key).first()
            if row is None:
                assert not model.held
                continue
            assert locks.held().filter(pk=row.pk).exists() is model.held
            if model.held:
                assert (row.owner, row.hold_count, row.version) == (
                    model.owner,
                    model.holds,
                    model.version,
                )
            # A force release raises the version as well: no later token repeats it.
            model.highest = max(model.highest, row.version)


@pytest.mark.django_db
def test_table_follows_the_model() -> None:
    """Every sequence of verbs leaves the table as the contract says."""
    run_state_machine_as_test(Table, settings=FEW)


# Locks and leases. Times are such that no two of them meet: the clock is moved by 40 s
# or 120 s, leases last 100 s or 270 s, less a margin of a tenth for their holders.

MOVES = st.sampled_from([40, 120])
LEASES = st.sampled_from([100, 270])
COOLING = st.sampled_from([0, 0, 150])


@dataclass
class Grant:
    """What the contract says about one grant: who has it, how often, how long."""

    owner: str
    token: int
    cools: int
    since: float
    until: float = 0.0
    known_until: float = 0.0
    holds: int = 0
    lost: bool = False

    def extend(self, now: float, lease: int) -> None:
        self.until = max(self.until, now + lease)
        self.known_until = max(self.known_until, now + 0.9 * lease)


@dataclass
class Reference:
    """What the contract says about one key: whose it is, and from when on nobody's."""

    grant: Grant | None = None
    taken_until: float = 0.0
    highest: int = 0

    def current(self, now: float) -> Grant | None:
        """Return the grant that holds the key, if its time isn't over."""
        return self.grant if self.grant and self.grant.until > now else None

    def taken(self, now: float) -> bool:
        return self.current(now) is not None or self.taken_until > now

    def free(self, until: float) -> None:
        self.grant, self.taken_until = None, until


@dataclass
class Proof:
    """A lease that was given out, and its grant."""

    lease: Lease
    key: str
    grant: Grant
    open: bool = field(default=True)


class Locks(RuleBasedStateMachine):
    """Drives locks on a backend, and the model beside them."""

    alias: str

    @initialize()
    def start(self) -> None:
        self.prefix = f"locks:{next(RUNS)}:"
        self.now = 0.0
        self.keys = {key: Reference() for key in ("a", "A")}
        self.proofs: list[Proof] = []

    def teardown(self) -> None:
        for proof in getattr(self, "proofs", []):
            with suppress(LockError):
                proof.lease.release()

    def is_good(self, proof: Proof) -> bool:
        """Is this lease open and its grant the one that has the key?"""
        return proof.open and self.keys[proof.key].current(self.now) is proof.grant

    def one(self, data: st.DataObject) -> Proof:
        return data.draw(st.sampled_from(self.proofs))

    @rule(key=KEYS, owner=OWNERS, lease=LEASES, cools=COOLING)
    def acquire(self, key: str, owner: str, lease: int, cools: int) -> None:
        lock = distributed_lock(
            self.prefix + key,
            owner=owner,
            lease=lease,
            renew=False,
            hold_at_least=cools,
            backend=self.alias,
        )
        reference, found = self.keys[key], lock.try_acquire()
        grant = reference.current(self.now)
        if reference.taken(self.now) and (grant is None or grant.owner != owner):
            assert found is None
            return
        assert found is not None
        assert found.fencing_token is not None
        if grant is None:
            assert found.fencing_token > reference.highest
            grant = Grant(owner, found.fencing_token, cools, self.now)
            reference.grant, reference.highest = grant, grant.token
        assert found.fencing_token == grant.token
        grant.holds += 1
        grant.extend(self.now, lease)
        self.proofs.append(Proof(found, key, grant))

    @precondition(lambda self: self.proofs)
    @rule(data=st.data(), lease=LEASES)
    def renew(self, data: st.DataObject, lease: int) -> None:
        proof = self.one(data)
        if self.is_good(proof):
            proof.lease.renew(lease)
            proof.grant.extend(self.now, lease)
        else:
            with pytest.raises(LeaseLost):
                proof.lease.renew(lease)

    @precondition(lambda self: self.proofs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        proof = self.one(data)
        good, proof.open = self.is_good(proof), False
        assert proof.lease.release() is good
        if good:
            proof.grant.holds -= 1
            if not proof.grant.holds:
                until = proof.grant.since + proof.grant.cools
                self.keys[proof.key].free(until)

    @precondition(lambda self: self.proofs and backends[self.alias].has_guard)
    @rule(data=st.data())
    def guard(self, data: st.DataObject) -> None:
        proof = self.one(data)
        # It asks the row, not the clock: overdue and not taken over passes.
        passes = proof.open and self.keys[proof.key].grant is proof.grant
        with suppress(LeaseLost), transaction.atomic():
            proof.lease.guard()
            assert passes
            return
        assert not passes

    @rule(key=KEYS)
    def force_release(self, key: str) -> None:
        reference, backend = self.keys[key], backends[self.alias]
        force = getattr(backend, "force_release", locks.force_release)
        there = reference.grant is not None or reference.taken(self.now)
        assert force(self.prefix + key) is there
        if there:
            reference.free(self.now)
            reference.highest += 1

    @rule()
    def clear(self) -> None:
        clear_locks(self.alias)
        for key, reference in self.keys.items():
            if reference.grant is not None or reference.taken(self.now):
                reference.free(self.now)
                reference.highest += 1
            assert not self.lock(key).locked()

    @precondition(lambda self: backends[self.alias].has_guard)
    @rule()
    def prune(self) -> None:
        locks.filter(key__startswith=self.prefix).prune(older_than=0)
        for reference in self.keys.values():
            if not reference.taken(self.now):
                reference.free(0.0)

    @rule(seconds=MOVES)
    def time_passes(self, seconds: int) -> None:
        move_clock(seconds, backend=self.alias)
        self.now += seconds

    def lock(self, key: str) -> Lock:
        return distributed_lock(self.prefix + key, backend=self.alias)

    @precondition(lambda self: hasattr(self, "keys"))
    @invariant()
    def locks_agree(self) -> None:
        for key, reference in self.keys.items():
            assert self.lock(key).locked() is reference.taken(self.now)
        for proof in self.proofs:
            held, grant = proof.lease.held, proof.grant
            if not proof.open or grant.known_until <= self.now:
                assert not held
            elif self.is_good(proof):
                assert held
            # Forced, it may not know it yet; but what was lost never comes back.
            assert not (held and grant.lost)
            grant.lost = grant.lost or (proof.open and not held)


def test_locks_follow_the_model(backend: str) -> None:
    """Every sequence of verbs on locks and leases does what the contract says."""
    machine = type("Locks", (Locks,), {"alias": backend})
    run_state_machine_as_test(machine, settings=FEW)
