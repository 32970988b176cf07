"""The shop's site for gunicorn, on the test's database.

Every answer names the process that gave it.
"""

from __future__ import annotations

import json
import os
from typing import Any

from django.conf import settings
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.wsgi import get_wsgi_application
from django.db import connections

from tests.support.timing import scaled

# Carts that wait for each other take longer on a slow machine.
settings.DBLOCKS = {**settings.DBLOCKS, "default": {"TIMEOUT": scaled(3.0)}}

django = StaticFilesHandler(get_wsgi_application())

for alias, name in json.loads(os.environ["DBLOCKS_TEST_NAMES"]).items():
    connections.settings[alias]["NAME"] = name


def application(environ: dict[str, Any], start_response: Any) -> Any:
    def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
        headers = [*headers, ("X-Process", str(os.getpid()))]
        return start_response(status, headers, *rest)

    return django(environ, start)
