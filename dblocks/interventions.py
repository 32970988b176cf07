"""What operators and programs did about other people's grants, on record."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from django.db import DatabaseError, connections, models, transaction

from .backends.database import dialects, table
from .backends.database.expressions import UtcNow
from .backends.database.fields import ExactCharField, UTCDateTimeField
from .backends.values import Grant

PATIENCE = 1.0
"""Seconds for which a transaction is begun anew that the database has undone."""


class Intervention(models.Model):
    """A forced release, or a request to the holder: of which grant, by whom and why.

    Written in the transaction that ends the grant or notes the request, so there is
    one for each, and none for what didn't happen. The admin's own ``LogEntry`` couldn't
    do that: it needs a user, which commands and programs may not have and which not
    every project's model lets a library make up, and it may be kept in another
    database.

    Attributes:
        kind: What was done, see :class:`Kind`.
        key: The row's key; see :attr:`DistributedLock.key`.
        holder, version: Who had the grant, and its fencing token.
        by: Who did it, for people: a user's name, or what a program says.
        reason: Why, as free text.
        at: When, by the database's clock.
    """

    class Kind(models.TextChoices):
        """What was done: the grant was ended, or its holder asked to finish."""

        FORCE_RELEASE = "force_release"
        REQUEST = "request"

    kind = models.CharField(max_length=20, choices=Kind.choices)
    key = ExactCharField(max_length=255)
    holder = ExactCharField(max_length=255, blank=True)
    version = models.BigIntegerField()
    by = ExactCharField(max_length=255, blank=True)
    reason = models.TextField(blank=True)
    at = UTCDateTimeField()

    class Meta:
        default_permissions = ()
        indexes = [models.Index(fields=["key"], name="dblocks_intervention_key")]

    def __str__(self) -> str:
        return f"{self.key}, {self.version}"


def end_grant(using: str, grant: Grant, **how: Any) -> bool:
    """End a grant over its holder's head and record it; tell whether it was current.

    Args:
        how: Also who had it, and the rest of an :class:`Intervention`.
    """
    return _done(
        table.force_release, Intervention.Kind.FORCE_RELEASE, using, grant, how
    )


def ask_holder(using: str, grant: Grant, **how: Any) -> bool:
    """Ask the holder of a grant to finish and record it; tell whether it is held."""
    return _done(table.request_release, Intervention.Kind.REQUEST, using, grant, how)


def _done(
    act: Callable[..., bool], kind: str, using: str, grant: Grant, how: dict[str, Any]
) -> bool:
    """Act and record it in one transaction, begun anew if the database asks for it."""
    connection, give_up = connections[using], time.monotonic() + PATIENCE
    while True:
        try:
            with transaction.atomic(using=using):
                done = act(connection, grant)
                if done:
                    record(kind, using, grant, **how)
            return done
        except DatabaseError as error:
            over = connection.in_atomic_block or time.monotonic() >= give_up
            if over or not dialects.of(connection).is_transient(error):
                raise
            time.sleep(random.uniform(0.005, 0.03))


def record(
    kind: str, using: str, grant: Grant, *, holder: str, by: object, reason: str
) -> None:
    """Record what is being done in the current transaction of a database."""
    version: Any = grant.version  # a row's is never None
    Intervention(
        kind=kind,
        key=grant.key,
        holder=holder,
        version=version,
        by="" if by is None else str(by)[:255],
        reason=reason,
        at=UtcNow(),
    ).save(using=using, force_insert=True)
