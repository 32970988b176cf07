"""The queue for a key that spans processes."""

from __future__ import annotations

from abc import ABC, abstractmethod

QUEUE_FOR = 1.2
"""Seconds for which one queues at a gate; a signal is not noticed in the meantime."""

QUEUE_BRIEFLY = 0.4
"""The same while the key is free or soon will be: who has the gate may be stopped."""


class Gate(ABC):
    """A queue for one key that spans processes; one object an attempt.

    The gate is a doorbell, never the truth: who has it may look at the key, and the
    engine alone says who holds that. On database servers it is a session lock.
    """

    #: Whether the caller has it.
    held = False
    #: Whether it is had only while the key is free, or a permit of it.
    is_bell = False
    #: Whether others are told that who has it waits, and doesn't hold the key.
    shows_waiter = False
    #: The shortest wait, in seconds, that the engine can count.
    shortest = 0.0

    def patience(self, remaining: float) -> float:
        """Return for how long, in seconds, to queue before the next look at the key.

        Args:
            remaining: Seconds until the key is free by itself.
        """
        return QUEUE_FOR if remaining > QUEUE_FOR else QUEUE_BRIEFLY

    @abstractmethod
    def enter(self, seconds: float) -> None:
        """Queue for this long at most; afterwards see :attr:`held`.

        Raises:
            GateClosed: It can't be had: wait without it.
        """

    def show_waiter(self, waits: bool) -> None:
        """Tell others, who count waiters, that who has it waits, or waits no more."""
        self.shows_waiter = waits

    @abstractmethod
    def leave(self) -> None:
        """Let the next one in. Never raises; may be called from any thread."""


class GateClosed(Exception):
    """There is no gate to wait at; jittered pauses have to do."""
