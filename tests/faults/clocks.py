"""Wall clocks that are wrong, by libfaketime."""

from __future__ import annotations

from pathlib import Path

LIBRARY = "libfaketime.so.1"


def can_fake_time() -> bool:
    """Tell whether the library is installed."""
    return any(Path("/usr/lib").glob(f"*/faketime/{LIBRARY}"))


def faketime(**variables: str) -> dict[str, str]:
    """Return the environment in which a process sees another wall clock."""
    [library, *_] = sorted(Path("/usr/lib").glob(f"*/faketime/{LIBRARY}"))
    return {
        "LD_PRELOAD": str(library),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_NO_CACHE": "1",
        **variables,
    }
