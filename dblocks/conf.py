"""The setting ``DBLOCKS``: backends by alias, in the manner of ``CACHES``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from inspect import isabstract
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver
from django.utils.module_loading import import_string

from .backends.base import BaseBackend

DEFAULT_ALIAS = "default"
DEFAULTS: dict[str, Any] = {
    "BACKEND": "dblocks.backends.database.DatabaseBackend",
    "LEASE": 30,
    "TIMEOUT": 3,
    "OPTIONS": {},
}


def telemetry_keys() -> tuple[str, ...]:
    """``DBLOCKS_TELEMETRY_KEYS``: shell patterns of the keys that telemetry may name.

    Raises:
        ImproperlyConfigured: It is not ``True``, ``False`` or a list of patterns.
    """
    given = getattr(settings, "DBLOCKS_TELEMETRY_KEYS", False)
    if isinstance(given, bool):
        return ("*",) if given else ()
    is_list = isinstance(given, list | tuple | set | frozenset)
    if not is_list or not all(isinstance(pattern, str) for pattern in given):
        raise ImproperlyConfigured(
            f"DBLOCKS_TELEMETRY_KEYS must be True, False or a list of patterns such "
            f"as 'nightly-*', not {given!r}."
        )
    return tuple(given)


def _engine(alias: str, path: object) -> type[BaseBackend]:
    """Import the engine of an alias."""
    try:
        if not isinstance(path, str) or path.startswith("."):
            raise ImportError("write its dotted path, as a str")
        kind = import_string(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImproperlyConfigured(
            f"DBLOCKS[{alias!r}]: could not import the backend {path!r}: {error}"
        ) from error
    is_one = isinstance(kind, type) and issubclass(kind, BaseBackend)
    if not is_one or isabstract(kind):
        raise ImproperlyConfigured(
            f"DBLOCKS[{alias!r}]: {path!r} is not a lock backend."
        )
    engine: type[BaseBackend] = kind
    return engine


class Backends:
    """The backends of the process, one object for each alias, made when first used."""

    def __init__(self) -> None:
        self.forget()

    def load(self) -> None:
        """Import the engines that the settings name, as far as that is possible.

        Otherwise a signal handler or a fork could interrupt the import at an engine's
        first use. A system check reports what is wrong, and so does the first use.
        """
        with suppress(ImproperlyConfigured):
            for alias, config in self.settings.items():
                with suppress(ImproperlyConfigured):
                    _engine(alias, config["BACKEND"])

    def forget(self) -> None:
        """Make all backends anew at their next use."""
        self._made: dict[str, BaseBackend] = {}

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The setting, with the defaults filled in."""
        given = getattr(settings, "DBLOCKS", None)
        if given is None:
            given = {}
        if not isinstance(given, Mapping):
            raise ImproperlyConfigured(f"DBLOCKS must be a dict, not {given!r}.")
        merged = {DEFAULT_ALIAS: DEFAULTS}
        for alias, config in given.items():
            is_alias = isinstance(alias, str) and alias not in DEFAULTS
            if not is_alias or not isinstance(config, Mapping):
                entry = {alias: config} if alias in DEFAULTS else {"LEASE": 30}
                raise ImproperlyConfigured(
                    f"DBLOCKS maps aliases to dicts, and has {alias!r}: {config!r}. "
                    f"Write DBLOCKS = {{{DEFAULT_ALIAS!r}: {entry!r}}}."
                )
            merged[alias] = {**DEFAULTS, **config}
            options = merged[alias]["OPTIONS"]
            if not isinstance(options, Mapping):
                raise ImproperlyConfigured(
                    f"DBLOCKS[{alias!r}]['OPTIONS'] must be a dict, not {options!r}."
                )
        return merged

    def check(self, alias: str) -> None:
        """Raise if the settings lack an alias.

        Pass if there are no settings yet, or if they are wrong altogether: a system
        check reports that.
        """
        if not settings.configured:
            return
        given = getattr(settings, "DBLOCKS", None) or {}
        if isinstance(given, Mapping) and alias not in {DEFAULT_ALIAS, *given}:
            self._config(alias)

    def __getitem__(self, alias: str) -> BaseBackend:
        made = self._made
        # If several threads make the backend at the same time, all get the first one.
        return made.get(alias) or made.setdefault(alias, self._make(alias))

    def _make(self, alias: str) -> BaseBackend:
        config = self._config(alias)
        kind = _engine(alias, config["BACKEND"])
        if kind.has_table and apps.ready and not apps.is_installed(__package__):
            raise ImproperlyConfigured(
                "The project has no lock table: add 'dblocks' to INSTALLED_APPS, and "
                "run manage.py migrate."
            )
        return kind(alias, config)

    def _config(self, alias: str) -> dict[str, Any]:
        configured = self.settings
        if alias not in configured:
            raise ImproperlyConfigured(
                f"The setting DBLOCKS has no backend {alias!r}; it has: "
                f"{', '.join(sorted(configured))}."
            )
        return configured[alias]


backends = Backends()


@receiver(setting_changed)
def _setting_changed(*, setting: str, **kwargs: object) -> None:
    if setting in {"DBLOCKS", "DATABASES", "DATABASE_ROUTERS"}:
        backends.forget()
