"""Releases the holds of several keys, in one statement if possible."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from traceback import clear_frames

from .. import clock
from .holds import RELEASED, Hold

logger = logging.getLogger("dblocks")


def release_together(holds: list[Hold], committed: bool) -> list[bool]:
    """:meth:`Hold.release` for several of one owner, in one statement if possible.

    Raises:
        DatabaseError: As there. Every hold that could be released has been.
    """
    if len(holds) == 1:
        return [holds[0].release(committed)]
    released: dict[Hold, bool] = {}

    def write(hold: Hold) -> None:
        released[hold] = hold._write_release()

    def write_together(holds: list[Hold]) -> None:
        for hold, held in _release_last(holds).items():
            released[hold] = held

    # If one of them fails, the others are written all the same.
    with _without_frames(), ExitStack() as work:
        for hold in holds:
            work.enter_context(hold.mutex)
        told = [hold._give_back(committed) for hold in holds]
        due = [hold for hold, held in zip(holds, told, strict=True) if held is None]
        for explicit in (False, True):
            alike = [hold for hold in due if hold.explicit is explicit]
            last = [hold for hold in alike if hold.counted == 0 and not hold._end]
            if len(last) > 1:
                alike = [hold for hold in alike if hold not in last]
                work.callback(write_together, last)
            for hold in alike:
                work.callback(write, hold)
    return [released.get(hold, bool(it)) for hold, it in zip(holds, told, strict=True)]


def give_back(holds: list[Hold]) -> bool:
    """Undo acquisitions that nobody receives; ``False`` if they are left to lapse.

    A grant doesn't cool if nobody can have had it.
    """
    for hold in holds:
        if hold.counted == 1:
            # An interrupt below may keep the claims, and with them renewals, alive.
            hold.promised.clear()
    try:
        with _without_frames(), ExitStack() as work:
            unused = []
            for hold in holds:
                work.enter_context(hold.mutex)
                # Other processes may be using the grant of an explicit owner.
                had = hold.entered_again or hold.explicit
                if not had and (hold.is_live() or _keeps_its_row(hold)):
                    hold._give_back(committed=False)
                    unused.append(hold)
                else:
                    work.callback(hold.release)
            if unused:
                work.callback(lambda: _undo(unused))
    except Exception as error:
        log_lapse(holds, error)
        return False
    return True


def log_lapse(holds: list[Hold], error: BaseException) -> None:
    """Say that grants could not be released."""
    for hold in holds:
        logger.warning(
            "not released, left to lapse key=%r permit=%s fencing_token=%s error=%s",
            *(hold.key, hold.permit, hold.grant.version, error),
        )


def _keeps_its_row(hold: Hold) -> bool:
    """Tell whether an overdue hold's row isn't over, so certainly nobody else's.

    After its end, a write might wait for a transaction that has the row locked.
    """
    row_ends = min(hold.deadline + hold.terms.margin, hold.limit)
    is_overdue = hold.lost_reason in {"expired", "backend"}
    return is_overdue and clock.monotonic() < row_ends


@contextmanager
def _without_frames() -> Iterator[None]:
    """Clear the frames of an error that passes.

    A frame of ``ExitStack`` keeps the error, which keeps the frame and all callers'
    leases until the garbage collector comes.
    """
    try:
        yield
    except BaseException as error:
        clear_frames(error.__traceback__)
        raise


def _undo(holds: list[Hold]) -> None:
    try:
        for hold in holds:
            hold._ends(RELEASED)
        holds[0].backend.undo_all([hold.grant for hold in holds])
    finally:
        for hold in holds:
            hold._asked()


def _release_last(holds: list[Hold]) -> dict[Hold, bool]:
    """Give back the last acquisitions of some grants in one statement."""
    try:
        released = holds[0].backend.release_all(
            [hold.grant for hold in holds],
            count=None if holds[0].explicit else 0,
            deadline=min(hold.deadline for hold in holds),
        )
    except BaseException as error:
        for hold in holds:
            hold._failed(error)
        raise
    finally:
        for hold in holds:
            hold._asked()
    return {hold: hold._released(hold.grant in released) for hold in holds}
