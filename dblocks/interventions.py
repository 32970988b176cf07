"""What operators and programs did about other people's grants, on record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from .backends.database import table
from .backends.database.connections import run_in_transaction
from .backends.database.expressions import UtcNow
from .backends.database.fields import ExactCharField, UTCDateTimeField
from .backends.values import Grant


class Intervention(models.Model):
    """A forced release, or a request to the holder: of which grant, by whom and why.

    Written in the transaction that ends the grant or notes the request, so there is one
    for each, and none for anything that didn't happen. The admin's ``LogEntry`` can't
    do that: it needs a user, which commands and programs may lack and a library can't
    make up for every project's model, and it may be in another database.

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
    """End a grant without its holder and record it; tell whether it was current.

    Args:
        how: Who had it (``holder``), ``by`` and ``reason``: see :class:`Intervention`.
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
    """Act, and record it in the same transaction."""

    def act_and_record(connection: Connection) -> bool:
        done = act(connection, grant)
        if done:
            record(kind, using, grant, **how)
        return done

    return run_in_transaction(using, act_and_record)


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
