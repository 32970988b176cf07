"""An application that holds a lock when ``gunicorn --preload`` forks its workers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

from tests.faults.children import HELD, begin, look

begin()

from dblocks import distributed_lock  # noqa: E402  # Django must be set up.

KEY, LENGTH = os.environ["DBLOCKS_TEST_KEY"], float(os.environ["DBLOCKS_TEST_LEASE"])
HELD.append(distributed_lock(KEY, lease=LENGTH).acquire(timeout=0))


def application(
    environ: dict[str, Any], start_response: Callable[..., Any]
) -> list[bytes]:
    """Answer with what this process finds."""
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(look(KEY, LENGTH)).encode()]
