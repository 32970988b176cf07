"""Ends a process group when its supervisor can't: ``python -I -S sentinel.py``.

A separate program that imports nothing of dblocks, to start quickly. It reads orders
from standard input, one a line, and the last one counts: ``GROUP TERM_AT KILL_AT``
means to send the group SIGTERM, and SIGKILL, at these moments of :func:`now` unless
another order comes first. If the input ends, the supervisor is dead: SIGKILL at once.
"""

from __future__ import annotations

import os
import select
import signal
import time

READY = b"\n"
MAX_SLEEP = 0.5
"""Seconds after which the clock is read again: sleeping doesn't count suspension."""
PATIENCE = 0.5
"""Seconds for which a killed group is killed again until it is empty.

SIGKILL can't be missed, but a zombie that nobody reaps stays in its group."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return the seconds of a clock that all processes of the machine share."""
    return time.clock_gettime(_CLOCK)


def send(group: int, number: int) -> bool:
    """Send a signal to a group; tell whether the group has any process."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def terminate(group: int) -> None:
    """Ask a group to end; wake it in case it is stopped."""
    send(group, signal.SIGTERM)
    send(group, signal.SIGCONT)


def main(orders: int = 0, ready: int = 1) -> None:
    # Signals to the supervisor's session, group or service must not end this one first.
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "TSTP"):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    os.write(ready, READY)
    group, buffer = 0, b""
    term_at = kill_at = float("inf")
    while True:
        # Read before it looks for orders: one that came in a standstill counts first.
        at = now()
        timeout = max(0.0, min(term_at, kill_at, at + MAX_SLEEP) - at)
        if select.select([orders], [], [], timeout)[0]:
            data = os.read(orders, 65536)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                group = int(line.split()[0])
                term_at, kill_at = map(float, line.split()[1:])
        elif at >= kill_at:
            break
        elif at >= term_at:
            term_at = float("inf")
            terminate(group)
    until = now() + PATIENCE
    while group and send(group, signal.SIGKILL) and now() < until:
        time.sleep(0.02)


if __name__ == "__main__":
    main()
