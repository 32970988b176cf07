"""Models whose rows refuse writes that come with an outdated fencing token."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from asgiref.sync import sync_to_async
from django.db import connections, models, router, transaction
from django.db.models import F

from .exceptions import LeaseLost

if TYPE_CHECKING:
    from typing_extensions import Self

M = TypeVar("M", bound=models.Model, covariant=True)

Fence = Any
"""A :class:`~dblocks.Lease`, or its token as an ``int`` or as digits in a ``str``."""


def token_of(fence: Fence) -> int:
    """Return the fencing token of a lease, or a bare one."""
    token = getattr(fence, "fencing_token", fence)
    if isinstance(token, str) and token.isascii() and token.isdigit():
        token = int(token)
    if not isinstance(token, int) or isinstance(token, bool):
        hint = '; use leases["key"]' if isinstance(fence, Mapping) else ""
        raise TypeError(
            f"fence must be a lease with a fencing token, or a token, not "
            f"{fence!r}{hint}"
        )
    if token < 0:
        raise ValueError(f"fence must not be negative: {fence!r}")
    if token >= 2**63:
        raise ValueError(f"fence must be less than 2**63, as every token is: {fence!r}")
    return token


class FencingTokenField(models.BigIntegerField):  # type: ignore[type-arg]
    """The greatest token that a row has seen; a plain ``save()`` never writes it."""

    def pre_save(self, model_instance: models.Model, add: bool) -> Any:
        return super().pre_save(model_instance, add) if add else F(self.attname)


class FencedQuerySet(models.QuerySet[M]):
    """Adds updates that a holder with an outdated token can't make."""

    def fenced_update(self, fence: Fence, /, **values: Any) -> int:
        """Update all rows of a filtered queryset, or none of them.

        Args:
            fence: The lease that protects the update, or its bare token.
            values: As for ``update()``, but without the queryset's annotations.

        Returns:
            The number of rows updated.

        Raises:
            LeaseLost: One of the rows has seen a higher token.
            TypeError: The queryset has no filter, or ``fence`` is neither a lease with
                a token nor a token.
            ValueError: The token is negative; ``fencing_token`` is among the values.
        """
        token = token_of(fence)
        if "fencing_token" in values:
            raise ValueError(
                "fenced_update() writes fencing_token itself: it is the fence's."
            )
        if not self.query.where:
            raise TypeError(
                "fenced_update() needs a filter: fencing every row of a table by one "
                "lock's token is hardly meant. Use .filter(…).fenced_update(…)."
            )
        if self.query.distinct_fields:
            raise TypeError("Cannot call fenced_update() after .distinct(*fields).")
        self._for_write = True
        tokens = _tokens(self.model, self.db)
        features = connections[self.db].features
        with transaction.atomic(using=self.db):
            if not features.has_select_for_update:
                # On SQLite a transaction that has read fails if another writes next.
                nothing = tokens.filter(fencing_token=None)
                nothing.update(fencing_token=F("fencing_token"))
            # First lock all rows that match: a concurrent change of what the filter
            # asks for must not hide the rows that refuse.
            of = ("self",) if features.has_select_for_update_of else ()
            locked = self.order_by("pk").select_for_update(of=of)
            # A filter across a relation may find a row several times, but a DISTINCT
            # query can't lock.
            locked.query.distinct = False
            found = _keys(locked, tokens.model)
            those = tokens.filter(pk__in=list(found.values()))
            allowed = those.filter(fencing_token__lte=token)
            if allowed.update(fencing_token=token) != len(found):
                raise _refused(self.model, fence, token)
            if values:
                rows = self.model._base_manager.using(self.db)
                rows.filter(pk__in=list(found)).update(**values)
        return len(found)

    async def afenced_update(self, fence: Fence, /, **values: Any) -> int:
        """Async twin of :meth:`fenced_update`."""
        return await sync_to_async(self.fenced_update)(fence, **values)


if TYPE_CHECKING:
    # What as_manager() makes, for type checkers that can't look into it.
    class _FencedManager(FencedQuerySet[M], models.Manager[M]): ...  # type: ignore[misc]


