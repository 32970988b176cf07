"""Runs a command in its own process group, which must not outlive a lease.

Besides the command, and whatever it starts in its group, three processes take part. The
*supervisor* is ``run_locked`` itself. The *launcher* becomes the command once told to:
until then a signal or a lost lease can prevent the command from running at all. The
*sentinel* ends the group when the supervisor can't: at once if the supervisor has died,
at the lease's end if it is stopped.
"""

from __future__ import annotations

# Where there is none, as on Windows, there are no process groups either: nothing of
# this package can be imported.
import termios  # noqa: F401
