"""What is refused: before any I/O, with the argument's name and value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy

from dblocks import InvalidKey, Lease, Lock, distributed_lock, transaction_lock
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support.processes import run_python

NAN, INFINITE = float("nan"), float("inf")
YEAR_AND_MORE = timedelta(days=366, seconds=1)


@contextmanager
def refused(
    error: type[Exception] | tuple[type[Exception], ...], *words: str
) -> Iterator[None]:
    """The block raises this, names these words, and sends nothing to the database."""
    with CaptureQueriesContext(connection) as queries, pytest.raises(error) as caught:
        yield
    assert not queries.captured_queries
    for word in words:
        assert word in str(caught.value)


WRONG_TYPES = [
    pytest.param(argument, value, id=f"{argument}={value!r}")
    for argument, values in {
        "timeout": ["3", b"3", [3], 3j],
        "lease": ["30", b"30", (30,), {}],
        "max_hold": ["60", [60]],
        "hold_at_least": ["60", [60]],
        "owner": [5, b"me", ["me"]],
        "note": [5, b"why", ["why"]],
        "on_locked": [5, ["skip"]],
        "renew": ["no"],
        "atomic": ["yes"],
    }.items()
    for value in values
]


@pytest.mark.parametrize(("argument", "value"), WRONG_TYPES)
def test_wrong_type(committed: None, argument: str, value: object) -> None:
    """A value of the wrong type is a TypeError that names argument and value."""
    with refused(TypeError, argument, repr(value)):
        distributed_lock("k", **{argument: value}).try_acquire()  # type: ignore[arg-type]


OUT_OF_RANGE = [
    pytest.param(argument, value, id=f"{argument}={value!r}"[:60])
    for argument, values in {
        "timeout": [-1, -0.001, NAN, INFINITE, -INFINITE, timedelta(seconds=-1)],
        "lease": [
            0,
            0.09,
            -1,
            NAN,
            INFINITE,
            366 * 86400 + 1,
            timedelta(0),
            YEAR_AND_MORE,
        ],
        "max_hold": [-1, 0, NAN, INFINITE, timedelta(seconds=-1)],
        "hold_at_least": [-1, -0.5, NAN, INFINITE, timedelta(seconds=-1)],
        "on_locked": ["nonsense"],
    }.items()
    for value in values
]


@pytest.mark.parametrize(("argument", "value"), OUT_OF_RANGE)
def test_out_of_range(committed: None, argument: str, value: object) -> None:
    """A negative, infinite, undefined or excessive value is a ValueError."""
    with refused(ValueError, argument):
        distributed_lock("k", **{argument: value}).try_acquire()  # type: ignore[arg-type]


def test_endless_wait(committed: None) -> None:
    """Who wants to wait for ever is told how."""
    with refused(ValueError, "timeout", "inf", "None waits for ever"):
        distributed_lock("k", timeout=INFINITE)
    with refused(ValueError, "timeout", "inf", "None waits for ever"):
        distributed_lock("k").acquire(timeout=INFINITE)


@pytest.mark.parametrize("value", [-1, -0.5, 0.05, 99999999999.5], ids=repr)
def test_out_of_range_shows_the_value(committed: None, value: float) -> None:
    """The message about a value out of range shows the value."""
    with refused(ValueError, "lease", repr(value)):
        distributed_lock("k", lease=value).try_acquire()


def test_timedelta_out_of_range_shows_the_value(committed: None) -> None:
    """A timedelta out of range is shown as it was given."""
    value = timedelta(days=400)
    with pytest.raises(ValueError, match="lease") as caught:
        distributed_lock("k", lease=value).try_acquire()
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("timeout", 10**400),
        ("lease", 10**400),
        ("lease", timedelta.max),
        ("max_hold", 10**400),
        ("hold_at_least", 10**400),
    ],
    ids=["timeout", "lease", "lease as timedelta", "max_hold", "hold_at_least"],
)
def test_more_than_a_float_can_hold(committed: None, argument: str, value: Any) -> None:
    """A number that no float can hold is out of range, not an OverflowError."""
    with refused(ValueError, argument):
        distributed_lock("k", **{argument: value}).try_acquire()


def test_lease_is_never_infinite(committed: None) -> None:
    """A lease of None would be an endless one."""
    with refused((TypeError, ValueError), "lease", "None"):
        distributed_lock("k", lease=None).try_acquire()  # type: ignore[arg-type]


def test_max_hold_needs_renewal(committed: None) -> None:
    """Without renewal there is nothing that max_hold could limit."""
    with refused((TypeError, ValueError), "max_hold", "renew"):
        distributed_lock("k", max_hold=60, renew=False).try_acquire()


BAD_KEYS = [
    pytest.param("", id="empty"),
    pytest.param("k" * 256, id="256 characters"),
    pytest.param("a\0b", id="NUL"),
    pytest.param("a\ud800b", id="lone high surrogate"),
    pytest.param("\udfff", id="lone low surrogate"),
    pytest.param(None, id="None"),
    pytest.param(5, id="int"),
    pytest.param(b"bytes", id="bytes"),
    pytest.param(["list"], id="list"),
]


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_bad_key(committed: None, bad: Any) -> None:
    """A key that can't be stored exactly is InvalidKey, which is a ValueError too."""
    with refused(InvalidKey, "key"):
        distributed_lock(bad).try_acquire()
    assert issubclass(InvalidKey, ValueError)


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_manager_refuses_a_bad_key(committed: None, bad: Any) -> None:
    """The manager has the same rules for keys as the lock."""
    with refused(InvalidKey, "key"):
        DistributedLock.objects.acquire(bad, owner="me", lease=1)


