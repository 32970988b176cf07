"""The names, signatures and exceptions that users may rely on, written down once more.

A line that has to change here breaks somebody's code: that takes a deprecation first.
"""

from __future__ import annotations

import argparse
import inspect
import pkgutil
from collections.abc import Iterator

import pytest
from django.core.management import load_command_class

import dblocks
from dblocks import InvalidKey, LeaseLost, LockError, LockTimeout
from dblocks.models import DistributedLock, State
from dblocks.validation import Unset

INTERFACE = """
distributed_lock(*keys, permits=1, timeout=SETTING, lease=SETTING, renew=True, \
max_hold=None, hold_at_least=0, owner=None, atomic=False, on_locked=None, note='', \
backend='default')
transaction_lock(*keys, timeout=SETTING, nowait=False, skip_locked=False, \
backend='default')
current_lease(key=None)
make_key(*parts)

Lock.acquire(self, timeout=SETTING)
Lock.try_acquire(self, timeout=0)
Lock.locked(self)
Lock.aacquire(self, timeout=SETTING)
Lock.atry_acquire(self, timeout=0)
Lock.alocked(self)
Lock.key
Lock.__enter__(self)
Lock.__aenter__(self)
Lock.__call__(self, function)
TransactionLock.key
TransactionLock.__enter__(self)
TransactionLock.__call__(self, function)

Lease.key
Lease.permit
Lease.owner
Lease.backend
Lease.fencing_token
Lease.held
Lease.remaining(self)
Lease.check(self)
Lease.guard(self, using=None)
Lease.renew(self, lease=None)
Lease.release(self)
Lease.on_lost(self, callback)
Lease.lost_reason
Lease.release_requested
Lease.on_release_requested(self, callback)
Lease.arenew(self, lease=None)
Lease.arelease(self)
Lease.__enter__(self)
Lease.__aenter__(self)

Leases.owner
Leases.backend
Leases.held
Leases.remaining(self)
Leases.check(self)
Leases.guard(self, using=None)
Leases.renew(self, lease=None)
Leases.release(self)
Leases.on_lost(self, callback)
Leases.lost_reason
Leases.release_requested
Leases.on_release_requested(self, callback)
Leases.arenew(self, lease=None)
Leases.arelease(self)
Leases.__enter__(self)
Leases.__aenter__(self)

FencedModel.save(self, *args, fence=Ellipsis, **kwargs)
FencedModel.asave(self, *args, fence=Ellipsis, **kwargs)
fencing.FencedQuerySet.fenced_update(self, fence, /, **values)
fencing.FencedQuerySet.afenced_update(self, fence, /, **values)

models.LockQuerySet.acquire(self, key, *, owner, lease, holder='', note='', \
permit=None)
models.LockQuerySet.renew(self, key, *, owner, version, lease, permit=None)
models.LockQuerySet.release(self, key, *, owner, version, permit=None)
models.LockQuerySet.force_release(self, key, *, version=None, older_than=None, \
by=None, reason='', permit=None)
models.LockQuerySet.request_release(self, key, *, version=None, by=None, reason='', \
permit=None)
models.LockQuerySet.prune(self, older_than, *, batch_size=200, progress=None)
models.LockQuerySet.waiters(self, key)
models.LockQuerySet.stale(self, older_than)
models.LockQuerySet.for_update(self, key, *, nowait=False, skip_locked=False, \
timeout=None)
models.LockQuerySet.held(self)
models.LockQuerySet.expired(self)
models.LockQuerySet.cooling(self)
models.LockQuerySet.free(self)
models.LockQuerySet.with_state(self)

exceptions.LockTimeout(key, *, timeout, holder='', note='', acquired_at=None, \
retry_after=0.0, permit=None, backend='default', cooling=False)
exceptions.LeaseLost(key, *, fencing_token=None, reason)

signals.lock_acquired
signals.lock_released
signals.lock_lost
signals.lock_timed_out
signals.lock_force_released
signals.lock_release_requested

telemetry.instrument(*, meter_provider=None, tracer_provider=None)
telemetry.uninstrument()

test.hold_elsewhere(*keys, permits=1, lease=SETTING, note='', backend='default')
test.move_clock(seconds, *, backend='default')
test.amove_clock(seconds, *, backend='default')
test.clear_locks(backend='default')
test.aclear_locks(backend='default')

models.DistributedLock.lock_key
models.DistributedLock.permit
admin.DistributedLockAdmin
conf.backends

backends.database.DatabaseBackend
backends.locmem.LocMemBackend
backends.base.BaseBackend.entries(self, key=None)
backends.base.BaseBackend.waiters(self, key)
backends.base.BaseBackend.force_release(self, key, *, version=None, older_than=None, \
by=None, reason='', permit=None)
backends.base.BaseBackend.request_release(self, key, *, version=None, by=None, \
reason='', permit=None)
backends.redis.RedisBackend
backends.zookeeper.ZooKeeperBackend
middleware.LockTimeoutMiddleware
"""

