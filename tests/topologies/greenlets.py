"""A worker of greenlets: waits for a key, and notes for how long all of it stood still.

``python -m tests.topologies.greenlets KEY``, on the database of the environment.
"""

# ruff: noqa: E402
from __future__ import annotations

from gevent import monkey

monkey.patch_all()

import json
import os
import sys
import time

import django
import gevent

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
django.setup()

from dblocks import distributed_lock


def main() -> None:
    key = sys.argv[1]
    longest = 0.0

    def tick() -> None:
        nonlocal longest
        while True:
            before = time.monotonic()
            gevent.sleep(0.01)
            longest = max(longest, time.monotonic() - before)

    with distributed_lock(f"{key}:own", lease=2) as own:
        print("ready", flush=True)
        ticks = gevent.spawn(tick)
        gevent.sleep(0.1)
        with distributed_lock(key, timeout=15):
            gevent.sleep(0.1)
        ticks.kill()
        print(json.dumps({"longest": longest, "held": own.held}), flush=True)


main()
