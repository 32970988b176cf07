"""A command in a process group of its own, which must not outlive a lease.

``run_locked`` takes the lock and runs a command here. Four processes take part:

the supervisor
    The management command itself. It forwards signals, watches the lease and waits
    until the group is empty (:mod:`~dblocks.supervision.supervisor`).
the launcher
    A small program that enters a new process group, waits for the word and becomes the
    command (:mod:`~dblocks.supervision.launcher`). Until then nothing of the command
    has run, so that a signal or a lost lease can still prevent it.
the sentinel
    A small program in a session of its own that ends the group when the supervisor
    can't: at once when that is gone, at the lease's end when it is stopped
    (:mod:`~dblocks.supervision.sentinel`).
the command
    With whatever it starts in its group.
"""

from __future__ import annotations
