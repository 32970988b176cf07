"""Locks in a table of the database that the project already runs."""

from __future__ import annotations

from .backend import DatabaseBackend

__all__ = ["DatabaseBackend"]
