"""What happens to locks, for code outside: to count, log or alert.

All signals are sent with ``send_robust``: Django logs a receiver that fails, and it
can't break locking. ``sender`` is the class :class:`dblocks.locks.Lock`; for a force
release it is the model or the backend's class. Every signal has ``key`` (``str``),
``permit`` (its number, or ``None`` for a lock without permits) and ``backend`` (the
alias in ``DBLOCKS``; ``None`` for a force release in a database, which ``using``
names). Durations are seconds. Keys that are taken together have a signal each.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from django.dispatch import Signal

from .exceptions import LockTimeout
from .permits import apart
from .texts import visible

if TYPE_CHECKING:
    from .backends.values import Described
    from .telemetry import Telemetry

logger = logging.getLogger("dblocks")

#: Somebody got a lock. ``owner``, ``fencing_token``, ``waited``, ``reentered``
#: (``bool``) and ``lease`` (the :class:`~dblocks.Lease`). Sent in the thread that
#: acquired; for async code, in a thread of dblocks.
lock_acquired = Signal()

#: The last hold was given back. ``owner``, ``fencing_token``, ``held_for`` and
#: ``lease``. Sent in the thread that released; for async code, in a thread of dblocks.
lock_released = Signal()

#: A lease was lost. ``owner``, ``fencing_token``, ``held_for`` and ``reason``. Sent in
#: a thread of dblocks, at the local deadline at the latest.
lock_lost = Signal()

#: Somebody asks the holder to finish. ``owner``, ``fencing_token`` and ``held_for``.
#: Sent in the holder's process, in a thread of dblocks, when a renewal has learned it.
lock_release_requested = Signal()

#: A wait ran out. ``waited``, ``holder``, ``note`` and ``retry_after``.
lock_timed_out = Signal()

#: A lock was taken away from its holder. ``owner`` and ``fencing_token`` of the grant
#: that was ended, ``holder``, ``by`` (who did it: a user, a name or ``None``),
#: ``reason`` (free text) and ``using`` (the alias of the database, or ``None`` on
#: other engines, where ``backend`` says which).
lock_force_released = Signal()


def send(signal: Signal, sender: object, **facts: object) -> None:
    """Send a signal with ``send_robust``, and drop the tracebacks of its errors.

    An error that it returns and its frame refer to each other: until the garbage
    collector finds the two, they would keep all callers' leases alive.
    """
    for _, answer in signal.send_robust(sender, **facts):
        if isinstance(answer, Exception):
            answer.__traceback__ = None


#: Hears of grants, time-outs, releases and losses where their signals are sent, at
#: less cost; of a grant in the caller's context. It must not raise.
observer: Telemetry | None = None


def log_timeout(error: LockTimeout, waited: float) -> None:
    """Log, once, that a caller goes without a lock: the reason why a job didn't run."""
    logger.info(
        "timed out key=%r holder=%s note=%r permit=%s waited=%.3f",
        error.key,
        visible(error.holder),
        error.note,
        error.permit,
        waited,
    )


def log_request(row_key: str, grant: Described, *, by: object, reason: str) -> None:
    """Log that the holder of a grant was asked to finish."""
    logger.info(
        "release requested key=%(key)r permit=%(permit)s owner=%(owner)s "
        "holder=%(holder)s fencing_token=%(fencing_token)s by=%(by)s reason=%(reason)s",
        shown(_told(row_key, grant, by=by, reason=reason)),
    )


def announce_force_release(
    sender: type, row_key: str, grant: Described, **how: object
) -> None:
    """Log that a grant was ended without its holder's consent, and send the signal."""
    told = _told(row_key, grant, **how)
    logger.warning(
        "force-released key=%(key)r permit=%(permit)s owner=%(owner)s "
        "holder=%(holder)s fencing_token=%(fencing_token)s by=%(by)s reason=%(reason)s",
        shown(told),
    )
    send(lock_force_released, sender, **{"backend": None, "using": None, **told})


def _told(row_key: str, grant: Described, **how: object) -> dict[str, object]:
    key, permit = apart(row_key)
    owner, holder, token = grant
    return {
        "key": key,
        "permit": permit,
        "owner": owner,
        "holder": holder,
        "fencing_token": token,
        **how,
    }


def shown(told: dict[str, object]) -> dict[str, object]:
    """Return facts with their free texts made safe for one line of a log."""
    free = ("owner", "holder", "by", "reason")
    return told | {name: visible(str(told[name])) for name in free if name in told}
