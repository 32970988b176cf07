"""Data that the project's router reads from a replica, in a guarded block."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dblocks import distributed_lock
from tests.testapp.models import Account


class SplitReads:
    """Reads from the replica what isn't told otherwise."""

    def db_for_read(self, model: type, **hints: Any) -> str:
        return "replica"

    def db_for_write(self, model: type, **hints: Any) -> str:
        return "default"


@pytest.fixture(autouse=True)
def _split(postgres: int, another: Callable[..., str], settings: Any) -> Iterator[None]:
    another("replica")
    settings.DATABASE_ROUTERS = [SplitReads()]
    settings.DEBUG = True
    yield
    settings.DATABASE_ROUTERS = []


def create_and_look(key: str) -> None:
    with distributed_lock(key, atomic=True):
        Account.objects.create(name=key, balance=1)
        assert not Account.objects.filter(name=key).exists()


def test_warns_of_the_replica(key: str) -> None:
    """In debug mode, at the line of the block, and after its commit."""
    with pytest.warns(RuntimeWarning, match="from the replica 'replica'") as caught:
        create_and_look(key)
    assert caught[0].filename == __file__
    assert Account.objects.using("default").get(name=key).balance == 1


@pytest.mark.parametrize("debug", [True, False])
def test_silent(key: str, settings: Any, debug: bool) -> None:
    """Without debug mode, or where the block reads from the primary."""
    settings.DEBUG = debug
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with distributed_lock(key, atomic=True):
            assert not Account.objects.using("default").filter(name=key).exists()
            if not debug:
                assert not Account.objects.filter(name=key).exists()
        assert not Account.objects.filter(name=key).exists()
