"""Messages of system checks, which all point at their section in the docs."""

from __future__ import annotations

from django.core import checks


def error(check: str, message: str, hint: str) -> checks.Error:
    return checks.Error(message, hint=_hint(hint, check), id=f"dblocks.{check}")


def warning(check: str, message: str, hint: str) -> checks.Warning:
    return checks.Warning(message, hint=_hint(hint, check), id=f"dblocks.{check}")


def _hint(text: str, check: str) -> str:
    return f"{text} (docs/checks.md#dblocks{check.lower()})"
