from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from . import checks  # noqa: F401 (which registers them)

# Loaded before the first lock, which a signal handler or a fork may interrupt.
from .backends.database import backend, transactions  # noqa: F401


class DblocksConfig(AppConfig):
    name = "dblocks"
    verbose_name = _("Distributed locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        transactions.watch()
