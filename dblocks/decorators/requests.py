"""The transactions of a request, opened under its locks (``ATOMIC_REQUESTS``)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from django.db import connections, transaction
from django.http import HttpRequest

from ..advice import warn
from ..backends.database.transactions import in_transaction
from .views import django_request

if TYPE_CHECKING:
    from ..lease_blocks import LeaseBlock


class OwnTransactions(set[str]):
    """Tells Django's handler to leave the request's transactions to the decorator.

    As ``_non_atomic_requests`` on a view it contains every database. Its members are
    those that the project itself excluded with ``non_atomic_requests``.
    """

    def __contains__(self, alias: object) -> bool:
        return True


class RequestTransactions:
    """The transactions of one request.

    Attributes:
        leases: The locks that its decorators hold, the outermost's first.
        opened: A decorator has begun the transactions.
    """

    def __init__(self) -> None:
        self.leases: list[LeaseBlock] = []
        self.opened = False

    @classmethod
    def of(cls, request: HttpRequest) -> RequestTransactions:
        """Return a request's transactions, made when they are first asked for."""
        attributes: dict[str, Any] = vars(django_request(request))
        own: RequestTransactions = attributes.setdefault("_dblocks_transactions", cls())
        return own

    def due(self, request: HttpRequest, excluded: set[str]) -> list[str]:
        """Return the databases on which Django left the transaction to us.

        Args:
            excluded: Databases on which the decorated function wants no transaction:
                all, if it has another decorator of dblocks below, because the innermost
                begins the transactions, when all locks are taken.
        """
        match = request.resolver_match
        mark = getattr(match and match.func, "_non_atomic_requests", None)
        if self.opened or not isinstance(mark, OwnTransactions):
            return []
        marked = set(mark)
        return [a for a in _atomic_aliases() if a not in excluded and a not in marked]

    @contextmanager
    def under(self, aliases: list[str], lease: LeaseBlock) -> Iterator[None]:
        """Begin transactions on some databases, run the view, guard, commit.

        They commit only while all leases are held, those on the locks' own databases
        last. A transaction that is marked for rollback isn't guarded. If none commits,
        a loss is raised when the lock is released.
        """
        self.leases.append(lease)
        opened, self.opened = self.opened, self.opened or bool(aliases)
        try:
            order = sorted(aliases, key=self._has_no_lock)
            with ExitStack() as blocks:
                for alias in order:
                    blocks.enter_context(transaction.atomic(using=alias))
                yield
                committing = [a for a in order if not connections[a].needs_rollback]
                guarded = self.leases if committing else []
                for one in guarded:
                    one._guard_commits(committing)
            for one in guarded:
                one._committed = True
        finally:
            # The request may come again, from a middleware that retries.
            self.opened = opened
            self.leases.remove(lease)

    def _has_no_lock(self, alias: str) -> bool:
        return not any(x._backend.is_in_database(alias) for x in self.leases)

    @staticmethod
    def begun() -> str | None:
        """Return a database on which the request's transaction has already begun."""
        begun = (a for a in _atomic_aliases() if in_transaction(connections[a]))
        return next(begun, None)

    def warn_of_late_lock(
        self, name: str, alias: str, *, below_api_view: bool, of_view: bool
    ) -> None:
        """Warn that the request's transaction began before the lock is taken.

        Args:
            of_view: The call is to a method of the class that the URL led to: warn even
                if another lock above has begun the transaction.
        """
        if of_view or not self.opened:
            what_to_do = (
                "Put it above @api_view."
                if below_api_view
                else "Decorate the whole view (for a class method_decorator(…, "
                'name="dispatch")).'
            )
            warn(
                f"{name}: ATOMIC_REQUESTS began the transaction on {alias!r} before "
                f"the lock is taken. The lock is kept until that transaction ends, but "
                f"what was read before may be old, and the commit isn't guarded. "
                f"{what_to_do}"
            )


def _atomic_aliases() -> list[str]:
    """Return the databases with ``ATOMIC_REQUESTS``."""
    return [
        alias for alias in connections if connections.settings[alias]["ATOMIC_REQUESTS"]
    ]
