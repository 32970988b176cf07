"""A small project that uses dblocks wherever Python runs.

``python -m tests.portable_project DATABASE`` migrates a file of SQLite, takes locks,
opens the admin and asks for ``run_locked``; with ``--poor`` as on a system that has
neither fork nor process groups nor /proc.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import os
import pkgutil
import select
import signal
import subprocess  # noqa: F401 - before it misses what is hidden
import sys
import threading  # noqa: F401 - the same
import time
from types import ModuleType

MODULES = ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty")
NAMES: dict[ModuleType, tuple[str, ...]] = {
    os: (
        *("ctermid", "fork", "forkpty", "register_at_fork", "sched_getaffinity"),
        *("getpgid", "getpgrp", "killpg", "setpgid", "setsid", "tcgetpgrp"),
        *("geteuid", "getuid", "uname", "wait", "waitid", "O_CLOEXEC", "WNOHANG"),
        *("fchown", "pipe2", "posix_spawn", "tcsetpgrp", "O_NOCTTY", "WIFSTOPPED"),
        *("WSTOPSIG", "WUNTRACED"),
    ),
    select: ("epoll", "poll"),
    signal: (
        *("SIGALRM", "SIGCHLD", "SIGCONT", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGQUIT"),
        *("SIGSTOP", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGUSR1", "SIGWINCH"),
        *("SIGXFSZ", "SIG_BLOCK", "SIG_SETMASK"),
        *("alarm", "pause", "pthread_sigmask", "setitimer", "sigwait"),
    ),
    time: ("clock_gettime", "CLOCK_BOOTTIME", "CLOCK_MONOTONIC"),
}

#: What cannot be imported without the package beside it.
CLIENTS = {"redis": "redis", "telemetry": "opentelemetry", "zookeeper": "kazoo"}
UNAVAILABLE = 69


def hide() -> None:
    """Take away what Windows and others lack."""

    def refuse(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]).startswith("/proc"):
            raise FileNotFoundError(arguments[0])

    sys.addaudithook(refuse)
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for module, names in NAMES.items():
        for name in names:
            vars(module).pop(name, None)


def set_up(database: str) -> None:
    import django
    from django.conf import settings

    settings.configure(
        ALLOWED_HOSTS=["testserver"],
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.sqlite3",
                "NAME": database,
                "OPTIONS": {"transaction_mode": "IMMEDIATE"},
            }
        },
        INSTALLED_APPS=[
            "django.contrib.admin",
            "django.contrib.auth",
            "django.contrib.contenttypes",
            "django.contrib.messages",
            "django.contrib.sessions",
            "dblocks",
        ],
        MIDDLEWARE=[
            "django.contrib.sessions.middleware.SessionMiddleware",
            "django.contrib.auth.middleware.AuthenticationMiddleware",
            "django.contrib.messages.middleware.MessageMiddleware",
            "dblocks.middleware.LockTimeoutMiddleware",
        ],
        ROOT_URLCONF=__name__,
        SECRET_KEY="of a test",
        STATIC_URL="static/",
        TEMPLATES=[
            {
                "APP_DIRS": True,
                "BACKEND": "django.template.backends.django.DjangoTemplates",
                "OPTIONS": {
                    "context_processors": [
                        "django.template.context_processors.request",
                        "django.contrib.auth.context_processors.auth",
                        "django.contrib.messages.context_processors.messages",
                    ]
                },
            }
        ],
    )
    django.setup()


def import_all() -> None:
    """Import all modules but those of ``run_locked``'s processes."""
    import dblocks

    left_out = {"supervision"} | {
        name
        for name, client in CLIENTS.items()
        if importlib.util.find_spec(client) is None
    }
    for module in pkgutil.walk_packages(
        dblocks.__path__, "dblocks.", lambda name: None
    ):
        if not left_out & set(module.name.split(".")):
            importlib.import_module(module.name)


def use_locks() -> None:
    from django.core.management import call_command

    from dblocks import LockTimeout, distributed_lock
    from dblocks.test import hold_elsewhere

    @distributed_lock("{name}", atomic=True)
    def locked(name: str) -> bool:
        return distributed_lock(name).locked()

    async def use() -> bool:
        async with distributed_lock("async") as lease:
            return lease.held

    assert locked("sync")
    assert asyncio.run(use())
    with distributed_lock("a", "b") as leases, hold_elsewhere("c"):
        assert leases.held
        try:
            distributed_lock("c").acquire(timeout=0.1)
        except LockTimeout as error:
            print(error)
        call_command("locks", "list")


def open_admin() -> None:
    from django.contrib.auth.models import User
    from django.test import Client

    client = Client()
    client.force_login(User.objects.create_superuser("operator"))
    page = client.get("/admin/dblocks/distributedlock/?state=all")
    assert b"async" in page.content
    page = client.get("/admin/dblocks/distributedlock/async/change/")
    assert page.status_code == 200


def ask_for_processes() -> None:
    """``run_locked`` works where it can, and else says why it can't."""
    from django.core.management import CommandError, call_command

    status: object = 0
    try:
        call_command("run_locked", "k", "--", sys.executable, "-c", "")
    except CommandError as error:
        print(error)
        status = error.returncode
    except SystemExit as ended:
        status = ended.code
    assert status in {0, None, UNAVAILABLE}, status


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("database")
    parser.add_argument("--poor", action="store_true")
    options = parser.parse_args()
    if options.poor:
        hide()
    set_up(options.database)

    from django.contrib import admin
    from django.core.management import call_command
    from django.urls import path

    globals()["urlpatterns"] = [path("admin/", admin.site.urls)]
    import_all()
    call_command("check")
    call_command("migrate", verbosity=0)
    use_locks()
    open_admin()
    ask_for_processes()


if __name__ == "__main__":
    main()
