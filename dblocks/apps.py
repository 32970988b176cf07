from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class DblocksConfig(AppConfig):
    name = "dblocks"
    verbose_name = _("Distributed locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from . import checks, transactions

        checks.register()
        transactions.watch_transactions()
