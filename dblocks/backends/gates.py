"""The queue for a key that spans processes."""

from __future__ import annotations

from abc import ABC, abstractmethod

QUEUE_FOR = 1.2
"""Seconds to queue at a gate at a time; meanwhile no signal is noticed."""

QUEUE_BRIEFLY = 0.4
"""The same while the key is or will soon be free: the gate's owner may be stopped."""


class Gate(ABC):
    """A queue for one key that spans processes; one object for each attempt.

    The gate is a doorbell, never the truth: its owner may look at the key, but only the
    engine says who holds the key. On database servers it is a session lock.
    """

    #: Whether the caller has it.
    held = False
    #: Whether a waiter gets it only while the key, or one of its permits, is free.
    is_bell = False
    #: Whether it shows others that its owner is waiting, and doesn't hold the key.
    shows_waiter = False
    #: The shortest wait, in seconds, that the engine can count.
    shortest = 0.0

    def patience(self, remaining: float) -> float:
        """Return how long to queue, in seconds, before the next look at the key.

        Args:
            remaining: Seconds until the key is free by itself.
        """
        return QUEUE_FOR if remaining > QUEUE_FOR else QUEUE_BRIEFLY

    @abstractmethod
    def enter(self, seconds: float) -> None:
        """Queue for this long at most; then see :attr:`held`.

        Raises:
            GateClosed: There is no gate: wait without it.
        """

    def show_waiter(self, waits: bool) -> None:
        """Show those who count waiters whether the gate's owner still waits."""
        self.shows_waiter = waits

    @abstractmethod
    def leave(self) -> None:
        """Let the next waiter in. Never raises; may be called from any thread."""


class GateClosed(Exception):
    """There is no gate to wait at; jittered pauses have to do."""
