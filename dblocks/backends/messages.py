"""Messages of system checks; each links to its section in the documentation."""

from __future__ import annotations

from django.core import checks

PAGE = "https://django-dblocks.readthedocs.io/en/latest/checks.html"
"""The page about checks in the documentation, with a section for each."""


def error(check: str, message: str, hint: str) -> checks.Error:
    return checks.Error(message, hint=_hint(check, hint), id=f"dblocks.{check}")


def warning(check: str, message: str, hint: str) -> checks.Warning:
    return checks.Warning(message, hint=_hint(check, hint), id=f"dblocks.{check}")


def _hint(check: str, text: str) -> str:
    return f"{text} See {PAGE}#dblocks-{check.lower()}"
