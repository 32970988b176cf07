"""The shop as a site: who may buy, pay and restock at the same time, and who may not.

Each view that changes something is one critical section: the lock is its decorator.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from typing import Any

from django import forms
from django.conf import settings
from django.db import transaction
from django.db.models import F
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_POST, require_safe

from dblocks import LockTimeout, current_lease, distributed_lock
from dblocks.models import DistributedLock

from . import board, carts, selling
from .board import EXPORT_LOCK, EXPORTS, export_locks, payment_lock, product_locks, seen
from .models import Order, OrderItem, Product, Recommendation

COMPARED = [selling.VARIANTS[name] for name in ("plain", "process-lock", "optimistic")]
"""Ways to sell that can be tried beside the shop's own; two of them oversell."""


class CheckoutForm(forms.Form):
    customer = forms.CharField(
        label="Your name",
        max_length=100,
        widget=forms.TextInput({"autocomplete": "name"}),
    )


class CartForm(CheckoutForm):
    articles = forms.ModelMultipleChoiceField(
        Product.objects.order_by("pk"),
        widget=forms.CheckboxSelectMultiple,
        error_messages={"required": "Put something into the cart."},
    )


class HandOverForm(forms.Form):
    term = forms.IntegerField(min_value=1, max_value=2**63 - 1)


# What is for sale


@require_safe
def catalogue(request: HttpRequest) -> HttpResponse:
    """Show all products, and which of them somebody is buying right now."""
    return render(request, "shop/catalogue.html", {"board": product_locks()})


@require_safe
def product(request: HttpRequest, pk: int) -> HttpResponse:
    """Show one product and the button that buys it."""
    return _product(request, get_object_or_404(Product, pk=pk), CheckoutForm())


def _product(
    request: HttpRequest, product: Product, form: CheckoutForm, status: int = 200
) -> HttpResponse:
    context = {
        "product": product,
        "form": form,
        "lock": seen(selling.stock_lock(product.pk)),
        "compared": COMPARED,
        "thinking": settings.SHOP_THINKING,
    }
    return render(request, "shop/product.html", context, status=status)


# Buying


@require_POST
@distributed_lock("shop:stock:{pk}", atomic=True, note="checkout")
def checkout(request: HttpRequest, pk: int) -> HttpResponse:
    """Sell one piece: look at the stock, think, write, commit, and then unlock.

    Who comes second waits for three seconds (the default), and then sees the stock as
    the first one's commit has left it, or is told that it takes longer: 423.
    """
    return _sell(request, pk, selling.plain)


@require_POST
def compare(request: HttpRequest, pk: int, way: str) -> HttpResponse:
    """Sell one piece in another way, to see it oversell or begin again."""
    for variant in COMPARED:
        if variant.name == way:
            return _sell(request, pk, variant.buy)
    raise Http404(f"There is no way {way!r} to sell.")


def _sell(
    request: HttpRequest, pk: int, way: Callable[[selling.Checkout], Order]
) -> HttpResponse:
    product = get_object_or_404(Product, pk=pk)
    form = CheckoutForm(request.POST)
    if not form.is_valid():
        return _product(request, product, form, status=400)
    customer = form.cleaned_data["customer"]
    try:
        order = way(selling.Checkout(pk, customer, thinking=settings.SHOP_THINKING))
    except selling.SoldOut:
        context = {"product": product, "customer": customer}
        return render(request, "shop/sold_out.html", context, status=409)
    return redirect("shop:order", order.pk)


# Buying several things at once


@require_safe
def cart(request: HttpRequest) -> HttpResponse:
    """Show what can be put into a cart and the button that reserves all of it."""
    return _cart(request, CartForm())


def _cart(request: HttpRequest, form: CartForm, status: int = 200) -> HttpResponse:
    context = {"form": form, "thinking": settings.SHOP_THINKING}
    return render(request, "shop/cart.html", context, status=status)


@require_POST
def reserve(request: HttpRequest) -> HttpResponse:
    """Reserve one piece of each article, or nothing.

    The locks are those of :func:`carts.reserve`: all articles' or none. When they
    stay taken, its ``LockTimeout`` leaves this view, and the middleware answers 423.
    """
    form = CartForm(request.POST)
    if not form.is_valid():
        return _cart(request, form, status=400)
    articles = [product.pk for product in form.cleaned_data["articles"]]
    thinking = settings.SHOP_THINKING / len(articles)
    cart = carts.Cart(form.cleaned_data["customer"], articles, thinking)
    try:
        order = carts.reserve(cart)
    except carts.NotInStock as error:
        context = {"customer": cart.customer, "missing": error.products}
        return render(request, "shop/not_in_stock.html", context, status=409)
    return redirect("shop:order", order.pk)


# Paying


@require_safe
def order(request: HttpRequest, pk: int) -> HttpResponse:
    """Show an order and the button that pays it."""
    order = get_object_or_404(Order.objects.prefetch_related("items__product"), pk=pk)
    context = {"order": order, "lock": seen(payment_lock(order.pk))}
    return render(request, "shop/order.html", context)


def duplicate_operation(
    request: HttpRequest, pk: int, *, at_work: bool = False
) -> HttpResponse:
    """Answer the second click of a double click."""
    context = {"order": get_object_or_404(Order, pk=pk), "at_work": at_work}
    return render(request, "shop/duplicate.html", context, status=409)


