"""What the figures come to: the first half page of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.contenders import BARE, DBLOCKS, SESSION_LOCK, Contender
from benchmarks.figures import Figure, number
from benchmarks.measurements import TITLES, ServerReport


@dataclass(frozen=True)
class Conclusion:
    """A sentence, and the figure that shows it on each server."""

    sentence: str
    what: str
    measurement: str
    figure: str
    contender: Contender = DBLOCKS


CONCLUSIONS = [
    Conclusion(
        "A free key costs two statements.",
        "Acquire and release, p50",
        "uncontended",
        "acquire and release, p50",
    ),
    Conclusion(
        "Most of that is the database's work.",
        "Two bare updates of a row, p50",
        "uncontended",
        "acquire and release, p50",
        BARE,
    ),
    Conclusion(
        "A lock that isn't stored is quicker.",
        "The server's session lock, p50",
        "uncontended",
        "acquire and release, p50",
        SESSION_LOCK,
    ),
    Conclusion(
        "The next waiter has the key within milliseconds.",
        "From a release to the grant in another process, p50",
        "hand-off",
        "hand-off, p50",
    ),
    Conclusion(
        "Nobody starves.",
        "Of sixteen processes at one key, the least-served by the most-served",
        "crowd",
        "least-served by most-served",
    ),
    Conclusion(
        "Renewal is nearly free.",
        "1,000 leases, in the process that holds them",
        "renewal",
        "1,000 leases, client",
    ),
]


def conclusions(reports: Mapping[str, ServerReport]) -> str:
    """Return what the figures come to, as a list."""
    lines = [
        f"* **{conclusion.sentence}**\n  {conclusion.what}: {', '.join(values)}."
        for conclusion in CONCLUSIONS
        if (values := list(_values(conclusion, reports)))
    ]
    limits = [
        verdict.met
        for report in reports.values()
        for result in report.results.values()
        for verdict in result.verdicts
        if verdict.has_limit
    ]
    missed = limits.count(False)
    lines.append(
        f"* **{missed or 'None'} of {len(limits)} [targets](#targets) "
        f"{'was' if missed == 1 else 'were'} missed.**"
    )
    return "\n".join(lines)


def _values(
    conclusion: Conclusion, reports: Mapping[str, ServerReport]
) -> Iterator[str]:
    for server, report in reports.items():
        if conclusion.measurement not in report.results:
            continue
        for figure in report.results[conclusion.measurement].figures:
            if _shows(figure, conclusion):
                unit = f" {figure.unit}" if figure.unit else ""
                yield f"{TITLES[server]} {number(figure.median)}{unit}"


def _shows(figure: Figure, conclusion: Conclusion) -> bool:
    wanted = (conclusion.figure, conclusion.contender.name)
    return (figure.name, figure.contender) == wanted
