from __future__ import annotations

from django.urls import path, register_converter

from . import views


class Number:
    """A primary key; longer numbers are no row's, and would make keys too long."""

    regex = "[0-9]{1,18}"

    def to_python(self, value: str) -> int:
        return int(value)

    def to_url(self, value: int) -> str:
        return str(value)


register_converter(Number, "number")

app_name = "shop"

urlpatterns = [
    path("", views.catalogue, name="catalogue"),
    path("product/<number:pk>/", views.product, name="product"),
    path("product/<number:pk>/buy/", views.checkout, name="checkout"),
    path("product/<number:pk>/buy/<slug:way>/", views.compare, name="compare"),
    path("product/<number:pk>/restock/", views.restock, name="restock"),
    path("cart/", views.cart, name="cart"),
    path("cart/reserve/", views.reserve, name="reserve"),
    path("order/<number:pk>/", views.order, name="order"),
    path("order/<number:pk>/pay/", views.pay, name="pay"),
    path("exports/", views.exports, name="exports"),
    path("exports/orders.csv", views.export, name="export"),
    path("leader/", views.leader, name="leader"),
    path("leader/hand-over/", views.hand_over, name="hand-over"),
    path("locks/", views.locks, name="locks"),
]
