"""Measurements of dblocks beside its peers: ``python -m benchmarks``."""

from __future__ import annotations
