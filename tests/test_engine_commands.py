"""``locks`` and ``run_locked`` on the servers of the other engines."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from dblocks import LeaseLost, Lock
from dblocks.backends.zookeeper import backend as engine
from dblocks.backends.zookeeper import connection, sessions
from dblocks.conf import backends
from tests.support.commands import (
    SLEEP,
    Commands,
    finish,
    gone,
    run,
    running,
    running_locks,
    shell,
)
from tests.support.fixtures import OtherThread, fitting
from tests.support.services import HOST, free_port
from tests.support.timing import scaled
from tests.test_run_locked import TOLD, told, told_by_another

__all__ = ["told_by_another"]

pytestmark = pytest.mark.engine("redis", "redlock", "zookeeper")

Locks = Callable[..., Lock]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def locks(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run ``locks`` as from the command line: its status, stdout and stderr."""
    return running_locks(capfd)


def test_list_show_and_release(
    locks: Run, backend: str, key: str, lock: Locks, other: OtherThread
) -> None:
    """An operator sees who has a lock, and takes it away."""
    here = ["--backend", backend]
    lease = other.do(lock(lease=30, note="at work").acquire, timeout=0)
    status, out, err = locks("list", "--key", key, "--json", *here)
    assert (status, err) == (0, "")
    [listed] = json.loads(out)
    status, out, err = locks("show", key, "--json", *here)
    assert (status, err) == (0, "")
    shown = json.loads(out)
    for found in (listed, shown):
        assert (found["key"], found["state"], found["note"]) == (key, "held", "at work")
        assert found["fencing_token"] == lease.fencing_token
        assert "other" in found["holder"]
    status, out, err = locks("release", key, "--yes", "--reason", "host is gone", *here)
    assert (status, err) == (0, "")
    assert out.startswith(f"Released {key!r}")
    assert not lock().locked()
    with pytest.raises(LeaseLost) as caught:
        other.do(lease.renew)
    assert caught.value.reason == "forced"
    status, out, err = locks("list", "--key", key, "--state", "held", "--json", *here)
    assert (status, json.loads(out)) == (0, [])


def test_list_and_release_by_age(
    locks: Run, backend: str, key: str, lock: Locks, other: OtherThread
) -> None:
    """What has been held for longest comes first; what is younger is left alone."""
    here = ["--backend", backend]
    old = other.do(lock(f"{key}:old").acquire, timeout=0)
    time.sleep(scaled(1.5))
    young = other.do(lock(f"{key}:a").acquire, timeout=0)

    def listed() -> list[dict[str, Any]]:
        options = ["--key", f"{key}*", "--state", "held", "--sort", "age", "--json"]
        status, out, err = locks("list", *options, *here)
        assert (status, err) == (0, "")
        return list(json.loads(out))

    first, second = listed()
    assert (first["key"], second["key"]) == (old.key, young.key)
    assert first["age"] > second["age"] + scaled(1)
    assert first["expires_at"] > first["acquired_at"]
    release = ["release", "--key", f"{key}*", "--yes", *here]
    status, out, err = locks(*release, "--older-than", "1h")
    assert (status, out) == (1, "")
    assert "nothing that is taken matches" in err
    # What the younger one reaches only more than a second from now.
    status, out, err = locks(*release, "--older-than", f"{first['age']:.3f}")
    assert (status, err) == (0, "")
    assert out.startswith(f"Released {old.key!r}")
    assert [each["key"] for each in listed()] == [young.key]
    other.do(old.release)
    other.do(young.release)


def test_release_of_many(
    locks: Run,
    backend: str,
    key: str,
    lock: Locks,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All locks are listed once, not again for each that is released."""
    here = ["--backend", backend]
    engine = backends[backend]
    listed: list[str | None] = []
    entries = engine.entries

    def counted(which: str | None = None) -> Any:
        listed.append(which)
        return entries(which)

    leases = [other.do(lock(f"{key}:{n}").acquire, timeout=0) for n in range(3)]
    monkeypatch.setattr(engine, "entries", counted)
    status, out, _ = locks("release", "--key", f"{key}:*", "--yes", *here)
    assert (status, out.count("Released")) == (0, 3)
    assert listed == [None]
    for lease in leases:
        assert not other.do(lease.release)


@pytest.mark.usefixtures("told_by_another", "shared")
def test_what_a_command_is_told(
    backend: str,
    key: str,
    lock: Locks,
    other: OtherThread,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It learns the key and the fencing token, if the engine has tokens."""
    here = ["--backend", backend]
    before = other.do(lock().acquire, timeout=0)
    other.do(before.release)
    assert run(key, *here, "--", sys.executable, "-c", TOLD) == 0
    found = told(capfd.readouterr().out)
    token = found.pop("DBLOCKS_FENCING_TOKEN", None)
    assert found == {"DBLOCKS_KEY": key}
    after = other.do(lock(note="the note").acquire, timeout=0)
    if backends[backend].has_fencing_tokens:
        assert before.fencing_token < int(token or 0) < after.fencing_token
    else:
        assert token is None
    assert run(key, *here, "--", "echo", "ran") == 75
    out, err = capfd.readouterr()
    assert out == ""
    assert "the note" in err
    other.do(after.release)


def test_command_whose_lease_is_lost(
    commands: Commands, locks: Run, backend: str, key: str
) -> None:
    """After a force release the command is ended, and the status is 76."""
    file = commands.file()
    terms = fitting(backend, {"lease": scaled(3)})
    options = [f"--{name}={value}" for name, value in terms.items()]
    here = ["--backend", backend]
    process = commands.start("run_locked", key, *here, *options, *shell(SLEEP, file))
    [pid] = commands.pids(file)
    assert running(pid)
    assert locks("release", key, "--yes", *here)[0] == 0
    status, _out, err = finish(process)
    assert status == 76
    assert "the lease is lost, the lock was force-released" in err
    gone(pid)


AWAY = {
    "redis": lambda: f"redis://{HOST}:{free_port()}/0",
    "redlock": lambda: [f"redis://{HOST}:{free_port()}/0" for _ in range(5)],
    "zookeeper": lambda: f"{HOST}:{free_port()}",
}
"""Servers that aren't there."""


@pytest.fixture
def away(backend: str, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the alias of an engine whose servers are out of reach."""
    # It asks for ten seconds, three seconds at a time.
    monkeypatch.setattr(engine, "FOR_OPERATORS", 0.0)
    monkeypatch.setattr(connection, "CONNECT_WITHIN", 0.5)
    config = {**settings.DBLOCKS[backend], "LOCATION": AWAY[backend]()}
    settings.DBLOCKS = {**settings.DBLOCKS, "away": config}
    yield "away"
    if backend == "zookeeper":
        with suppress(ImproperlyConfigured):
            sessions.close(backends["away"]._address)  # type: ignore[attr-defined]


def test_out_of_reach(
    locks: Run, away: str, key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both commands say which engine doesn't answer, with status 69; nothing is run."""
    assert run(key, "--backend", away, "--", "echo", "ran") == 69
    out, err = capfd.readouterr()
    assert out == ""
    assert "the backend 'away' is out of reach: " in err
    assert len(err.splitlines()) == 1
    status, out, err = locks("list", "--backend", away)
    assert (status, out) == (69, "")
    assert "the backend 'away' is out of reach: " in err
