from __future__ import annotations

from django.contrib import admin

from .models import Order, OrderItem, Product


@admin.register(Product)
class ProductAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ["name", "stock"]
    search_fields = ["name"]
    readonly_fields = ["version"]


class OrderItemInline(admin.TabularInline):  # type: ignore[type-arg]
    model = OrderItem
    extra = 0
    autocomplete_fields = ["product"]


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    list_display = ["id", "customer", "state", "placed_at"]
    list_filter = ["state"]
    search_fields = ["customer"]
    inlines = [OrderItemInline]
