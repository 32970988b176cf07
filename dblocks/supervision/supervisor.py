"""Supervises a command while it runs under a lease."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from ..exceptions import LeaseLost
from ..leases import Lease, Leases
from .group import Group, Sentinel, StartError
from .sentinel import READY, now, terminate
from .signals import Signals
from .terminal import Terminal

POLL = 0.5
"""The longest pause, in seconds, between two looks at lease and group."""

LAST_LOOKS = 0.02
"""The same once the command has ended: not every leftover's end sends a signal."""

ENDING = 0.1
"""Seconds that a killed group has to end before the key can be granted to others."""

STARTING = 15.0
"""Seconds within which each of the two helper programs must be ready."""

TELLING = 0.5
"""Seconds that a stop waits for a message that can't be written."""

_JOB_CONTROL = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


@dataclass
class Supervisor:
    """Runs a command while a lease lasts; several, while all of them do.

    The group gets every signal that this process gets. When a lease is lost, or has
    less than ``kill_after`` seconds left because renewals fail, the group gets SIGTERM;
    and SIGKILL when ``kill_after`` is over or the lease is about to be, whichever comes
    first. ``lease.remaining()`` ends before the database would grant the key again.
    When the lock is asked for, the group gets SIGTERM, once, and all the time that it
    needs.

    Attributes:
        kill_after: Seconds between SIGTERM and SIGKILL.
        heeds_requests: Whether the command is told that the lock is asked for.
        signals: Collects this process's signals, since before the lease was taken.
        say: Called with messages for the user; neither blocks nor raises.
        told: Waits until messages are written, that many seconds at most.
        ran: Whether the command was run.
        lost: Whether the lease was lost, or could not be trusted to last.
    """

    lease: Lease | Leases
    kill_after: float
    heeds_requests: bool
    signals: Signals
    say: Callable[[str], object]
    told: Callable[[float], object]
    ran = lost = False
    kill_at = deadline = 0.0
    term_at = float("inf")

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int | None:
        """Run the command and return when its group is empty.

        Returns:
            The exit status that a shell would report; ``None`` if a signal or the loss
            of the lease has prevented the start.
        """
        self.lease.on_lost(lambda lease: self.signals.wake())
        self.lease.on_release_requested(lambda lease: self.signals.wake())
        self.poll = min(POLL, self.lease.remaining() / 12)
        try:
            self.sentinel = Sentinel()
            try:
                with (
                    closing(Terminal()) as self.terminal,
                    Group(command, environment) as self.group,
                ):
                    started = self._prepare() and self._start()
                    if started:
                        self._watch()
            finally:
                self.sentinel.dismiss()
        except StartError as error:
            self.say(f"can't run {command[0]!r}: {error}")
            return 126
        if not started:
            self.lost = self.signals.ending() is None
            return None
        if self.group.error is not None:
            self.ran = False
            self.say(f"can't run {command[0]!r}: {os.strerror(self.group.error)}")
        return self.group.exit_status()

    def _prepare(self) -> bool:
        """Wait until both helper programs are ready, or the start is called off."""
        for helper in (self.group, self.sentinel):
            until = now() + STARTING
            while not self.signals.wait(self.poll, helper.ready):
                if self._called_off():
                    return False
                if now() >= until:
                    raise StartError(f"no sign of life within {STARTING:g} s")
            if os.read(helper.ready, 1) != READY:
                if self._called_off():
                    # The signal went to the helper, too, as Ctrl-C does.
                    return False
                raise StartError("a helper program has failed")
        return True

    def _called_off(self) -> bool:
        return self.signals.ending() is not None or self._time_left() <= 0

    def _start(self) -> bool:
        """Start the command, unless the start has been called off."""
        self._instruct()
        self._resume()
        if self._called_off():
            self.terminal.take_back(self.group.id)
            return False
        self.ran = True
        self.group.go()
        return True

    # While it runs

    def _watch(self) -> None:
        while True:
            self._watch_lease()
            for number in self.signals.take():
                if number == signal.SIGCONT:
                    self._resume()
                self.group.signal(number)
            if self.heeds_requests and self.lease.release_requested:
                self.heeds_requests = False
                self.group.signal(signal.SIGTERM)
                self.say("somebody asked for the lock: SIGTERM was sent to the command")
            stopped = self.group.reap()
            self.group.reap_adopted()
            if stopped in _JOB_CONTROL and self.terminal.exists:
                self._stopped(stopped)
            pause = self.poll
            if self.group.status is not None:
                killed = self.lost or self.group.status < 0
                self.terminal.take_back(self.group.id, restore_modes=killed)
                if self.group.is_empty():
                    return
                pause = min(pause, LAST_LOOKS)
            self.signals.wait(max(0.01, min(pause, self._time_left())))

    def _time_left(self) -> float:
        """Return the seconds until something has to be done about the lease."""
        if self.lost:
            return self.kill_at - now()
        return self.lease.remaining() - self.kill_after

    def _watch_lease(self) -> None:
        if self.lost:
            if now() >= self.kill_at:
                self.group.signal(signal.SIGKILL)
        elif self._time_left() <= 0 or now() >= self.term_at:
            self.lost = True
            self.kill_at = min(now() + self.kill_after, self.deadline)
            self.sentinel.order(self.group.id, float("inf"), self.kill_at)
            remaining = self.lease.remaining()
            why = loss(self.lease)
            if self.lease.lost_reason is None and remaining > self.kill_after:
                why = "this process stood still until the lease was nearly over"
            elif self.lease.lost_reason is None and remaining > 0:
                why = f"the lease could not be renewed and ends in {remaining:.1f} s"
            terminate(self.group.id)
            self.say(f"{why}: terminating the command")
        else:
            if not self.sentinel.alive():
                self._replace_sentinel()
            self._instruct()

    def _instruct(self) -> None:
        """Tell the sentinel when the lease ends."""
        # The clock first, so that a pause between the two makes the end come too early.
        end = now() + self.lease.remaining()
        margin = min(ENDING, self.kill_after / 4)
        if end - margin > self.deadline:
            self.deadline = end - margin
            # So that the sentinel terminates only if this process hasn't.
            self.term_at = end - self.kill_after + margin
            self.sentinel.order(self.group.id, self.term_at, self.deadline)

    def _replace_sentinel(self) -> None:
        self.say("the sentinel process has died: starting another")
        try:
            sentinel = Sentinel()
        except StartError as error:
            self.say(str(error))
        else:
            self.sentinel.dismiss()
            self.sentinel = sentinel
            self.deadline = 0.0

    # Job control

    def _stopped(self, number: int) -> None:
        """Give a stopped command the terminal, or stop as well."""
        if number != signal.SIGTSTP and self.terminal.give(self.group.id):
            self.group.signal(signal.SIGCONT)
            return
        had_terminal = self.terminal.take_back(self.group.id)
        self.say(
            f"stopping; the lease isn't renewed meanwhile, and the command is ended "
            f"in {max(0.0, self._time_left()):.0f} s, before the lease ends"
        )
        self.told(TELLING)
        self.signals.let_stops()
        # The whole job, as the terminal does, or the shell would go on waiting for it.
        os.killpg(os.getpgrp(), number)
        if number == signal.SIGTSTP and not self.signals.has(signal.SIGCONT):
            self._not_stopped(had_terminal)

    def _not_stopped(self, had_terminal: bool) -> None:
        """Go on: the kernel stops no process group that no shell could continue."""
        self.say("not stopped: no shell could continue it, so the command goes on")
        self._resume()
        if had_terminal:
            self.terminal.give(self.group.id)
        self.group.signal(signal.SIGCONT)

    def _resume(self) -> None:
        self.signals.catch_stops()
        if os.isatty(0) and os.isatty(1):
            self.terminal.give(self.group.id)


def loss(lease: Lease | Leases) -> str:
    """Say why a lease is lost; of several, which."""
    reason = lease.lost_reason or "expired"
    first = lease._first_lost() if isinstance(lease, Leases) else None
    which = "" if first is None else f" on {first.key!r}"
    return f"the lease{which} is lost, {LeaseLost._MEANINGS.get(reason, reason)}"
