"""Wall clocks that are wrong, by libfaketime."""

from __future__ import annotations

from pathlib import Path

LIBRARY = "libfaketime.so.1"
FOLDER = Path("/usr/lib")


def faketime(**variables: str) -> dict[str, str]:
    """Return the environment in which a process sees another wall clock.

    Raises:
        FileNotFoundError: libfaketime is not installed.
    """
    libraries = sorted(FOLDER.glob(f"*/faketime/{LIBRARY}"))
    if not libraries:
        raise FileNotFoundError(
            f"{LIBRARY} is not installed, without which wrong clocks can't be tried. "
            f"On Debian: apt-get install faketime"
        )
    return {
        "LD_PRELOAD": str(libraries[0]),
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_NO_CACHE": "1",
        **variables,
    }
