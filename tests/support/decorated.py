"""Decorated at module level, as projects do: tasks, a command, keys of their own."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task
from django.core.management.base import BaseCommand

from dblocks import current_lease, distributed_lock

celery = Celery("tests", set_as_current=False)
celery.conf.task_always_eager = True
celery.conf.task_eager_propagates = True


def key_of(number: int) -> str:
    """Return the key for a number, of a callable's kind."""
    return f"decorated:{number}"


@celery.task
@distributed_lock("decorated:{number}", timeout=0)
def count(number: int) -> int | None:
    """A Celery task."""
    return current_lease(f"decorated:{number}").fencing_token


@celery.task(bind=True, max_retries=1, default_retry_delay=0)
@distributed_lock("decorated:{number}", timeout=0, on_locked="skip")
def bound(self: Task, number: int) -> str:
    """A Celery task that gets itself."""
    current_lease(f"decorated:{number}").check()
    return str(self.name)


@celery.task
@distributed_lock("decorated:{number}", timeout=0)
def nested(number: int) -> tuple[int | None, int | None]:
    """A Celery task that runs another one eagerly, under the same lock."""
    mine = current_lease(f"decorated:{number}").fencing_token
    return mine, count.delay(number).result


@distributed_lock(key_of, timeout=0)
def by_callable(number: int) -> int | None:
    """A function whose key is made by a function of this module."""
    return current_lease(key_of(number)).fencing_token


class Command(BaseCommand):
    """A management command that runs once at a time."""

    requires_system_checks = ()

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("number", type=int)

    @distributed_lock("decorated:{options[number]}", timeout=0)
    def handle(self, *args: Any, **options: Any) -> str:
        current_lease(f"decorated:{options['number']}").check()
        return "handled"
