"""Rows in any state, made by hand: only tests may write the table past its manager."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from typing import Any

import factory
from django.db import OperationalError
from django.db.models import QuerySet

from dblocks.models import DistributedLock
from tests.testapp.models import Account


def now(seconds: float = 0) -> datetime:
    """Return the moment that many seconds from now, in UTC."""
    return datetime.now(timezone.utc) + timedelta(seconds=seconds)


class LockFactory(factory.django.DjangoModelFactory):
    """A row of the lock table; free unless a trait says otherwise."""

    class Meta:
        model = DistributedLock

    class Params:
        #: How long ago the row came into its state.
        age = 3600.0
        free = factory.Trait()
        held = factory.Trait(
            owner=factory.Sequence("owner-{}".format),
            holder="host:1:MainThread",
            hold_count=1,
            expires_at=factory.LazyFunction(lambda: now(+3600)),
        )
        expired = factory.Trait(
            owner=factory.Sequence("owner-{}".format),
            holder="host:1:MainThread",
            hold_count=1,
        )
        cooling = factory.Trait(expires_at=factory.LazyFunction(lambda: now(+3600)))

    key = factory.Sequence("row:{}".format)
    owner = ""
    holder = ""
    note = ""
    hold_count = 0
    version = 1
    acquired_at = factory.LazyAttribute(lambda row: now(-row.age - 60))
    expires_at = factory.LazyAttribute(lambda row: now(-row.age))

    @classmethod
    def _create(cls, model_class: Any, *args: Any, **kwargs: Any) -> DistributedLock:
        row: DistributedLock = model_class(**kwargs)
        QuerySet(model_class).bulk_create([row])
        return row

    @classmethod
    def bulk(cls, size: int, **kwargs: Any) -> list[DistributedLock]:
        """Make many rows in a few statements."""
        rows = cls.build_batch(size, **kwargs)
        return QuerySet(DistributedLock).bulk_create(rows, batch_size=500)


class AccountFactory(factory.django.DjangoModelFactory):
    """Data that a lock guards."""

    class Meta:
        model = Account

    name = factory.Sequence("account {}".format)
    balance = 0


def stored(key: str) -> DistributedLock:
    """Return the row as it stands in the table.

    A SQLite database in memory refuses to read a table that another thread writes.
    """
    patience = time.monotonic() + 5
    while True:
        try:
            return DistributedLock.objects.get(pk=key)
        except OperationalError as error:
            if "table is locked" not in str(error) or time.monotonic() > patience:
                raise
            time.sleep(0.005)


def let_expire(key: str) -> None:
    """Put the row's end into the past, as if the lease had run out a minute ago."""
    QuerySet(DistributedLock).filter(pk=key).update(expires_at=now(-60))