class FencedModel(models.Model):
    """An abstract model whose rows remember the greatest fencing token they have seen.

    This is the resource's side of fencing (Kleppmann, 2016). A holder that has lost its
    lock without knowing it brings a smaller token than its successor, and is refused.
    Works wherever the data live, also in another database than the locks. ``update()``,
    ``bulk_update()``, ``bulk_create(update_conflicts=True)``, ``delete()``,
    ``loaddata`` and a plain ``save()`` check nothing. ::

        class Report(FencedModel):
            body = models.TextField()

        with distributed_lock("report") as lease:
            Report.objects.filter(pk=1).fenced_update(lease, body="…")
            report.save(fence=lease)
    """

    if TYPE_CHECKING:
        # For type checkers only: these annotations can't be evaluated at run time.
        fencing_token: models.BigIntegerField[Any, int]
        objects: ClassVar[_FencedManager[Self]]
    else:
        fencing_token = FencingTokenField(default=0, editable=False)
        objects = FencedQuerySet.as_manager()

    class Meta:
        abstract = True

    def save(self, *args: Any, fence: Fence = ..., **kwargs: Any) -> None:
        """Save the object; with ``fence``, only if its row has seen no higher token.

        Without a ``fence`` it is a plain ``save()``; ``fence=None`` is an error.

        Args:
            fence: The lease that protects the write, or its bare token.

        Raises:
            LeaseLost: The row has seen a higher token.
            TypeError: ``fence`` is neither a lease with a token nor a token.
            ValueError: The token is negative.
        """
        if fence is ...:
            if self._state.adding and self._state.db is not None:
                # A copy of a row: the tokens of the copy's lock are others.
                self.fencing_token = 0
            self._save(*args, **kwargs)
            return
        token = token_of(fence)
        using = kwargs.get("using") or router.db_for_write(type(self), instance=self)
        tokens = _tokens(type(self), using)
        own = partial(tokens.filter, fencing_token__lte=token)
        before, self.fencing_token = self.fencing_token, token
        try:
            with transaction.atomic(using=using):
                is_known = own(pk=self._token_pk()).update(fencing_token=token)
                if not is_known and tokens.filter(pk=self._token_pk()).exists():
                    raise _refused(type(self), fence, token)
                self._save(*args, **kwargs)
                # If it had no row, another may have inserted one, with a higher token.
                if not (
                    is_known or own(pk=self._token_pk()).update(fencing_token=token)
                ):
                    raise _refused(type(self), fence, token)
        except BaseException:
            self.fencing_token = before
            raise

    def _save(self, *args: Any, **kwargs: Any) -> None:
        """Save the object; both its row and the object keep their token."""
        token = self.__dict__.get("fencing_token")
        super().save(*args, **kwargs)
        if token is not None:
            # Without RETURNING, Django drops a field that it wrote as an expression.
            self.__dict__.setdefault("fencing_token", token)

    async def asave(self, *args: Any, fence: Fence = ..., **kwargs: Any) -> None:
        """Async twin of :meth:`save`."""
        await sync_to_async(self.save)(*args, fence=fence, **kwargs)

    def _token_pk(self) -> Any:
        """Return the primary key of the row with the token, perhaps an ancestor's."""
        owner = _tokens(type(self), None).model
        pk = getattr(self, owner._meta.pk.attname)
        link = self._meta.get_ancestor_link(owner)
        return getattr(self, link.attname) if pk is None and link else pk


def _tokens(model: type[models.Model], using: str | None) -> models.QuerySet[Any]:
    """Return the rows of the table that has the column for tokens.

    With multi-table inheritance an update of a child's rows selects them first: a
    condition on the token must be in an update of the ancestor's own table.
    """
    owner = model._meta.get_field("fencing_token").model
    rows: models.QuerySet[Any] = owner._base_manager.using(using)
    return rows


def _keys(rows: models.QuerySet[Any], owner: type[models.Model]) -> dict[Any, Any]:
    """Return the rows' primary keys, each with that of the row that has its token."""
    names = [field.name for field in rows.model._meta.pk_fields]
    if len(names) > 1:
        # A composite key: Django knows no inheritance between tables with it.
        return {key: key for key in rows.values_list(*names)}
    return dict(rows.values_list("pk", owner._meta.pk.name))


def _refused(model: type[models.Model], fence: Fence, token: int) -> LeaseLost:
    key = getattr(fence, "key", model._meta.label)
    return LeaseLost(key, fencing_token=token, reason="taken")