@pytest.mark.parametrize("text", ["a\0b", "a\ud800b"], ids=["NUL", "lone surrogate"])
@pytest.mark.parametrize("argument", ["owner", "note"])
def test_characters_of_owner_and_note(
    committed: None, argument: str, text: str
) -> None:
    """Owner and note have the key's character rules."""
    with refused(ValueError, argument, repr(text)):
        distributed_lock("k", **{argument: text}).try_acquire()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argument", "text"),
    [("owner", "o" * 65), ("note", "n" * 256)],
    ids=["owner", "note"],
)
def test_length_of_owner_and_note(committed: None, argument: str, text: str) -> None:
    """An owner has at most 64 characters, a note 255."""
    with refused(ValueError, argument):
        distributed_lock("k", **{argument: text}).try_acquire()  # type: ignore[arg-type]


def test_empty_owner(committed: None) -> None:
    """An owner without a name would look like no owner at all."""
    with refused(ValueError, "owner"):
        distributed_lock("k", owner="").try_acquire()


@pytest.mark.parametrize(
    ("value", "error"),
    [("3", TypeError), (-1, ValueError), (NAN, ValueError), (INFINITE, ValueError)],
    ids=repr,
)
@pytest.mark.parametrize("verb", ["acquire", "try_acquire"])
def test_timeout_of_the_call(
    committed: None, verb: str, value: Any, error: Any
) -> None:
    """A timeout given to the call is checked like the lock's own."""
    lock = distributed_lock("k")
    with refused(error, "timeout", repr(value)):
        getattr(lock, verb)(timeout=value)


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ("3", TypeError),
        (0, ValueError),
        (-1, ValueError),
        (NAN, ValueError),
        (INFINITE, ValueError),
    ],
    ids=repr,
)
def test_lease_of_a_renewal(
    acquire: Callable[..., Lease], value: Any, error: type[Exception]
) -> None:
    """A lease given to renew() is checked like the lock's own."""
    lease = acquire()
    with refused(error, "lease", repr(value)):
        lease.renew(lease=value)
    assert lease.held


