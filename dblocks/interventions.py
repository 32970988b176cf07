"""What operators and programs did to grants over their holders' heads."""

from __future__ import annotations

from django.db import connections, models, transaction

from .backends.database import table
from .backends.database.expressions import UtcNow
from .backends.database.fields import ExactCharField, UTCDateTimeField


class Intervention(models.Model):
    """A forced release: of which grant, by whom, when and why.

    Written in the transaction that ends the grant, so there is one for each release,
    and none for a release that didn't happen. The admin's own ``LogEntry`` couldn't do
    that: it needs a user, which commands and programs may not have and which not every
    project's model lets a library make up, and it may be kept in another database.

    Attributes:
        key: The row's key; see :attr:`DistributedLock.key`.
        holder, version: Who had the grant, and its fencing token.
        by: Who ended it, for people: a user's name, or what a program says.
        reason: Why, as free text.
        at: When, by the database's clock.
    """

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


def end_grant(
    using: str, key: str, *, holder: str, version: int, by: object, reason: str
) -> bool:
    """End a grant over its holder's head and record it; tell whether it was current."""
    with transaction.atomic(using=using):
        ended = table.force_release(connections[using], key, version)
        if ended:
            record(using, key, holder=holder, version=version, by=by, reason=reason)
    return ended


def record(
    using: str, key: str, *, holder: str, version: int, by: object, reason: str
) -> None:
    """Record what is being done in the current transaction of a database."""
    Intervention(
        key=key,
        holder=holder,
        version=version,
        by="" if by is None else str(by)[:255],
        reason=reason,
        at=UtcNow(),
    ).save(using=using, force_insert=True)
