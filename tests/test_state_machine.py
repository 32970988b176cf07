"""The table against a small model: any sequence of verbs, several owners and keys."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
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

from dblocks.models import DistributedLock
from tests.factories import let_expire

locks = DistributedLock.objects
RUNS = itertools.count()
OWNERS = st.sampled_from(["ann", "Ann", "bob "])
KEYS = st.sampled_from(["a", "A"])
DRIFT = st.sampled_from([0, 0, 0, -1, +1])


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
    run_state_machine_as_test(
        Table,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
