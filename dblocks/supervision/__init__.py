"""Runs a command in its own process group, which must not outlive a lease.

``run_locked`` acquires the lock and runs a command here. Four processes take part:

the supervisor
    The management command itself. It forwards signals, watches the lease and waits
    until the group is empty (:mod:`~dblocks.supervision.supervisor`).
the launcher
    A small program that enters a new process group, waits to be told and becomes the
    command (:mod:`~dblocks.supervision.launcher`). Until then a signal or a lost lease
    can still prevent the command from running at all.
the sentinel
    A small program in its own session that ends the group when the supervisor can't:
    at once if the supervisor has died, at the lease's end if it is stopped
    (:mod:`~dblocks.supervision.sentinel`).
the command
    And whatever it starts in its group.
"""

from __future__ import annotations
