"""Guarded data: what a lock protects in the tests."""

from __future__ import annotations

from django.db import models

from dblocks import FencedModel


class Account(FencedModel):
    """A balance that only the holder of a lock may change."""

    name = models.CharField(max_length=50)
    balance = models.IntegerField(default=0)

    def __str__(self) -> str:
        return self.name


class Deposit(Account):
    """An account with a table of its own for what it has besides."""

    days = models.IntegerField(default=0)


class Entry(FencedModel):
    """A row whose primary key has two columns."""

    pk = models.CompositePrimaryKey("book", "number")
    book = models.IntegerField()
    number = models.IntegerField()
    amount = models.IntegerField(default=0)
