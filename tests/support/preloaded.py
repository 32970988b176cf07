"""What the process from which workers are forked has loaded: Django and dblocks."""

from __future__ import annotations

import django

django.setup()