def _refuse_second_click(
    error: LockTimeout, request: HttpRequest, pk: int
) -> HttpResponse:
    return duplicate_operation(request, pk, at_work=True)


@require_POST
@distributed_lock(
    "shop:order:{pk}", timeout=0, note="payment", on_locked=_refuse_second_click
)
def pay(request: HttpRequest, pk: int) -> HttpResponse:
    """Pay an order once, however often the button is pressed.

    Two things refuse the second click. While the first is at work, that is the lock:
    nobody waits for it. After it, the lock is free again and can't know what happened
    under it; the order can, so its state is asked, under the lock.

    The payment takes time and happens elsewhere, so no transaction is open meanwhile.
    The one that writes it down ends with the guard.
    """
    order = get_object_or_404(Order, pk=pk)
    if order.state == Order.State.PAID:
        return duplicate_operation(request, pk)
    _charge(order)
    with transaction.atomic():
        order.state = Order.State.PAID
        order.save(update_fields=["state"])
        selling.refuse_if_lost(current_lease())
    return redirect("shop:order", order.pk)


def _charge(order: Order) -> None:
    """Ask for the money.

    A real one sends the order's number as the key that makes a repetition harmless:
    a process that dies after this, and before the commit, leaves an unpaid order.
    """
    time.sleep(settings.SHOP_THINKING)


# Restocking


def _no_van(error: LockTimeout, request: HttpRequest, pk: int) -> HttpResponse:
    product = get_object_or_404(Product, pk=pk)
    context = {"product": product, "retry_after": round(error.retry_after) or 1}
    return render(request, "shop/no_van.html", context, status=409)


@require_POST
@distributed_lock(
    "shop:van:{pk}", timeout=0, hold_at_least=20, note="van", on_locked=_no_van
)
@distributed_lock("shop:stock:{pk}", atomic=True, note="restocking")
def restock(request: HttpRequest, pk: int) -> HttpResponse:
    """Bring one piece, at most every 20 seconds, on however many servers.

    The stock's own lock is taken as well: a checkout that has looked already would
    write its number over this one.
    """
    get_object_or_404(Product, pk=pk)
    Product.objects.filter(pk=pk).update(stock=F("stock") + 1)
    return redirect("shop:product", pk)


# Exporting


@require_safe
def exports(request: HttpRequest) -> HttpResponse:
    """Show the exports that are at work and the button that starts one."""
    context = {"board": export_locks(), "most": EXPORTS}
    return render(request, "shop/exports.html", context)


def _too_many_exports(error: LockTimeout, request: HttpRequest) -> HttpResponse:
    retry_after = round(error.retry_after) or 1
    context = {"most": EXPORTS, "retry_after": retry_after}
    response = render(request, "shop/too_many_exports.html", context, status=409)
    response["Retry-After"] = str(retry_after)
    return response


@require_POST
@distributed_lock(
    EXPORT_LOCK, permits=EXPORTS, note="export", on_locked=_too_many_exports
)
def export(request: HttpRequest) -> HttpResponse:
    """Write all orders to a file, at most two at a time on however many servers.

    Who comes third waits for three seconds (the default) for one of the two to be done.
    """
    items = list(OrderItem.objects.select_related("order", "product").order_by("pk"))
    time.sleep(settings.SHOP_THINKING)
    headers = {"Content-Disposition": 'attachment; filename="orders.csv"'}
    response = HttpResponse(content_type="text/csv; charset=utf-8", headers=headers)
    rows = csv.writer(response)
    rows.writerow(["order", "state", "product", "quantity"])
    rows.writerows(
        [item.order_id, item.order.state, item.product_id, item.quantity]
        for item in items
    )
    return response


# Leading


@require_safe
def leader(request: HttpRequest) -> HttpResponse:
    """Show who leads, and what it has written last; with ``?watch`` again and again."""
    return _leader(request)


def _leader(
    request: HttpRequest, refused: bool = False, status: int = 200
) -> HttpResponse:
    watching = "watch" in request.GET
    context = {
        "leader": board.leader(),
        "recommendation": Recommendation.objects.filter(
            chosen_at__isnull=False
        ).first(),
        "refused": refused,
        "watching": watching,
    }
    response = render(request, "shop/leader.html", context, status=status)
    if watching:
        response["Refresh"] = "1"
    return response


@require_POST
def hand_over(request: HttpRequest) -> HttpResponse:
    """Ask the leader that the page showed, and no later one, to let others lead."""
    form = HandOverForm(request.POST)
    if not form.is_valid():
        return _leader(request, status=400)
    term = form.cleaned_data["term"]
    locks = DistributedLock.objects
    if not locks.request_release(board.LEADER_LOCK, version=term, by="the shop's site"):
        return _leader(request, refused=True, status=409)
    return redirect(f"{reverse('shop:leader')}?watch")


# Looking at locks


@require_safe
def locks(request: HttpRequest) -> HttpResponse:
    """Show what is locked; with ``?watch`` again and again."""
    watching = "watch" in request.GET
    context: dict[str, Any] = {"watching": watching, "board": product_locks(whole=True)}
    response = render(request, "shop/locks.html", context)
    if watching:
        response["Refresh"] = "1"
    return response
