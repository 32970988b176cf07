"""What happened in a run, and whether a lock may have let it happen.

A history is one list of events of all processes, each with the moments before and
after it by ``time.monotonic()``, on Linux one clock for the whole machine. What
the database did, it did between these two; the checks only refuse what cannot be
explained by any moment in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

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
    #: Which of the key's permits, and of a grant how many were asked for.
    permit: int = 0
    permits: int = 1

    def __post_init__(self) -> None:
        if self.what not in WHATS:
            raise ValueError(f"what={self.what!r} is not one of {sorted(WHATS)}")

    @property
    def row(self) -> str:
        """What obeys the rules of a lock: the key, or one of its permits."""
        return row_name(self.key, self.permit)


def row_name(key: str, permit: int) -> str:
    """Name one of a key's permits; the first as the key itself."""
    return f"{key} permit {permit}" if permit else key


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
    for row in sorted({event.row for event in events}):
        mine = [event for event in events if event.row == row]
        grants = sorted((e for e in mine if e.what == "grant"), key=lambda e: e.before)
        faults += repeats(grants) + inversions(grants) + overlaps(mine)
    for key in sorted({event.key for event in events if event.permits > 1}):
        faults += crowds([event for event in events if event.key == key])
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


def certain_spans(events: list[Event]) -> list[Span]:
    """Return when grants of a key certainly were held, in the order of their starts."""
    spans = {
        (event.process, event.row, event.token): Span(event, event)
        for event in events
        if event.what == "grant"
    }
    for event in events:
        if event.what in {"held", "release", "write"}:
            span = spans.get((event.process, event.row, event.token))
            if span is not None and event.before > span.end:
                span.last = event
    # Whoever was stopped while asking may see its grant when it is over already: that
    # it was held is certain at no moment.
    certain = [span for span in spans.values() if span.start <= span.end]
    return sorted(certain, key=lambda span: span.start)


def overlaps(events: list[Event]) -> list[Fault]:
    """Grants that were certainly held while another one was."""
    faults = []
    latest: Span | None = None
    for span in certain_spans(events):
        if latest is not None and span.start < latest.end:
            faults.append(
                Fault("overlap", (latest.grant, latest.last, span.grant, span.last))
            )
        if latest is None or span.end > latest.end:
            latest = span
    return faults


def crowds(events: list[Event]) -> list[Fault]:
    """Permits of one key that there are not, and moments at which too many had one.

    Callers may disagree about the number: of those who asked for so many or fewer,
    never more than so many have one.
    """
    faults = [
        Fault("no such permit", (event,), f"{event.permit} of {event.permits}")
        for event in events
        if event.what == "grant" and event.permit >= event.permits
    ]
    spans = certain_spans(events)
    for number in sorted({span.grant.permits for span in spans}):
        inside: list[Span] = []
        for span in spans:
            if span.grant.permits > number:
                continue
            inside = [other for other in inside if span.start < other.end] + [span]
            if len(inside) > number:
                who = tuple(event for s in inside for event in (s.grant, s.last))
                faults.append(Fault("crowd", who, f"{len(inside)} of {number}"))
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


def numbered(history: Iterable[Event]) -> list[Event]:
    """Give each grant a number in place of the token that its engine doesn't have.

    Whoever has a row can't be granted it again, so all that a process tells of a row
    is about its last grant.
    """
    history = list(history)
    grants = [event for event in history if event.what == "grant"]
    number = {id(g): n for n, g in enumerate(sorted(grants, key=lambda g: g.after))}
    last: dict[tuple[str, str], int] = {}
    found = []
    for event in history:
        row = event.process, event.row
        last[row] = number.get(id(event), last.get(row, -1))
        found.append(replace(event, token=last[row]))
    return found


def take_overs(events: Iterable[Event]) -> int:
    """Count the grants of keys that nobody had given back: their leases had run out."""
    events = list(events)
    given_back = {(e.row, e.token) for e in events if e.what == "release"}
    granted = {(e.row, e.token) for e in events if e.what == "grant"}
    kept = granted - given_back
    return sum((row, token - 1) in kept for row, token in granted)


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
        final: By key, or by :attr:`Event.row` of a permit, how far the value went up.
    """
    acknowledged = Counter(event.row for event in events if event.what == "write")
    return [
        Fault(
            "lost update",
            (),
            f"{row}: {acknowledged[row]} acknowledged, {final.get(row, 0)} there",
        )
        for row in sorted({*acknowledged, *final})
        if acknowledged[row] != final.get(row, 0)
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
