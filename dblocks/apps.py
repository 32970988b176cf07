from __future__ import annotations

from typing import Any

from django.apps import AppConfig, apps
from django.db import connections
from django.db.models.signals import post_migrate
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
        post_migrate.connect(make_floor, sender=self)


def make_floor(*, using: str, **kwargs: object) -> None:
    """Insert the floor's row where ``flush`` has deleted it or no migration made it.

    Otherwise the first new key inserts it: in a ``TestCase``, inside the test's
    transaction, for whose end the new keys of other threads would wait.
    """
    floor: Any = apps.get_model("dblocks", "TokenFloor")
    if floor._meta.db_table in connections[using].introspection.table_names():
        floor.objects.using(using).get_or_create(pk=1)
