from __future__ import annotations

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _

from . import checks  # noqa: F401 (which registers them)
from .backends.database import transactions
from .conf import backends


class DblocksConfig(AppConfig):
    name = "dblocks"
    verbose_name = _("Distributed locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        backends.load()
        transactions.watch()
