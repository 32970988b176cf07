"""Small models against the real thing: any sequence of verbs, several owners, keys.

One machine drives the table through its manager, the other one locks and leases on
every backend, under a clock that it moves.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.db import transaction
from django.db.models import QuerySet
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dblocks import Lease, LeaseLost, Leases, LockError, distributed_lock
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.permits import apart, row_key, row_keys
from dblocks.test import clear_locks, move_clock
from tests.support.factories import let_expire

locks = DistributedLock.objects
RUNS = itertools.count()
OWNERS = st.sampled_from(["ann", "Ann", "bob "])
KEYS = st.sampled_from(["a", "A"])
DRIFT = st.sampled_from([0, 0, 0, -1, +1])
FEW = settings(
    max_examples=25,
    stateful_step_count=20,
    deadline=None,
    # A failure is reported as it was found: to shrink it takes minutes.
    phases=[Phase.reuse, Phase.generate],
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


@pytest.mark.needs("has_table")
@pytest.mark.django_db
def test_table_follows_the_model() -> None:
    """Every sequence of verbs leaves the table as the contract says."""
    run_state_machine_as_test(Table, settings=FEW)


# Locks and leases. Times are such that no two of them meet: the clock is moved by 40 s
# or 120 s, leases last 100 s or 270 s, less a margin of a tenth for their holders.

MOVES = st.sampled_from([40, 120])
LEASES = st.sampled_from([100, 270])
COOLING = st.sampled_from([0, 0, 150])
#: Of ``None`` it is the machine's own thread that owns.
WHO = st.sampled_from([None, "ann", "Ann", "bob "])
SETS = st.lists(st.sampled_from(["a", "A", "b"]), min_size=2, max_size=3)
#: The number is lowered and raised from attempt to attempt.
PERMITS = st.sampled_from([2, 3])
POOL = "p"
#: What the machine locks: three keys, and the permits of another one.
ROWS = ["a", "A", "b", *row_keys(POOL, 3)]
MANY = settings(FEW, max_examples=30, stateful_step_count=25)


@dataclass
class Grant:
    """What the contract says about one grant: who has it, how often, how long."""

    owner: str | None
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
    """What the contract says about one row: whose it is, and from when on nobody's."""

    grant: Grant | None = None
    taken_until: float = 0.0
    highest: int = 0

    def current(self, now: float) -> Grant | None:
        """Return the grant that holds the row, if its time isn't over."""
        return self.grant if self.grant and self.grant.until > now else None

    def taken(self, now: float) -> bool:
        return self.current(now) is not None or self.taken_until > now

    def owned(self, owner: str | None, now: float) -> bool:
        """Tell whether this owner has it, and can enter again."""
        grant = self.current(now)
        return grant is not None and grant.owner == owner

    def free(self, until: float) -> None:
        self.grant, self.taken_until = None, until


@dataclass
class Part:
    """A lease, the row that it is of, and its grant."""

    lease: Lease
    row: str
    grant: Grant


@dataclass
class Proof:
    """What was given out: a lease, or those of several keys."""

    taken: Lease | Leases
    parts: list[Part]
    open: bool = field(default=True)


