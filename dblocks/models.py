"""The lock table as Django knows it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from django.db import models, router
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext_lazy as _

from .backends.database import deletion
from .backends.database.fields import ExactCharField, GuardConstraint, UTCDateTimeField
from .managers import LockManager, LockQuerySet, State
from .permits import apart
from .texts import visible

__all__ = ["DistributedLock", "LockManager", "LockQuerySet", "State", "TokenFloor"]


class DistributedLock(models.Model):
    """A named lock: who has it, until when, and with which version.

    Attributes:
        key: What is locked, the primary key, compared exactly. The row of a permit has
            U+001F and the permit's number after it.
        owner: The owner's id; empty when nobody has the lock.
        holder: Host, process and thread or task, for people; kept after a release.
        note: The holder's note; kept after a release.
        hold_count: How many acquisitions are outstanding.
        version: The latest fencing token. It never falls; a force release adds one.
        acquired_at: When it was granted, in UTC; ``None`` after a force release.
        expires_at: When the key is free by itself, in UTC, by the database's clock.
        min_until: The end of ``hold_at_least``, in UTC: after a release the key stays
            taken until then. ``None`` without.
        max_until: The end of ``max_hold``, in UTC: no renewal moves ``expires_at``
            beyond it. ``None`` without.
        release_requested_at: When the holder was first asked to finish, in UTC;
            ``None`` if it has not been asked.
        state: Annotated by :meth:`LockQuerySet.with_state`.
        remaining: Seconds until ``expires_at``, annotated likewise.
    """

    key = ExactCharField(_("key"), max_length=255, primary_key=True)
    owner = ExactCharField(_("owner"), max_length=64, blank=True, default="")
    holder = ExactCharField(_("holder"), max_length=255, blank=True, default="")
    note = ExactCharField(_("note"), max_length=255, blank=True, default="")
    hold_count = models.IntegerField(_("hold count"), default=0)
    version = models.BigIntegerField(_("version"), default=0)
    acquired_at = UTCDateTimeField(_("held since"), null=True, blank=True)
    expires_at = UTCDateTimeField(_("expires at"))
    min_until = UTCDateTimeField(_("kept until"), null=True, blank=True)
    max_until = UTCDateTimeField(_("held no longer than"), null=True, blank=True)
    release_requested_at = UTCDateTimeField(
        _("release requested"), null=True, blank=True
    )

    objects: ClassVar[LockManager] = LockManager()

    if TYPE_CHECKING:
        state: str
        remaining: float

    class Meta:
        verbose_name = _("lock")
        verbose_name_plural = _("locks")
        default_permissions = ("view",)
        permissions = [
            ("force_release_distributedlock", gettext_noop("Can force release lock"))
        ]
        constraints = [
            GuardConstraint(fields=["key", "version"], name="dblocks_key_version"),
        ]

    def __str__(self) -> str:
        key, permit = visible(self.lock_key), self.permit
        if permit is None:
            return key
        return gettext("%(key)s, permit %(permit)d") % {"key": key, "permit": permit}

    def refresh_from_db(
        self,
        using: Any | None = None,
        fields: Any | None = None,
        from_queryset: Any | None = None,
    ) -> None:
        """As Django's, but read the row, and deferred fields, from its own database.

        A router might choose a replica, which lags behind.
        """
        if from_queryset is None:
            using = using or self._state.db
        super().refresh_from_db(using, fields, from_queryset)

    def delete(
        self, using: Any | None = None, keep_parents: bool = False
    ) -> tuple[int, dict[str, int]]:
        """As :meth:`LockQuerySet.delete`."""
        using = using or router.db_for_write(type(self), instance=self)
        row = type(self).objects.using(using).filter(pk=self.pk)
        django = partial(super().delete, using, keep_parents)
        return deletion.remove(row, lambda _: django())

    @property
    def lock_key(self) -> str:
        """The key, without the number of a permit."""
        return apart(self.key)[0]

    @property
    def permit(self) -> int | None:
        """The number of the permit, from 0; ``None`` without permits."""
        return apart(self.key)[1]


class TokenFloor(models.Model):
    """One row: no new lock's token starts at or below ``value``.

    A counter in a row starts again when the row is deleted and made anew. Pruning
    raises this floor first, and the insert of a new lock reads it under a lock.
    """

    value = models.BigIntegerField(default=0)

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.value)