@pytest.mark.parametrize("value", [0, -1, NAN, INFINITE, 367 * 86400], ids=repr)
def test_manager_refuses_a_bad_lease(committed: None, value: float) -> None:
    """The manager has the same limits for a lease as the lock."""
    with refused(ValueError, "lease"):
        DistributedLock.objects.acquire("k", owner="me", lease=value)


def test_unknown_backend(committed: None) -> None:
    """An alias that DBLOCKS doesn't have is an error that names it."""
    with refused(Exception, "nowhere"):
        distributed_lock("k", backend="nowhere").try_acquire()


def test_lazy_translation_as_key(committed: None) -> None:
    """What looks like a str and is none is shown with its type."""
    decorated = distributed_lock(lambda key: key)(lambda key: None)
    for lock in (distributed_lock, decorated):
        with refused(InvalidKey, "key must be a str, not 's' (__proxy__)"):
            lock(gettext_lazy("s"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["key", "owner", "note"])
def test_lazy_object(committed: None, name: str) -> None:
    """It passes for a str, and is refused as what it is."""
    texts: Any = {"key": "k", name: SimpleLazyObject(lambda: "s")}
    with refused((TypeError, InvalidKey), f"{name} must be a str", "SimpleLazyObject"):
        distributed_lock(texts.pop("key"), **texts)


@pytest.mark.parametrize("keys", [["k"], ["k", "l"]])
def test_callback(committed: None, keys: list[str]) -> None:
    """What no thread can call is refused when given, not when the lease is lost."""

    async def stop(lease: Lease) -> None: ...

    class Stopper:
        async def __call__(self, lease: Lease) -> None: ...

    with distributed_lock(*keys).acquire() as held:
        for register in (held.on_lost, held.on_release_requested):
            with refused(TypeError, "callback must be a callable", "'stop'"):
                register("stop")  # type: ignore[arg-type]
            with refused(TypeError, "callback must be a plain function", "stop at"):
                register(stop)
            with refused(TypeError, "callback must be a plain function", "Stopper"):
                register(Stopper())


def test_options_are_named(committed: None) -> None:
    """Only keys may be given by position."""
    with refused(InvalidKey, "5"):
        distributed_lock("k", 5)  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [["a", "b"], ("a", "b")], ids=["list", "tuple"])
@pytest.mark.parametrize(
    "name",
    [distributed_lock, transaction_lock, hold_elsewhere],
    ids=lambda f: f.__name__,
)
def test_keys_in_a_list(committed: None, name: Any, values: Any) -> None:
    """Who passes several keys as one is told how to pass them."""
    with refused(InvalidKey, "write several keys as several arguments"):
        name(values)


def test_decorator_without_parentheses(committed: None) -> None:
    """A bare @distributed_lock is a TypeError that says what is missing."""
    with refused(TypeError, "distributed_lock("):

        @distributed_lock  # type: ignore[arg-type]
        def job() -> None:
            """Do nothing."""

        job()


ACCEPTED = [
    pytest.param({"key": "k"}, id="one character"),
    pytest.param({"key": "\N{LOCK}" * 255}, id="255 characters of four bytes"),
    pytest.param({"key": " "}, id="a blank"),
    pytest.param({"key": "{not} a %s template"}, id="literal braces and percent signs"),
    pytest.param({"owner": "\N{LOCK}" * 64}, id="owner of 64 characters"),
    pytest.param({"note": "\N{LOCK}" * 255}, id="note of 255 characters"),
    pytest.param({"note": ""}, id="no note"),
    pytest.param({"lease": 0.1, "renew": False}, id="shortest lease"),
    pytest.param(
        {"lease": timedelta(milliseconds=100), "renew": False}, id="shortest timedelta"
    ),
    pytest.param({"lease": 366 * 86400}, id="longest lease"),
    pytest.param({"lease": timedelta(days=366)}, id="longest timedelta"),
    pytest.param({"timeout": 0}, id="try once"),
    pytest.param({"timeout": None}, id="wait for ever"),
    pytest.param({"timeout": timedelta(seconds=1.5)}, id="timeout as timedelta"),
    pytest.param({"max_hold": 0.5}, id="max_hold below the lease"),
    pytest.param({"max_hold": timedelta(hours=1)}, id="max_hold as timedelta"),
    pytest.param({"hold_at_least": 0}, id="no cooling"),
]


