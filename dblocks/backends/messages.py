"""Messages of system checks, which all point at where more is said."""

from __future__ import annotations

from django.core import checks


def error(check: str, message: str, hint: str) -> checks.Error:
    return checks.Error(message, hint=_hint(hint), id=f"dblocks.{check}")


def warning(check: str, message: str, hint: str) -> checks.Warning:
    return checks.Warning(message, hint=_hint(hint), id=f"dblocks.{check}")


def _hint(text: str) -> str:
    # Whoever has installed the package has its docstrings, and not its documentation.
    return f'{text} ("python -m pydoc dblocks.checks" says more.)'
