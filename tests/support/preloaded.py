"""What a process has loaded from which others are forked: Django and dblocks."""

from __future__ import annotations

import gc
from importlib import import_module

import django

django.setup()
for name in ("run_locked", "locks"):
    # Else each child would do it.
    import_module(f"dblocks.management.commands.{name}")
# A child that looks at all this for garbage, as it does at its end, makes a copy of it.
gc.collect()
gc.freeze()
