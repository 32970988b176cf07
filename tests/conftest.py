"""What concerns the whole test session; fixtures are in ``tests.support.fixtures``."""

from __future__ import annotations

import gc
import signal
import warnings

import django
import pytest
from django.conf import settings

pytest_plugins = [
    "tests.support.fixtures",
    "tests.support.commands",
    "tests.support.shop_site",
    "tests.support.web",
]


def pytest_configure(config: pytest.Config) -> None:
    heed_signals()
    config.addinivalue_line(
        "markers",
        "database_backend: about the table, in a module that other engines don't run",
    )
    config.addinivalue_line(
        "markers",
        "needs(*abilities): not applicable to engines that declare not to have one",
    )
    config.addinivalue_line("markers", "engine(*aliases): about these engines alone")
    if settings.DATABASES["default"]["NAME"] == ":memory:":
        # Django never closes a connection to a database in memory, and Python 3.13
        # complains about each, in the tests and after the last one, when pytest's own
        # filters are gone. Elsewhere this warning means a leak.
        message = "unclosed database"
        config.addinivalue_line("filterwarnings", f"ignore:{message}:ResourceWarning")
        warnings.filterwarnings("ignore", message, ResourceWarning)


def heed_signals() -> None:
    """Undo what a shell does to background jobs, which programs would inherit."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what stays until the end, over and over."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    database = settings.DATABASES["default"]
    engine = database["ENGINE"].rpartition(".")[2]
    isolation = settings.ISOLATION or "default isolation"
    return f"django: {django.__version__}, {engine}, {isolation}"
