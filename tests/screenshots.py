"""Pictures for the documentation: ``python -m tests.screenshots``.

Written to ``docs/images``, or to the folder that is named, in both themes and for a
wide and a narrow window.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import django

FOLDER = "docs/images"


@contextmanager
def database() -> Iterator[None]:
    """Set Django up with a scratch database."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DATABASE_URL"] = f"sqlite:///{folder}/pictures.sqlite3"
        os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
        django.setup()

        from django.db import connections
        from django.test.utils import (
            setup_databases,
            setup_test_environment,
            teardown_databases,
        )

        setup_test_environment()
        databases = setup_databases(verbosity=0, interactive=False)
        yield
        connections.close_all()
        teardown_databases(databases, verbosity=0)


def make_rows() -> str:
    """Fill the table with locks in every state; return the name of a superuser."""
    from django.contrib.auth.models import User

    from dblocks.models import DistributedLock
    from tests.support.factories import LockFactory, now

    LockFactory(
        key="import:catalogue",
        held=True,
        holder="worker-3 pid 4711 MainThread",
        note="nightly import of the catalogue",
        acquired_at=now(-2 * 3600 - 600),
        expires_at=now(118),
        version=128,
    )
    LockFactory(
        key="order:20841",
        held=True,
        holder="web-1 pid 977 Thread-12",
        acquired_at=now(-2),
        expires_at=now(88),
        version=2,
    )
    LockFactory(
        key="invoice:2026-11",
        expired=True,
        holder="worker-1 pid 31337 MainThread",
        note="killed by the machine’s owner?",
        acquired_at=now(-900),
        expires_at=now(-870),
        version=7,
    )
    LockFactory(
        key="cron:newsletter",
        cooling=True,
        holder="worker-2 pid 512 MainThread",
        acquired_at=now(-40),
        expires_at=now(80),
        version=365,
    )
    LockFactory(key="stock:tokyo:7", held=True, holder="web-2 pid 88 Task-4")
    LockFactory(key="order:20840", holder="web-1 pid 977 Thread-9")
    LockFactory(key="order:20839")
    assert DistributedLock.objects.count() == 7
    return User.objects.create_superuser("operator", password="operator").username


def main() -> None:
    with database():
        from pytest_django.live_server_helper import LiveServer

        from tests.support.browser import NARROW, WIDE, launch

        user = make_rows()
        folder = Path(sys.argv[1] if sys.argv[1:] else FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        server = LiveServer("127.0.0.1")
        with launch() as browser:
            for theme in ("light", "dark"):
                for width, viewport in (("", WIDE), ("-narrow", NARROW)):
                    window = browser.window(
                        server.url, color_scheme=theme, viewport=viewport
                    )
                    window.log_in(user, user, "/admin/dblocks/distributedlock/")
                    pictures = {
                        "list": "",
                        "lock": "import_3Acatalogue/change/",
                        "release": "force-release/?key=import:catalogue",
                    }
                    for name, path in pictures.items():
                        window.open(f"/admin/dblocks/distributedlock/{path}")
                        target = folder / f"admin-{name}{width}-{theme}.png"
                        window.screenshot(path=target)
                        print(target)
                    window.close()
        server.stop()


if __name__ == "__main__":
    main()
