"""Becomes the command, once told to: ``python -I -S launcher.py CHANNEL COMMAND …``.

A separate program that imports nothing of dblocks. ``CHANNEL`` is the number of an
inherited socket. The launcher enters a new process group, writes ``READY`` and waits
for a byte. If the socket is closed instead, the supervisor has died or changed its
mind, and the launcher ends. If the command can't be started, its ``errno`` follows;
otherwise the socket is closed.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

READY = b"\n"
GO = b"!"


def main(channel: int, command: list[str]) -> None:
    # Undo what Python changed; a signal that the caller ignores stays ignored.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.set_inheritable(channel, False)
    os.setpgid(0, 0)
    try:
        os.write(channel, READY)
        if os.read(channel, 1) != GO:
            return
    except (BrokenPipeError, ConnectionResetError):
        return
    try:
        os.execvp(command[0], command)
    except OSError as error:
        number = error.errno or errno.ENOEXEC
    except ValueError:  # an empty name
        number = errno.ENOENT
    os.write(channel, b"%d" % number)
    os._exit(126)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
