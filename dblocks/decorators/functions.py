"""Functions, methods, tasks and views that run under a lock, sync or async."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial, wraps
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.conf import settings
from django.core.exceptions import SynchronousOnlyOperation
from django.http import HttpRequest
from django.views import View

from ..exceptions import LockTimeout
from ..validation import UNSET, is_async
from . import views
from .commands import raise_again
from .debugging import LateWork, queries_seen, warn_of_queries
from .decoratable import bound_to, check_decoratable, name_of
from .requests import OwnTransactions, RequestTransactions
from .templates import Args, CallText, CallTexts, Kwargs, function_note

if TYPE_CHECKING:
    from ..locks import Lock
    from ..transaction_locks import TransactionLock


class _Calls:
    """The calls of a function under a lock, and what they have in common.

    Attributes:
        skip: The argument that lets a call be skipped, if the lock has one.
        atomic: The argument that makes a call run in a transaction, if there is one.
        method: The function's qualified name, if the body of a class defines it.
        wrapper: What replaces the function.
    """

    decorator: str
    lock: Any
    wrapper: Any
    skip = ""
    atomic = ""

    def __init__(self, lock: Any, function: Any, note: Any = "") -> None:
        check_decoratable(function, self.decorator, lock.backend)
        self.lock = lock
        self.function = function
        self.name = name_of(function)
        self.method = views.method_name(function)
        self.texts = CallTexts(lock.keys, note, function)

    @classmethod
    def decorate(cls, lock: Any, function: Any) -> Any:
        """Return a function that runs ``function`` under a lock.

        The name, docstring, signature and ``__wrapped__`` are the function's own.

        Raises:
            TypeError, ImproperlyConfigured: As :func:`check_decoratable` says; also a
                ``TypeError`` for an async function that would run in a transaction.
        """
        if isinstance(function, (classmethod, staticmethod)):
            return type(function)(cls.decorate(lock, function.__func__))
        calls = cls(lock, function)
        if is_async(function):
            calls.refuse_async()
        calls.wrapper = calls.wrap()
        return calls.wrapper

    def wrap(self) -> Any:
        """Return what replaces the function."""

        @wraps(self.function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.run(args, kwargs)

        return wrapper

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        """Run a sync function, or begin to run an async class-based view."""
        raise NotImplementedError

    def call(self, args: Args, kwargs: Kwargs) -> Any:
        """Call the sync function; the lock is released when it returns.

        Raises:
            TypeError: The function returns a coroutine, which would run without the
                lock.
        """
        response = self.function(*args, **kwargs)
        # Not isinstance(), which would evaluate a lazy object.
        if type(response) is CoroutineType:
            if inspect.getcoroutinestate(response) == inspect.CORO_CREATED:
                response.close()
            raise TypeError(
                f"{self.name} is decorated as a sync function and returned a "
                f"coroutine, which would run without the lock. Whatever wraps the "
                f"async function must be async itself, or marked with "
                f"asgiref.sync.markcoroutinefunction()."
            )
        return response

    def make_texts(self, args: Args, kwargs: Kwargs) -> CallText:
        """Return the keys and the note of a call."""
        made, queries = self._make_texts(args, kwargs)
        warn_of_queries(queries, self.name)
        return made

    async def amake_texts(self, args: Args, kwargs: Kwargs) -> CallText:
        """Return the keys and the note, made in a thread if that needs the database."""
        with suppress(SynchronousOnlyOperation):
            return self.make_texts(args, kwargs)
        made, queries = await sync_to_async(self._make_texts)(args, kwargs)
        warn_of_queries(queries, self.name)
        return made

    def _make_texts(self, args: Args, kwargs: Kwargs) -> tuple[CallText, list[str]]:
        """Return the keys and the note, and in debug mode the queries that ran."""
        if not settings.DEBUG:
            return self.texts.make(args, kwargs), []
        with queries_seen() as queries:
            return self.texts.make(args, kwargs), queries

    def refuse_async(self) -> None:
        """Raise if async code would run in a transaction."""
        if self.atomic:
            raise TypeError(
                f"{self.atomic} can't be used on the async function {self.name}: "
                f"Django has no async transactions. Put the transaction and its lock "
                f"into a sync function and call that through sync_to_async()."
            )

    def requests(self, args: Args) -> tuple[HttpRequest | None, HttpRequest | None]:
        """Return a call's request, and once more if the call is a view's.

        Raises:
            TypeError: The call is a view's, and could be skipped.
        """
        request = views.request_of(args, self.method, self.wrapper)
        if request is None or not views.is_view_call(self.wrapper, request, args):
            return request, None
        if self.skip:
            raise TypeError(
                f"{self.skip} can't be used on the view {self.name}, which must return "
                f"a response: leave it out for a 423."
            )
        return request, request


class LeaseCalls(_Calls):
    """Calls under a ``Lock``.

    Attributes:
        excluded: Databases on which the function wants no request transaction.
        timeout: How long a call waits, or ``UNSET`` for the lock's own.
    """

    decorator = "distributed_lock"
    lock: Lock[Any]

    def __init__(self, lock: Lock[Any], function: Any) -> None:
        super().__init__(lock, function, lock.note)
        self.excluded: set[str] = getattr(function, "_non_atomic_requests", set())
        self.timeout: float | None = UNSET
        self._default_note = function_note(function)
        if lock.on_locked == "skip":
            self.skip = 'on_locked="skip"'
            if lock.timeout is UNSET:
                self.timeout = 0
        if lock.atomic:
            self.atomic = "atomic=True"
        self._asks_async = is_async(lock.on_locked)

    def wrap(self) -> Any:
        if not is_async(self.function):
            wrapper = super().wrap()
            wrapper._non_atomic_requests = OwnTransactions(self.excluded)
            return wrapper

        @wraps(self.function)
        async def awrapper(*args: Any, **kwargs: Any) -> Any:
            _request, of_view = self.requests(args)
            return await self.arun(args, kwargs, of_view)

        return awrapper

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        request, of_view = self.requests(args)
        under: Callable[[Any], AbstractContextManager[Any]] = nullcontext
        # A decorator above may pass the request by name, or after other arguments.
        request = request or views.request_among(args, kwargs)
        if request is not None:
            transactions = RequestTransactions.of(request)
            aliases = transactions.due(request, self.excluded)
            if of_view is not None and views.is_async_view(self.function, args):
                if aliases:
                    # Django's own refusal, which our mark on the view has silenced.
                    raise RuntimeError(
                        "You cannot use ATOMIC_REQUESTS with async views."
                    )
                self.refuse_async()
                return self.arun(args, kwargs, of_view)
            begun = transactions.begun()
            if begun is not None:
                view = bound_to(View, self.function, args)
                transactions.warn_of_late_lock(
                    self.name,
                    begun,
                    below_api_view=views.is_below_api_view(
                        self.wrapper, request.resolver_match
                    ),
                    of_view=view is not None and of_view is not None,
                )
            under = partial(transactions.under, aliases)
        self._refuse_async_on_locked()
        lock = self._lock_for(self.make_texts(args, kwargs), of_view)
        try:
            lease = lock.acquire(self.timeout)
        except LockTimeout as error:
            return self._locked_out(error, args, kwargs, of_view)
        late = LateWork.of(of_view, self.name)
        with lease, under(lease):
            response = self.call(args, kwargs)
        if late is not None:
            late.warn(response)
        return response

    async def arun(
        self, args: Args, kwargs: Kwargs, of_view: HttpRequest | None
    ) -> Any:
        """Run an async function, or the ``dispatch`` of an async class-based view.

        Args:
            of_view: The request, if the call is a view's.
        """
        lock = self._lock_for(await self.amake_texts(args, kwargs), of_view)
        try:
            lease = await lock.aacquire(self.timeout)
        except LockTimeout as error:
            locked_out = partial(self._locked_out, error, args, kwargs, of_view)
            if self._may_query(of_view):
                answer = await sync_to_async(locked_out)()
            else:
                answer = locked_out()
            return await answer if inspect.isawaitable(answer) else answer
        late = LateWork.of(of_view, self.name)
        async with lease:
            response = await self.function(*args, **kwargs)
        if late is not None:
            late.warn(response)
        return response

    def _refuse_async_on_locked(self) -> None:
        """Raise if a sync call that is locked out would return a coroutine.

        Not when decorated: the ``dispatch`` of an async class looks like a function.
        """
        if self._asks_async:
            raise TypeError(
                f"on_locked={self.lock.on_locked!r} is async, and {self.name} is sync: "
                f"its call would return a coroutine. Give a plain function."
            )

    def _lock_for(self, made: CallText, of_view: HttpRequest | None) -> Lock[Any]:
        keys, note, templates = made
        if not self.lock.note:
            note = views.view_note(of_view) or self._default_note
        return self.lock.for_call(keys, note, templates)

    def _locked_out(
        self,
        error: LockTimeout,
        args: Args,
        kwargs: Kwargs,
        of_view: HttpRequest | None,
    ) -> Any:
        """Do what ``on_locked`` says when the wait ran out."""
        on_locked = self.lock.on_locked
        if callable(on_locked):
            return on_locked(error, *args, **kwargs)
        if self.skip:
            return None
        if on_locked == "raise" or of_view is None:
            raise_again(self.function, args, error)
        return views.locked_response(of_view, error)

    def _may_query(self, of_view: HttpRequest | None) -> bool:
        """Tell whether :meth:`_locked_out` may run a project's code that queries.

        All else doesn't wait for asgiref's thread, whose sync code may wait for the
        task that is locked out.
        """
        on_locked = self.lock.on_locked
        if callable(on_locked):
            return not self._asks_async
        # A project's 423.html may query the database for the user.
        return on_locked is None and of_view is not None


class RowCalls(_Calls):
    """Calls under a ``TransactionLock``."""

    decorator = "transaction_lock"
    atomic = "@transaction_lock"
    lock: TransactionLock

    def __init__(self, lock: TransactionLock, function: Any) -> None:
        super().__init__(lock, function)
        if lock.skips:
            self.skip = "skip_locked=True"

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        request, of_view = self.requests(args)
        if request is not None and views.is_async_view(self.function, args):
            self.refuse_async()
        lock = self.lock.with_keys(self.make_texts(args, kwargs).keys)
        with ExitStack() as block:
            try:
                row = block.enter_context(lock)
            except LockTimeout as error:
                if of_view is None:
                    raise_again(self.function, args, error)
                return views.locked_response(of_view, error)
            if row is None:
                return None
            late = LateWork.of(of_view, self.name)
            response = self.call(args, kwargs)
        if late is not None:
            late.warn(response)
        return response
