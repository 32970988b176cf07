"""Tables of the contenders that this package brings itself."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class BareLock(models.Model):
    """The least that a lock in a table needs: an owner, a token, an expiry."""

    key = models.CharField(max_length=255, primary_key=True)
    owner = models.CharField(max_length=64, default="")
    version = models.BigIntegerField(default=0)
    expires_at = models.DateTimeField()

    objects: ClassVar[models.Manager[BareLock]] = models.Manager()

    def __str__(self) -> str:
        return self.key


class FloorLock(models.Model):
    """What two narrow updates need: an owner and a version."""

    key = models.CharField(max_length=255, primary_key=True)
    owner = models.CharField(max_length=64, default="")
    version = models.BigIntegerField(default=0)

    objects: ClassVar[models.Manager[FloorLock]] = models.Manager()

    def __str__(self) -> str:
        return self.key


class RecipeLock(models.Model):
    """The lock table of the published recipe."""

    lock_key = models.CharField(max_length=128, unique=True)
    request_id = models.CharField(max_length=64, default="")
    lock_count = models.IntegerField(default=0)
    #: When the lock is overdue, in milliseconds by the client's clock.
    timeout = models.BigIntegerField(default=0)
    version = models.IntegerField(default=0)

    objects: ClassVar[models.Manager[RecipeLock]] = models.Manager()

    def __str__(self) -> str:
        return self.lock_key
