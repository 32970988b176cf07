"""Leases: the proof of holding a lock."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

from . import clock, signals, validation
from .holding import news, owners
from .holding.holds import RELEASED, Claim, Hold
from .holding.sets import release_together
from .lease_blocks import LeaseBlock

logger = logging.getLogger("dblocks")


class Lease(LeaseBlock):
    """The proof of holding a lock, for a limited time that is renewed.

    As a context manager it releases the lock on leaving. Leaving raises
    :exc:`LeaseLost` if the lease was lost in the meantime and the body raised nothing
    itself. Another thread may be handed the lease and release it. When nothing refers
    to a lease any more, it is no longer renewed, and a ``ResourceWarning`` says so. ::

        with distributed_lock("import") as lease:
            for row in rows:
                lease.check()
                ...
    """

    def __init__(self, hold: Hold, claim: Claim, atomic: bool) -> None:
        super().__init__(atomic)
        self._hold = hold
        self._ref = weakref.ref(self)
        #: It was held until it was given back: a later loss of the grant isn't its own.
        self._is_released = False
        hold.leases.add(self._ref)
        hold.keep_promise(claim)

    def _each(self) -> Sequence[Lease]:
        return (self,)

    def __repr__(self) -> str:
        state = "held" if self.held else self.lost_reason or RELEASED
        return f"<Lease {self.key!r} fencing_token={self.fencing_token} {state}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        # The garbage collector may run this anywhere, so it must not note a loss.
        if hasattr(self, "_ref") and self._open and self._hold.lost_reason is None:
            token = self.fencing_token
            known_by = "" if token is None else f" (fencing token {token})"
            _warn(
                f"The lease on {self.key!r}{known_by} was dropped without release(); "
                f"it is not renewed any more.",
                ResourceWarning,
                stacklevel=2,
            )

    @property
    def _open(self) -> bool:
        return self._ref in self._hold.leases

    @property
    def _lost_reason(self) -> str | None:
        return None if self._is_released else self._hold.lost_reason

    def _close(self) -> bool:
        """Mark it as given back; ``False`` if it was already."""
        try:
            self._hold.leases.remove(self._ref)
        except KeyError:
            return False
        return True

    def _release_now(self, leases: Sequence[Lease]) -> bool:
        if not self._close():
            return False
        held = self._hold.release(self._committed)
        self._note_release(held)
        return held

    def _note_release(self, held: bool) -> None:
        self._is_released = held
        if held and not self._hold.counted:
            self._tell_released()

    @property
    def key(self) -> str:
        """The key that is held."""
        return self._hold.key

    @property
    def permit(self) -> int:
        """The number of the permit that is held, from 0; 0 without permits."""
        return self._hold.permit or 0

    @property
    def fencing_token(self) -> int | None:
        """A number greater than that of every earlier grant of this key, ever.

        Re-entering gives the same number. A resource that remembers the greatest token
        it has seen can refuse a smaller one (Kleppmann, "How to do distributed
        locking", 2016). With permits, compare tokens of one permit only. ``None`` on
        engines without tokens.
        """
        return self._hold.grant.version

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call a function once, with this lease, when the lease is found to be lost.

        The call comes from a thread of dblocks: at the local deadline at the latest,
        and after a force release at the next renewal. If the lease is lost already, the
        call comes at once. Exceptions that the function raises are logged.
        """
        validation.callback(callback)
        self._hold.loss_callbacks.append((self._ref, callback))
        self._hold.note_overdue()
        if self._hold.lost_reason is not None:
            news.call_back(self._hold.loss_callbacks)

    def on_release_requested(self, callback: Callable[[Lease], object]) -> None:
        """Call a function once, with this lease, when the holder is asked to finish.

        The call comes from a thread of dblocks after the next renewal, or at once if
        the request is known already. Exceptions that the function raises are logged.
        """
        validation.callback(callback)
        self._hold.request_callbacks.append((self._ref, callback))
        if self._hold.release_requested:
            news.call_back(self._hold.request_callbacks)

    def _tell_released(self) -> None:
        if (observer := signals.observer) is not None:
            observer.released(self._hold)
        if logger.isEnabledFor(logging.DEBUG) or signals.lock_released.receivers:
            facts = self._hold.facts(held_for=clock.monotonic() - self._hold.started)
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug(
                    "released key=%(key)r permit=%(permit)s backend=%(backend)s "
                    "owner=%(owner)s fencing_token=%(fencing_token)s "
                    "held_for=%(held_for).3f",
                    signals.shown(facts),
                )
            sender = self._hold.sender
            signals.send(signals.lock_released, sender, **facts, lease=self)


class Leases(LeaseBlock, Mapping[str, Lease]):
    """The leases of several keys that were taken together: a mapping by key.

    Has the verbs of a :class:`Lease`, which act on all of them. Fencing tokens belong
    to the single leases. If one lease is lost, the others stay held until they are
    released. ::

        with distributed_lock("account:1", "account:2") as leases:
            leases["account:1"].fencing_token
    """

    def __init__(self, leases: Sequence[Lease], atomic: bool) -> None:
        super().__init__(atomic)
        self._leases = {lease.key: lease for lease in leases}
        self._in_order = tuple(leases)

    def __repr__(self) -> str:
        state = "held" if self.held else self.lost_reason or RELEASED
        return f"<Leases {', '.join(map(repr, self))} {state}>"

    def _each(self) -> Sequence[Lease]:
        return self._in_order

    @property
    def _open(self) -> bool:
        return any(lease._open for lease in self._in_order)

    def _release_now(self, leases: Sequence[Lease]) -> bool:
        closed = [lease for lease in leases if lease._close()]
        held = release_together([lease._hold for lease in closed], self._committed)
        for lease, was_held in zip(closed, held, strict=True):
            lease._note_release(was_held)
        return len(held) == len(self._in_order) and all(held)

    def __getitem__(self, key: str) -> Lease:
        return self._leases[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leases)

    def __len__(self) -> int:
        return len(self._leases)

    # Mapping has no hash. Two of these never have the same leases: they aren't equal.
    __hash__ = object.__hash__

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call a function once, with the lease, for each lease that is found lost.

        See :meth:`Lease.on_lost`.
        """
        for lease in self._in_order:
            lease.on_lost(callback)

    def on_release_requested(self, callback: Callable[[Lease], object]) -> None:
        """Call a function once for each lease whose holder is asked to finish.

        It gets that lease. See :meth:`Lease.on_release_requested`.
        """
        for lease in self._in_order:
            lease.on_release_requested(callback)


@overload
def current_lease(key: str) -> Lease: ...


@overload
def current_lease(key: None = None) -> Lease | Leases: ...


def current_lease(key: str | None = None) -> Lease | Leases:
    """Return the innermost lease of the current owner. ::

        @distributed_lock("order:{order_id}")
        def ship(order_id):
            order = Order.objects.filter(pk=order_id)
            order.fenced_update(current_lease(), shipped=True)

    Args:
        key: Consider only the lease of this key. Without it, keys that were taken
            together are returned as their :class:`Leases`.

    Returns:
        Lease | Leases: The lease; ``Leases`` only without ``key``.

    Raises:
        LookupError: The current owner has no such lease.
    """
    found: list[Lease | Leases] = list(owners.current().leases(key))
    if not found:
        wanted = "lease" if key is None else f"lease on {key!r}"
        raise LookupError(f"The current thread or task has no {wanted}.")
    # A transaction keeps leases whose blocks were left: prefer one still in its block.
    return next((lease for lease in found if not lease._deferred), found[0])
