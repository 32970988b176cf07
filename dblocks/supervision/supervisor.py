"""What goes on while a command runs under a lease."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..leases import Lease
from .group import Group, Sentinel, StartError, exit_status, orphans_adopted
from .sentinel import now
from .signals import Signals
from .terminal import Terminal, is_interactive

POLL = 0.5
"""Seconds after which the lease and the group are looked at again, at the latest."""

FIRST_LOOK = 0.005
"""Seconds until it is first looked whether a group that lost its command is empty."""

STARTING = 15.0
"""Seconds within which the two small programs must be up."""

_JOB_CONTROL = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


@dataclass
class Outcome:
    """How it ended.

    Attributes:
        status: The exit status that a shell would report, or ``None`` when the command
            never started.
        lost: Whether the lease was lost, or could not be trusted to last.
        error: The number of the error for which the command could not be started.
    """

    status: int | None = None
    lost: bool = False
    error: int | None = None


class Supervisor:
    """Runs a command while a lease lasts.

    The group gets every signal that this process gets. When the lease is lost, or has
    less than ``kill_after`` seconds left because its renewal fails, the group gets
    SIGTERM, and SIGKILL when ``kill_after`` or the lease is over, whichever is first:
    ``lease.remaining()`` ends before the database would grant the key again.

    Args:
        lease: The lease, which renews itself.
        duration: For how long it is taken, in seconds.
        kill_after: Seconds between SIGTERM and SIGKILL.
        signals: Collects this process's signals, since before the lease was taken.
        say: Gets what is worth telling the user.
    """

    def __init__(
        self,
        lease: Lease,
        *,
        duration: float,
        kill_after: float,
        signals: Signals,
        say: Callable[[str], object],
    ) -> None:
        self.lease = lease
        self.kill_after = kill_after
        self.signals = signals
        self.say = say
        self.poll = min(POLL, duration / 12)
        self.kill_at = float("inf")
        self.ending = False
        self.suspended = False
        self.deadline = 0.0
        self.look_again = FIRST_LOOK
        # The sentinel's SIGTERM comes only if this process's own has not.
        self.late = min(0.1, kill_after / 4)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> Outcome:
        """Run the command and return when its group is empty.

        Raises:
            StartError: No process could be started.
        """
        self.lease.on_lost(lambda lease: self.signals.wake())
        self.sentinel = Sentinel()
        try:
            with (
                Terminal() as self.terminal,
                orphans_adopted(),
                Group(command, environment) as self.group,
            ):
                if self._prepare() and self._start():
                    self._watch()
        finally:
            self.sentinel.dismiss()
        if not self.group.started:
            return Outcome(lost=self.signals.ending() is None)
        status = exit_status(self.group.status or 0, self.group.error)
        return Outcome(status, self.ending, self.group.error)

    def _prepare(self) -> bool:
        """Have the two small programs stand ready."""
        if not self._wait_for(self.group.ready):
            return False
        self.group.confirm()
        if not self._wait_for(self.sentinel.ready):
            return False
        if not self.sentinel.alive():
            raise StartError("the sentinel has failed")
        return True

    def _wait_for(self, file: int) -> bool:
        """Wait until a file can be read; not if the start is called off meanwhile."""
        until = now() + STARTING
        while not self._called_off():
            if self.signals.wait(self.poll, file):
                return True
            if now() >= until:
                raise StartError(f"no sign of life within {STARTING:g} s")
        return False

    def _called_off(self) -> bool:
        return self.signals.ending() is not None or self._is_running_out()

    def _is_running_out(self) -> bool:
        return self.lease.remaining() <= self.kill_after

    def _start(self) -> bool:
        """Start the command unless something speaks against it."""
        self._instruct()
        if is_interactive():
            self.terminal.give(self.group.id)
        self.signals.catch_stops()
        if self._called_off():
            self.terminal.take_back(self.group.id)
            return False
        self.group.go()
        return True

    # While it runs

    def _watch(self) -> None:
        while True:
            self._watch_lease()
            self._forward()
            stopped = self.group.reap()
            if stopped is not None:
                self._stopped(stopped)
            if self.group.status is not None:
                killed = self.ending or self.group.status < 0
                self.terminal.take_back(self.group.id, restore_modes=killed)
                if self.group.is_empty():
                    return
            self.signals.wait(self._until_next())

    def _until_next(self) -> float:
        pause = self.poll
        if self.group.status is not None:
            pause = min(pause, self.look_again)
            self.look_again *= 1.5
        if self.ending:
            return min(pause, max(0.01, self.kill_at - now()))
        return min(pause, max(0.0, self.lease.remaining() - self.kill_after))

    def _watch_lease(self) -> None:
        if not self.ending:
            if not self._is_running_out():
                self._instruct()
                self._watch_sentinel()
                return
            self.ending = True
            self.kill_at = min(now() + self.kill_after, self.deadline)
            self.sentinel.order(self.group.id, float("inf"), self.kill_at)
            self.say(self._why())
            self.group.terminate()
        if now() >= self.kill_at:
            self.group.signal(signal.SIGKILL)

    def _why(self) -> str:
        remaining = self.lease.remaining()
        if self.lease.lost_reason is None and remaining > 0:
            return (
                f"the lease could not be renewed and ends in {remaining:.1f} s: "
                f"terminating the command"
            )
        return f"{loss(self.lease)}: terminating the command"

    def _instruct(self) -> None:
        """Tell the sentinel how long the lease lasts by now."""
        started = now()  # before the reading, which may be late
        remaining = self.lease.remaining()
        if started + remaining > self.deadline:
            self.deadline = started + remaining
            term_at = self.deadline - self.kill_after + self.late
            self.sentinel.order(self.group.id, term_at, self.deadline)

    def _watch_sentinel(self) -> None:
        if self.sentinel.alive():
            return
        self.say("the sentinel process has died: starting another")
        try:
            sentinel = Sentinel()
        except StartError as error:
            self.say(str(error))
            return
        self.sentinel.dismiss()
        self.sentinel = sentinel
        self.deadline = 0.0
        self._instruct()

    def _forward(self) -> None:
        for number in self.signals.take():
            if number == signal.SIGCONT:
                self._resume()
            else:
                self.group.signal(number)

    # Job control

    def _stopped(self, number: int) -> None:
        """The command was stopped: give it the terminal, or stop as well."""
        if number not in _JOB_CONTROL or not self.terminal.exists:
            return
        wants_terminal = number != signal.SIGTSTP
        if wants_terminal and self.terminal.give(self.group.id):
            self.group.signal(signal.SIGCONT)
            return
        self.terminal.take_back(self.group.id)
        self.say(
            f"stopped; the lease isn't renewed meanwhile and ends in "
            f"{self.lease.remaining():.0f} s, and the command with it"
        )
        self.suspended = True
        self.signals.let_stops()
        # As the terminal does: the whole job, or the shell would go on waiting for it.
        os.killpg(os.getpgrp(), number)

    def _resume(self) -> None:
        if self.suspended:
            self.suspended = False
            self.signals.catch_stops()
            if is_interactive():
                self.terminal.give(self.group.id)
        self.group.signal(signal.SIGCONT)


def loss(lease: Lease) -> str:
    """Say why a lease is lost."""
    reason = lease.lost_reason or "expired"
    meaning = _MEANINGS.get(reason, reason)
    return f"the lease is lost, {meaning}"


_MEANINGS = {
    "expired": "its time ran out",
    "taken": "somebody else holds the lock now",
    "forced": "the lock was force-released",
    "backend": "the database could not be reached in time to renew it",
}
