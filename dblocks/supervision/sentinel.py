"""Ends a process group when its supervisor can't: ``python -I -S sentinel.py``.

A program of its own that imports nothing of dblocks, so that it starts in a moment. It
reads its orders from standard input, one line each, of which the last one counts:

``GROUP TERM_AT KILL_AT``
    Send the group SIGTERM, and SIGKILL, at these moments of :func:`now` unless another
    order comes first.
``done``
    The group is empty: end.

When the orders end without ``done`` the supervisor is dead: SIGKILL at once.
"""

from __future__ import annotations

import os
import select
import signal
import time

READY = b"\n"
MAX_SLEEP = 0.5
"""Seconds after which the clock is read again; a sleep doesn't count suspension."""
PATIENCE = 0.5
"""Seconds for which a group that was killed is killed again until it is empty.

SIGKILL can't be missed; but a zombie that nobody collects stays in the group."""

if hasattr(time, "CLOCK_BOOTTIME"):
    _CLOCK = time.CLOCK_BOOTTIME
else:
    _CLOCK = time.CLOCK_MONOTONIC


def now() -> float:
    """Return seconds on a clock that all processes of the machine share."""
    return time.clock_gettime(_CLOCK)


def send(group: int, number: int) -> bool:
    """Send a signal to a group; tell whether there is anybody in it."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def terminate(group: int) -> bool:
    """Ask a group to end; one that is stopped is woken to hear it."""
    return send(group, signal.SIGTERM) and send(group, signal.SIGCONT)


class Sentinel:
    """What the orders say, and what is done about them."""

    def __init__(self, orders: int) -> None:
        self.orders = orders
        self.buffer = b""
        self.group = 0
        self.term_at = self.kill_at = float("inf")
        self.done = False

    def run(self) -> None:
        while not self.done:
            if not self.listen(min(self.term_at, self.kill_at) - now()):
                self.kill_at = 0.0
            if self.done or not self.group:
                if self.kill_at == 0.0:
                    return
                continue
            if now() >= self.kill_at:
                self.kill()
                return
            if now() >= self.term_at:
                self.term_at = float("inf")
                terminate(self.group)

    def listen(self, timeout: float) -> bool:
        """Wait for orders; return whether more can come."""
        timeout = max(0.0, min(timeout, MAX_SLEEP))
        if not select.select([self.orders], [], [], timeout)[0]:
            return True
        data = os.read(self.orders, 65536)
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        for line in lines:
            if line == b"done":
                self.done = True
            else:
                group, term_at, kill_at = line.split()
                self.group = int(group)
                self.term_at, self.kill_at = float(term_at), float(kill_at)
        return bool(data)

    def kill(self) -> None:
        until = now() + PATIENCE
        while send(self.group, signal.SIGKILL) and now() < until:
            time.sleep(0.02)


def main(orders: int = 0, ready: int = 1) -> None:
    # Whoever ends the supervisor's session, group or service doesn't end this first.
    for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "ALRM", "TSTP"):
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)
    os.write(ready, READY)
    Sentinel(orders).run()


if __name__ == "__main__":
    main()
