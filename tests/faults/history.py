"""What happened in a run, and whether a lock may have let it happen.

A history is one list of events of all processes, each with the moments before and
after it by ``time.monotonic()``, on Linux one clock for the whole machine. What
the database did, it did between these two; the checks only refuse what cannot be
explained by any moment in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tests.faults.scale import LATE, SEED

#: A grant came back; an observation that the lease was held; a release that the
#: database carried out; a write that was acknowledged; news of a loss.
WHATS = frozenset({"grant", "held", "release", "write", "loss"})


@dataclass(frozen=True)
class Event:
    """Something that a process did, or saw, between two moments."""

    what: str
    key: str
    token: int
    before: float
    after: float
    process: str
    #: Of a loss: the moment by which it had to be known.
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.what not in WHATS:
            raise ValueError(f"what={self.what!r} is not one of {sorted(WHATS)}")


@dataclass(frozen=True)
class Fault:
    """What a lock must not have done, and the events that show it."""

    kind: str
    events: tuple[Event, ...]
    note: str = ""

    def __str__(self) -> str:
        lines = [
            f"{self.kind}: {self.note}",
            *(f"    {event}" for event in self.events),
        ]
        return "\n".join(lines)


@dataclass
class Span:
    """The time in which a grant certainly was held."""

    grant: Event
    last: Event

    @property
    def start(self) -> float:
        return self.grant.after

    @property
    def end(self) -> float:
        return self.last.before


def check(events: Iterable[Event], *, late: float = 0.05) -> list[Fault]:
    """Return everything in a history that a lock must not let happen."""
    events = list(events)
    faults = []
    for key in sorted({event.key for event in events}):
        mine = [event for event in events if event.key == key]
        grants = sorted((e for e in mine if e.what == "grant"), key=lambda e: e.before)
        faults += repeats(grants) + inversions(grants) + overlaps(mine, grants)
    return faults + late_losses(events, late)


def repeats(grants: list[Event]) -> list[Fault]:
    """Tokens that were granted twice."""
    by_token: dict[int, list[Event]] = {}
    for grant in grants:
        by_token.setdefault(grant.token, []).append(grant)
    return [
        Fault("repeated token", tuple(same), f"{token} was granted {len(same)} times")
        for token, same in by_token.items()
        if len(same) > 1
    ]


def inversions(grants: list[Event]) -> list[Fault]:
    """Tokens smaller than that of a grant that had returned before they were asked."""
    faults = []
    returned = sorted(grants, key=lambda event: event.after)
    highest: Event | None = None
    done = 0
    for grant in grants:
        while done < len(returned) and returned[done].after < grant.before:
            if highest is None or returned[done].token > highest.token:
                highest = returned[done]
            done += 1
        if highest is not None and grant.token < highest.token:
            faults.append(Fault("token went back", (highest, grant)))
    return faults


def overlaps(events: list[Event], grants: list[Event]) -> list[Fault]:
    """Grants that were certainly held while another one was."""
    spans = {(grant.process, grant.token): Span(grant, grant) for grant in grants}
    for event in events:
        if event.what in {"held", "release", "write"}:
            span = spans.get((event.process, event.token))
            if span is not None and event.before > span.end:
                span.last = event
    faults = []
    latest: Span | None = None
    # Whoever was stopped while asking may see its grant when it is over already: that
    # it was held is certain at no moment.
    certain = [span for span in spans.values() if span.start <= span.end]
    for span in sorted(certain, key=lambda span: span.start):
        if latest is not None and span.start < latest.end:
            faults.append(
                Fault("overlap", (latest.grant, latest.last, span.grant, span.last))
            )
        if latest is None or span.end > latest.end:
            latest = span
    return faults


def late_losses(events: Iterable[Event], late: float) -> list[Fault]:
    """Losses that became known after their deadline."""
    return [
        Fault("late loss", (event,), f"{event.after - event.deadline:.3f} s too late")
        for event in events
        if event.what == "loss"
        and event.deadline is not None
        and event.after > event.deadline + late
    ]


def take_overs(events: Iterable[Event]) -> int:
    """Count the grants of keys that nobody had given back: their leases had run out."""
    events = list(events)
    given_back = {(e.key, e.token) for e in events if e.what == "release"}
    granted = {(e.key, e.token) for e in events if e.what == "grant"}
    return sum((key, token - 1) in granted - given_back for key, token in granted)


def late_renewals(left: Iterable[float], length: float) -> list[float]:
    """Return what was left of leases of a length that were renewed too late.

    Args:
        left: Seconds that a lease still had when it was renewed.
    """
    # A renewal is due when a third of what the lease starts from is gone.
    due = (length - max(0.1 * length, 0.25)) * 2 / 3
    return [seconds for seconds in left if due - seconds > length / 3]


def lost_updates(events: Iterable[Event], final: dict[str, int]) -> list[Fault]:
    """Keys whose final value is less than the number of acknowledged increments.

    Args:
        final: By key, how far the value went up.
    """
    acknowledged = Counter(event.key for event in events if event.what == "write")
    return [
        Fault(
            "lost update",
            (),
            f"{key}: {acknowledged[key]} acknowledged, {final.get(key, 0)} there",
        )
        for key in sorted({*acknowledged, *final})
        if acknowledged[key] != final.get(key, 0)
    ]


def verify(events: Iterable[Event], *, late: float = LATE) -> None:
    """Fail with the offending events unless the history is one of a lock."""
    faults = check(events, late=late)
    if faults:
        raise AssertionError(report(faults, SEED))


def report(faults: Iterable[Fault], seed: int) -> str:
    """Say what went wrong, for people."""
    texts = [str(fault) for fault in faults]
    more = f"\n… and {len(texts) - 20} more" if len(texts) > 20 else ""
    return f"seed {seed}: {len(texts)} faults\n" + "\n".join(texts[:20]) + more
