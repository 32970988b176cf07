"""``python -m tests.support.manage``: Django's command line on the test's database.

``DBLOCKS_TEST_DATABASES`` holds, by alias, what is to be changed in ``DATABASES``.
"""

from __future__ import annotations

import json
import os
import sys

from django.conf import settings
from django.core.management import execute_from_command_line


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    changes = json.loads(os.environ.get("DBLOCKS_TEST_DATABASES", "{}"))
    for alias, change in changes.items():
        settings.DATABASES[alias].update(change)
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
