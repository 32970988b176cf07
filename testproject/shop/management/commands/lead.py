from __future__ import annotations

import os
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from testproject.shop.leading import Candidate

from .demo import handling


class Command(BaseCommand):
    help = (
        "Stand for leader of the shop, who chooses what it recommends, until SIGTERM "
        "or Ctrl-C. Start several, and look at the site's page Leader."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--name", default=f"process {os.getpid()}")
        parser.add_argument(
            "--lease", type=float, default=6.0, help="seconds (default: %(default)s)"
        )
        parser.add_argument(
            "--pause",
            type=float,
            default=1.0,
            help="seconds between two recommendations (default: %(default)s)",
        )

    def handle(self, *, name: str, lease: float, pause: float, **options: Any) -> None:
        if settings.LOCKS_URLS:
            raise CommandError(
                "The site shows a leader whose lock is in its database: unset "
                "LOCKS_URL."
            )

        def say(text: str) -> None:
            self.stdout.write(f"{name} {text}")
            self.stdout.flush()

        candidate = Candidate(name, lease, pause, say)
        with handling(candidate.stop):
            say("stands for leader")
            candidate.run()
