"""What the shop sells, and who bought it."""

from __future__ import annotations

from django.db import models
from django.db.models import Sum
from django.db.models.functions import Coalesce

from dblocks import FencedModel


class Product(models.Model):
    """Something of which there are only so many pieces.

    Nothing keeps ``stock`` from falling below zero, so that it is seen when it does. A
    real shop has a ``CheckConstraint`` as well: the last line of defence.
    """

    name = models.CharField(max_length=100)
    stock = models.IntegerField()
    #: Counted up by those who sell by optimistic updates.
    version = models.PositiveIntegerField(default=0)

    def __str__(self) -> str:
        return self.name

    def sold(self) -> int:
        """Return how many pieces have been ordered, whatever ``stock`` says."""
        total: int = self.items.aggregate(total=Coalesce(Sum("quantity"), 0))["total"]
        return total


class Order(models.Model):
    """What one customer buys at once."""

    class State(models.TextChoices):
        PLACED = "placed"
        PAID = "paid"

    customer = models.CharField(max_length=100)
    state = models.CharField(max_length=10, choices=State.choices, default=State.PLACED)
    placed_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return f"{self.pk}, {self.customer}"


class OrderItem(models.Model):
    """Some pieces of one product in an order."""

    order = models.ForeignKey(Order, models.CASCADE, related_name="items")
    product = models.ForeignKey(Product, models.PROTECT, related_name="items")
    quantity = models.PositiveIntegerField(default=1)

    def __str__(self) -> str:
        return f"{self.quantity} × {self.product}"


class Recommendation(FencedModel):
    """What the leader recommends: one row, whose ``fencing_token`` is its term."""

    product = models.CharField(max_length=100, blank=True)
    chosen_by = models.CharField(max_length=255)
    chosen_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return self.product
