"""Becomes the command, once told to: ``python -I -S launcher.py GO STATUS COMMAND …``.

A program of its own that imports nothing of dblocks. ``GO`` and ``STATUS`` are the
numbers of inherited pipe ends. It enters a new process group, writes ``READY`` to
``STATUS`` and waits for a byte on ``GO``; without one, because the supervisor has died
or has thought better of it, it ends. If the command can't be started, the error's
number follows on ``STATUS``; otherwise that is closed.
"""

from __future__ import annotations

import errno
import os
import signal
import sys

READY = b"\n"
GO = b"!"


def main(arguments: list[str]) -> None:
    go, status = int(arguments[0]), int(arguments[1])
    command = arguments[2:]
    # What Python changed for itself; a signal ignored by the caller stays ignored.
    for name in ("SIGPIPE", "SIGXFZ", "SIGXFSZ"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.set_inheritable(go, False)
    os.set_inheritable(status, False)
    os.setpgid(0, 0)
    os.write(status, READY)
    if os.read(go, 1) != GO:
        os._exit(0)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        number = error.errno or errno.ENOEXEC
    except ValueError:  # an empty name, or NUL in a word
        number = errno.ENOENT
    os.write(status, b"%d" % number)
    os._exit(126)


if __name__ == "__main__":
    main(sys.argv[1:])