@pytest.mark.parametrize("options", ACCEPTED)
def test_accepted(lock: Callable[..., Lock], options: dict[str, Any]) -> None:
    """Everything up to the stated limits works, the limits included."""
    lease = lock(**options).acquire()
    assert lease.key == options.get("key", lease.key)
    # The shortest of them may be over by now on a busy machine.
    lease.release()


def test_making_a_lock_sends_nothing(
    committed: None, django_assert_num_queries: Any
) -> None:
    """Making a lock does no I/O."""
    with django_assert_num_queries(0):
        distributed_lock("k", timeout=1, lease=5, note="n", owner="me", atomic=True)


def test_lock_made_at_import_time() -> None:
    """A lock can be made before there are settings or apps."""
    program = "from dblocks import distributed_lock as d; print(type(d('k')).__name__)"
    result = run_python("-W", "error", "-c", program, timeout=30, env={})
    assert (result.returncode, result.stdout) == (0, "Lock\n"), result.stderr


PERMITS = {
    "text": ("2", TypeError, "'2'"),
    "flag": (True, TypeError, "True"),
    "fraction": (1.0, TypeError, "1.0"),
    "negative": (-1, ValueError, "-1"),
    "too many": (1000, ValueError, "1000"),
}
VERBS: dict[str, dict[str, Any]] = {
    "acquire": {"owner": "me", "lease": 60},
    "renew": {"owner": "me", "version": 1, "lease": 60},
    "release": {"owner": "me", "version": 1},
    "force_release": {},
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("permit", "error", "word"), PERMITS.values(), ids=PERMITS)
def test_permit(
    committed: None, verb: str, permit: object, error: type[Exception], word: str
) -> None:
    """A permit is a number from 0 to 999, for every verb of the manager."""
    with refused(error, "permit", word):
        getattr(DistributedLock.objects, verb)("k", permit=permit, **VERBS[verb])


@pytest.mark.parametrize("verb", ["renew", "release", "force_release"])
@pytest.mark.parametrize(
    ("version", "error"),
    [("7", TypeError), (7.0, TypeError), (True, TypeError), (2**63, ValueError)],
)
def test_version(
    committed: None, verb: str, version: object, error: type[Exception]
) -> None:
    """A fencing token is a number, for every verb of the manager and the engines."""
    values = VERBS[verb] | {"version": version}
    with refused(error, "version", repr(version)):
        getattr(DistributedLock.objects, verb)("k", **values)
    if verb == "force_release":
        with refused(error, "version", repr(version)):
            backends["locmem"].force_release("k", version=version)


@pytest.mark.parametrize("verb", ["force_release", "request_release"])
@pytest.mark.parametrize("engine", ["default", "locmem"])
@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"reason": None}, TypeError),
        ({"reason": "a\0b"}, ValueError),
        ({"by": "\ud800"}, ValueError),
    ],
    ids=["no reason", "NUL", "surrogate"],
)
def test_intervention(
    committed: None,
    verb: str,
    engine: str,
    values: dict[str, Any],
    error: type[Exception],
) -> None:
    """What goes on record is text that every database can keep."""
    act: Any = DistributedLock.objects if engine == "default" else backends[engine]
    with refused(error, *values):
        getattr(act, verb)("k", **values)


@pytest.mark.parametrize("verb", VERBS)
def test_key_without_room_for_a_permit(committed: None, verb: str) -> None:
    """Key and permit must fit into the column together; keys have no separator."""
    act = getattr(DistributedLock.objects, verb)
    with refused(InvalidKey, "253 characters with permit=7"):
        act("k" * 254, permit=7, **VERBS[verb])
    with refused(InvalidKey, "U+001F"):
        act("k\x1f7", **VERBS[verb])
