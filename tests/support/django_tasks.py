"""Functions that are tasks of Django's own (6.0 and newer)."""

from __future__ import annotations

from django.tasks import task  # type: ignore[import-not-found,unused-ignore]

from dblocks import current_lease, distributed_lock


@task
@distributed_lock("decorated:{number}", timeout=0)
def count(number: int) -> int | None:
    """A task."""
    return current_lease(f"decorated:{number}").fencing_token


@task(takes_context=True)
@distributed_lock("decorated:{number}", timeout=0)
def in_context(context: object, number: int) -> int | None:
    """A task that gets its context."""
    return current_lease(f"decorated:{number}").fencing_token


@task
@distributed_lock("decorated:{number}", timeout=0)
async def acount(number: int) -> int | None:
    """An async task."""
    return current_lease(f"decorated:{number}").fencing_token
