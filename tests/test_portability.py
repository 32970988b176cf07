"""Systems without ``fork`` and process groups, as Windows is one."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.processes import ROOT

POOR_SYSTEM = """
import asyncio, importlib, os, pkgutil, signal, subprocess, sys, threading, time

import django
from django.conf import settings
from django.core.management import CommandError, call_command

for module in ("fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"):
    sys.modules[module] = None
for module, missing in {
    os: ("register_at_fork", "fork", "killpg", "setpgid", "getpgrp", "ctermid"),
    signal: ("SIGCHLD", "SIGHUP", "SIGKILL", "SIGTSTP", "SIGTTIN", "SIGTTOU"),
    time: ("clock_gettime", "CLOCK_BOOTTIME", "CLOCK_MONOTONIC"),
}.items():
    for name in missing:
        vars(module).pop(name, None)

settings.configure(
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "dblocks",
    ],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": sys.argv[1],
            "OPTIONS": {"transaction_mode": "IMMEDIATE"},
        }
    },
)
django.setup()

import dblocks
from dblocks import distributed_lock

for module in pkgutil.walk_packages(dblocks.__path__, "dblocks."):
    if not module.name.startswith("dblocks.supervision"):
        importlib.import_module(module.name)

call_command("migrate", verbosity=0)


@distributed_lock("{name}")
def locked(name):
    return distributed_lock(name).locked()


async def main():
    async with distributed_lock("async") as lease:
        return lease.held


assert locked("sync")
assert asyncio.run(main())
call_command("locks", "list", "--verbosity", "0")
try:
    call_command("run_locked", "k", "--", "true")
except CommandError as error:
    assert error.returncode == 69, error.returncode
    print(error)
"""


def test_system_without_forks(tmp_path: os.PathLike[str]) -> None:
    """All can be imported, locks work, and run_locked says why it can't."""
    done = subprocess.run(
        [sys.executable, "-c", POOR_SYSTEM, os.path.join(tmp_path, "db.sqlite3")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDEVMODE": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "run_locked needs process groups" in done.stdout