LINES = [line for line in INTERFACE.split("\n") if line]

OPTIONS = {
    "run_locked": "--wait --no-wait --lease --hold-at-least --note --backend --permits "
    "--skip-if-locked --conflict-exit-code --lost-exit-code --kill-after --shell "
    "--django --ignore-requests",
    "locks list": "--state --key --holder --sort --limit --json --watch --database "
    "--backend",
    "locks show": "--permit --json --database --backend",
    "locks release": "--permit --key --holder --fencing-token --older-than --reason "
    "--yes --ask --database --backend",
    "locks prune": "--older-than --dry-run --database --backend",
}


def describe(path: str, *, called: bool) -> str:
    """Return a path and, of what is called, its arguments, as they are above."""
    found = pkgutil.resolve_name(f"dblocks.{path}")
    if not called:
        return path
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for parameter in inspect.signature(found).parameters.values()
    ]
    signature = str(inspect.Signature(parameters))
    return path + signature.replace(repr(Unset()), "SETTING")


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.partition("(")[0])
def test_signatures(line: str) -> None:
    """Each name is there, with these arguments and these defaults."""
    path, called, _ = line.partition("(")
    assert describe(path, called=bool(called)) == line


def test_names_of_the_package() -> None:
    """What ``dblocks`` itself offers: no name less, and none more by accident."""
    assert dblocks.__all__ == [
        "FencedModel",
        "InvalidKey",
        "Lease",
        "LeaseLost",
        "Leases",
        "Lock",
        "LockError",
        "LockTimeout",
        "TransactionLock",
        "current_lease",
        "distributed_lock",
        "make_key",
        "transaction_lock",
    ]


@pytest.mark.parametrize("name", ["Lease", "Leases"])
def test_nothing_else_is_public(name: str) -> None:
    """A member that gets no line above begins with an underscore."""
    found = getattr(dblocks, name)
    listed = {line.partition("(")[0] for line in LINES}
    of_mappings = {"get", "items", "keys", "values"} if name == "Leases" else set()
    public = {member for member in dir(found) if not member.startswith("_")}
    assert {f"{name}.{member}" for member in public - of_mappings} <= listed


def test_exceptions() -> None:
    """What is caught by what, and what each tells."""
    assert issubclass(LockTimeout, LockError)
    assert issubclass(LeaseLost, LockError)
    assert issubclass(InvalidKey, LockError)
    assert issubclass(InvalidKey, ValueError)
    assert LockError.__bases__ == (Exception,)
    timeout = LockTimeout("k", timeout=3, holder="h", note="n", retry_after=2)
    assert (timeout.key, timeout.timeout, timeout.holder) == ("k", 3, "h")
    assert (timeout.note, timeout.acquired_at, timeout.retry_after) == ("n", None, 2)
    assert (timeout.permit, timeout.backend) == (None, "default")
    lost = LeaseLost("k", fencing_token=7, reason="taken")
    assert (lost.key, lost.fencing_token, lost.reason) == ("k", 7, "taken")
    assert "'k' (fencing token 7) is lost" in str(lost)
    assert "'k' is lost" in str(LeaseLost("k", reason="taken"))


def test_model() -> None:
    """The columns, the states and the permissions."""
    options = DistributedLock._meta
    assert [field.name for field in options.get_fields()] == [
        "key",
        "owner",
        "holder",
        "note",
        "hold_count",
        "version",
        "acquired_at",
        "expires_at",
        "min_until",
        "max_until",
        "release_requested_at",
    ]
    assert set(State.values) == {"held", "expired", "cooling", "free"}
    codenames = [codename for codename, _ in options.permissions]
    assert (options.default_permissions, codenames) == (
        ("view",),
        ["force_release_distributedlock"],
    )


def options_of(parser: argparse.ArgumentParser) -> Iterator[tuple[str, set[str]]]:
    """Yield the name and the options of a command and of its subcommands."""
    options: set[str] = set()
    for action in parser._actions:
        options |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for name, choice in action.choices.items():
                for _, of_choice in options_of(choice):
                    yield f" {name}", of_choice
    yield "", options


@pytest.mark.parametrize("command", ["run_locked", "locks"])
def test_commands(command: str) -> None:
    """The options of the commands."""
    parser = load_command_class("dblocks", command).create_parser("manage.py", command)
    found = {f"{command}{name}": options for name, options in options_of(parser)}
    for name, options in OPTIONS.items():
        if name.partition(" ")[0] == command:
            assert set(options.split()) - found[name] == set()
