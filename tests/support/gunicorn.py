"""gunicorn: an application in worker processes, on the test's database."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT, names_of_databases
from tests.support.timing import DEADLINE


class Gunicorn:
    """Workers that a master process forks when it has loaded their application.

    It finds the names of the test's databases in ``DBLOCKS_TEST_NAMES``.
    """

    def __init__(
        self,
        application: str,
        workers: int,
        log: Path,
        *options: str,
        **environment: str,
    ) -> None:
        with (
            socket.create_server(("127.0.0.1", 0), backlog=128) as listening,
            log.open("wb") as output,
        ):
            self.port: int = listening.getsockname()[1]
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gunicorn", application),
                    *("--bind", f"fd://{listening.fileno()}"),
                    *("--workers", str(workers), "--preload"),
                    *("--graceful-timeout", "1", "--no-control-socket", *options),
                ],
                cwd=ROOT,
                env={
                    **os.environ,
                    **names_of_databases(),
                    "DJANGO_SETTINGS_MODULE": "tests.settings",
                    **environment,
                },
                pass_fds=[listening.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """See it end."""
        self.terminate()
        try:
            self.process.wait(DEADLINE)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
