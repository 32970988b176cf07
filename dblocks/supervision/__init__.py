"""Runs a command in its own process group, which must not outlive a lease.

Besides the command, and whatever it starts in its group, three processes take part. The
*supervisor* is ``run_locked`` itself. The *launcher* becomes the command once told to:
until then a signal or a lost lease can prevent the command from running at all. The
*sentinel* ends the group when the supervisor can't: at once if the supervisor has died,
at the lease's end if it is stopped.
"""

from __future__ import annotations

# A system without termios, such as Windows, has no process groups either, and can
# import nothing of this package.
import termios  # noqa: F401
