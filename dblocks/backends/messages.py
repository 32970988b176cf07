"""Messages of system checks, which all point at where more is said."""

from __future__ import annotations

from django.core import checks

PAGE = "https://django-dblocks.readthedocs.io/en/latest/checks.html"
"""The documentation's page about checks, which has a section for each."""


def error(check: str, message: str, hint: str) -> checks.Error:
    return checks.Error(message, hint=_hint(check, hint), id=f"dblocks.{check}")


def warning(check: str, message: str, hint: str) -> checks.Warning:
    return checks.Warning(message, hint=_hint(check, hint), id=f"dblocks.{check}")


def _hint(check: str, text: str) -> str:
    return f"{text} See {PAGE}#dblocks-{check.lower()}"
