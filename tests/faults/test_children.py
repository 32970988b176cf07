"""F17: children of a process that holds a lock, however they are made."""

from __future__ import annotations

import json
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dblocks import distributed_lock
from tests.faults.crew import Crew
from tests.faults.scale import FULL, counts, pick
from tests.support.factories import stored
from tests.support.fixtures import in_memory
from tests.support.gunicorn import Gunicorn
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

Figures = dict[str, Any]

LEASE = scaled(1.5)

FORKED = {
    "inherited": 1,
    "held": False,
    "reason": "forked",
    "check": "forked",
    "released": False,
}
STRANGERS = {"obtained": False, "own": True}
"""A child has not what its parent has, and may have what it asks for itself."""


def findings(told: dict[str, Any]) -> dict[str, Any]:
    return {name: told[name] for name in told if name in {**FORKED, **STRANGERS}}


#: How a child is made, and what it has of its parent's.
METHODS = {
    "os.fork": FORKED,
    "fork": FORKED,
    "spawn": {"inherited": 0},
    "forkserver": {"inherited": 0},
}


def test_fork_while_holding(crew: Crew, key: str, figures: Figures) -> None:
    """What a child inherits counts as lost; the parent's lease goes on."""
    # Dozens of processes at once may keep one from running for seconds.
    lease = pick(3.0, 6.0)
    methods = [method for method in METHODS for _ in range(counts(1, 20))]
    if FULL:
        # A process that begins anew takes a second of Django.
        methods = methods[:40] + methods[40:60:5] + methods[60::5]
    parents = crew.fork_all(
        "fork_while_holding",
        [
            {"key": f"{key}:{number}", "lease": lease, "method": method}
            for number, method in enumerate(methods)
        ],
    )
    # First of all: whoever is killed leaves children behind.
    crew.finish(parents, within=4 * DEADLINE)
    for method, parent in zip(methods, parents, strict=True):
        child = parent.expect("child")
        assert findings(child) == {**METHODS[method], **STRANGERS}
        assert parent.expect("parent")["released"] is True
        # What can't be handed on isn't mistaken there for a lease of its own.
        assert parent.saw("pickled") is None
    figures |= Counter(f"children by {method}" for method in methods)


class Preloaded(Gunicorn):
    """gunicorn, whose master process holds a lock when it forks two workers."""

    def __init__(self, key: str, lease: float, log: Path) -> None:
        super().__init__(
            "tests.faults.preloaded_site",
            2,
            log,
            DBLOCKS_TEST_KEY=key,
            DBLOCKS_TEST_LEASE=str(lease),
        )

    def ask(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url, timeout=2 * DEADLINE) as answer:
            found: dict[str, Any] = json.load(answer)
            return found


@pytest.fixture
def preloaded(key: str, tmp_path: Path) -> Iterator[Preloaded]:
    """Serve what two workers find; their master holds the test's key."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    preloaded = Preloaded(key, LEASE, tmp_path / "log")
    yield preloaded
    preloaded.stop()


def test_preloaded_workers(preloaded: Preloaded, key: str, figures: Figures) -> None:
    """What was taken before the workers were forked is the master's, not theirs."""
    first = preloaded.ask()
    answers = {first["process"]: first}
    version, end = stored(key).version, stored(key).expires_at

    def both_answered() -> bool:
        answer = preloaded.ask()
        answers[answer["process"]] = answer
        return len(answers) == 2

    eventually(both_answered, what="an answer of each")
    for answer in answers.values():
        assert findings(answer) == {**FORKED, **STRANGERS}
    always(lambda: distributed_lock(key).locked(), during=LEASE + 0.1, what="held")
    row = stored(key)
    assert row.version == version
    assert row.expires_at > end
    preloaded.stop()
    stopped = time.monotonic()
    with distributed_lock(key).acquire(timeout=DEADLINE) as lease:
        assert lease.fencing_token == version + 1
    assert time.monotonic() - stopped < LEASE + SLACK
    figures["workers of gunicorn"] = len(answers)
