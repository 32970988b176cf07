from __future__ import annotations

from django.apps import AppConfig

from . import telemetry


class ShopConfig(AppConfig):
    name = "testproject.shop"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        telemetry.report()