class Locks(RuleBasedStateMachine):
    """Drives locks on a backend, and the model beside them.

    On single keys, on two or three at once, and on permits.
    """

    alias: str

    @initialize()
    def start(self) -> None:
        self.prefix = f"locks:{next(RUNS)}:"
        self.now = 0.0
        self.rows = {row: Reference() for row in ROWS}
        self.proofs: list[Proof] = []

    def teardown(self) -> None:
        for proof in getattr(self, "proofs", []):
            with suppress(LockError):
                proof.taken.release()

    def is_current(self, part: Part) -> bool:
        """Is the grant of this lease the one that has the row?"""
        return self.rows[part.row].current(self.now) is part.grant

    def is_good(self, proof: Proof) -> bool:
        """Is it open, and does it have all its rows?"""
        return proof.open and all(map(self.is_current, proof.parts))

    def one(self, data: st.DataObject) -> Proof:
        return data.draw(st.sampled_from(self.proofs))

    def lock(self, *keys: str, **options: Any) -> Any:
        names = [self.prefix + key for key in keys]
        return distributed_lock(*names, backend=self.alias, **options)

    def enter(self, row: str, lease: Lease, how: tuple[str | None, int, int]) -> Part:
        """Note that a row was granted, or entered again."""
        owner, length, cools = how
        reference, token = self.rows[row], lease.fencing_token
        assert (token is not None) is backends[self.alias].has_fencing_tokens
        if token is None:
            was_taken = reference.owned(owner, self.now)
            token = reference.highest + (not was_taken)
        if not reference.owned(owner, self.now):
            assert not reference.taken(self.now)
            assert token > reference.highest
            reference.grant = Grant(owner, token, cools, self.now)
            reference.highest = token
        grant = reference.grant
        assert grant is not None
        assert token == grant.token
        grant.holds += 1
        grant.extend(self.now, length)
        return Part(lease, row, grant)

    def leave(self, part: Part) -> None:
        """Note that one of a current grant's holds was given back."""
        part.grant.holds -= 1
        if not part.grant.holds:
            self.rows[part.row].free(part.grant.since + part.grant.cools)

    @rule(key=KEYS, owner=WHO, lease=LEASES, cools=COOLING)
    def acquire(self, key: str, owner: str | None, lease: int, cools: int) -> None:
        terms = {"owner": owner, "lease": lease, "hold_at_least": cools}
        found = self.lock(key, **terms, renew=False).try_acquire()
        reference = self.rows[key]
        if reference.taken(self.now) and not reference.owned(owner, self.now):
            assert found is None
            return
        assert found is not None
        part = self.enter(key, found, (owner, lease, cools))
        self.proofs.append(Proof(found, [part]))

    @rule(keys=SETS, owner=WHO, lease=LEASES, cools=COOLING)
    def acquire_several(
        self, keys: list[str], owner: str | None, lease: int, cools: int
    ) -> None:
        terms = {"owner": owner, "lease": lease, "hold_at_least": cools}
        one_by_one = self.are_asked_for_one_by_one(keys, owner)
        found = self.lock(*keys, **terms, renew=False).try_acquire()
        had: list[Reference] = []
        for row in sorted(set(keys)):
            reference = self.rows[row]
            if reference.owned(owner, self.now):
                had.append(reference)
            elif reference.taken(self.now):
                assert found is None
                if one_by_one:
                    self.give_back(had, sorted(set(keys)), owner, lease, cools)
                return
        assert found is not None
        several = found if isinstance(found, Leases) else {found.key: found}
        assert list(several) == [self.prefix + row for row in sorted(set(keys))]
        parts = [
            self.enter(row, several[self.prefix + row], (owner, lease, cools))
            for row in sorted(set(keys))
        ]
        self.proofs.append(Proof(found, parts))

    def are_asked_for_one_by_one(self, keys: list[str], owner: str | None) -> bool:
        """On SQLite, only for whoever has some of the keys, or believes so still."""
        if backends[self.alias].system != "sqlite":
            return True
        parts = [part for proof in self.proofs for part in proof.parts]
        mine = (part for part in parts if part.grant.owner == owner)
        return any(part.row in keys and part.lease.held for part in mine)

    def give_back(
        self,
        had: list[Reference],
        rows: list[str],
        owner: str | None,
        lease: int,
        cools: int,
    ) -> None:
        """Note what remains of a set that did not become complete."""
        for row in rows:
            reference = self.rows[row]
            if reference in had and reference.grant is not None:
                # To enter again is to renew.
                reference.grant.extend(self.now, lease)
            elif reference.taken(self.now):
                return
            elif owner is not None:
                # Others of this owner may have used it.
                reference.free(self.now + cools)

    @rule(owner=WHO, permits=PERMITS, lease=LEASES, cools=COOLING)
    def acquire_permit(
        self, owner: str | None, permits: int, lease: int, cools: int
    ) -> None:
        terms = {"owner": owner, "lease": lease, "hold_at_least": cools}
        lock = self.lock(POOL, permits=permits, renew=False, **terms)
        found = lock.try_acquire()
        rows = {row: self.rows[row] for row in row_keys(POOL, permits)}
        mine = [row for row in rows if rows[row].owned(owner, self.now)]
        free = [row for row in rows if not rows[row].taken(self.now)]
        if not mine and not free:
            assert found is None
            return
        assert found is not None
        row = row_key(POOL, found.permit)
        assert row in (mine or free)
        part = self.enter(row, found, (owner, lease, cools))
        self.proofs.append(Proof(found, [part]))

    @precondition(lambda self: self.proofs)
    @rule(data=st.data(), lease=LEASES)
    def renew(self, data: st.DataObject, lease: int) -> None:
        proof = self.one(data)
        # What is known to be lost isn't asked for, nor is the rest of it.
        asked = proof.taken.held
        if self.is_good(proof):
            assert asked
            proof.taken.renew(lease)
        else:
            with pytest.raises(LeaseLost):
                proof.taken.renew(lease)
        for part in proof.parts:
            if asked and self.is_current(part):
                part.grant.extend(self.now, lease)

    @precondition(lambda self: self.proofs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        proof = self.one(data)
        good, was_open = self.is_good(proof), proof.open
        proof.open = False
        assert proof.taken.release() is good
        for part in proof.parts:
            # Those that were not lost are given back.
            if was_open and self.is_current(part):
                self.leave(part)

    @precondition(lambda self: self.proofs and backends[self.alias].has_guard)
    @rule(data=st.data())
    def guard(self, data: st.DataObject) -> None:
        proof = self.one(data)
        # It asks the rows, not the clock: overdue and not taken over passes.
        passes = proof.open and all(
            self.rows[part.row].grant is part.grant for part in proof.parts
        )
        with suppress(LeaseLost), transaction.atomic():
            proof.taken.guard()
            assert passes
            return
        assert not passes

    @rule(row=st.sampled_from(ROWS))
    def force_release(self, row: str) -> None:
        reference, force = self.rows[row], backends[self.alias].force_release
        key, permit = apart(self.prefix + row)
        there = reference.grant is not None or reference.taken(self.now)
        assert force(key, permit=permit) is there
        if there:
            reference.free(self.now)
            reference.highest += 1

    @rule()
    def clear(self) -> None:
        clear_locks(self.alias)
        for reference in self.rows.values():
            if reference.grant is not None or reference.taken(self.now):
                reference.free(self.now)
                reference.highest += 1
        assert not self.lock("a", "A", "b").locked()
        assert not self.lock(POOL, permits=3).locked()

    @precondition(lambda self: backends[self.alias].has_guard)
    @rule()
    def prune(self) -> None:
        locks.filter(key__startswith=self.prefix).prune(older_than=0)
        for reference in self.rows.values():
            if not reference.taken(self.now):
                reference.free(0.0)

    @rule(seconds=MOVES)
    def time_passes(self, seconds: int) -> None:
        move_clock(seconds, backend=self.alias)
        self.now += seconds

    @precondition(lambda self: hasattr(self, "rows"))
    @invariant()
    def locks_agree(self) -> None:
        taken = {row: reference.taken(self.now) for row, reference in self.rows.items()}
        for key in ("a", "A", "b"):
            assert self.lock(key).locked() is taken[key]
        assert self.lock("a", "b").locked() is (taken["a"] or taken["b"])
        for number in (2, 3):
            all_taken = all(taken[row] for row in row_keys(POOL, number))
            assert self.lock(POOL, permits=number).locked() is all_taken

    @precondition(lambda self: hasattr(self, "rows"))
    @invariant()
    def leases_agree(self) -> None:
        for proof in self.proofs:
            for part in proof.parts:
                held, grant = part.lease.held, part.grant
                if not proof.open or grant.known_until <= self.now:
                    assert not held
                elif self.is_current(part):
                    assert held
                # Forced, it may not know it yet; but what was lost never comes back.
                assert not (held and grant.lost)
                grant.lost = grant.lost or (proof.open and not held)
            assert proof.taken.held is all(part.lease.held for part in proof.parts)


@pytest.fixture
def forgotten(backend: str) -> None:
    """Delete what other tests have locked: Redis keeps it for a day, to list it all."""
    for server in getattr(backends[backend], "_servers", ()):
        names = server.client.send("KEYS", f"{server._prefix}*")
        for name in names:
            server.client.send("DEL", name.decode())
        assert not list(server.entries())


@pytest.mark.needs("has_own_leases", "has_cooling", "has_movable_clock")
def test_locks_follow_the_model(backend: str, forgotten: None) -> None:
    """Every sequence of verbs on locks and leases does what the contract says."""
    machine = type("Locks", (Locks,), {"alias": backend})
    run_state_machine_as_test(machine, settings=MANY)
