"""A Galera cluster of MariaDB servers on the loopback interface."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterator
from pathlib import Path

from tests.support.services import HOST, MariaDB, ServerError, free_port

LIBRARY = Path("/usr/lib/galera/libgalera_smm.so")


class Node(MariaDB):
    """One node; ``members`` are the ports on which all nodes meet."""

    package = "mariadb-server galera-4"

    def __init__(self, members: list[int], number: int) -> None:
        super().__init__()
        self.members = members
        self.number = number
        self.joins = number > 0

    def initialise(self) -> None:
        if not LIBRARY.exists():
            raise ServerError(f"On Debian: apt-get install {self.package}")
        if not self.joins:
            return super().initialise()
        # A node that joins gets a copy of another one's data.
        (self.folder / "data").mkdir()
        if os.geteuid() == 0:
            account = pwd.getpwnam(self.account)
            os.chown(self.folder / "data", account.pw_uid, account.pw_gid)
        return None

    def command(self) -> list[str]:
        ports = self.members if self.joins else []
        group = self.members[self.number]
        options = {
            "gmcast.listen_addr": f"tcp://{HOST}:{group}",
            "ist.recv_addr": f"{HOST}:{free_port()}",
            "gcache.size": "16M",
        }
        settings = {
            "on": "ON",
            "provider": LIBRARY,
            "cluster-name": f"dblocks-{self.members[0]}",
            "cluster-address": "gcomm://" + ",".join(f"{HOST}:{p}" for p in ports),
            "node-address": f"{HOST}:{group}",
            "node-incoming-address": f"{HOST}:{self.port}",
            "node-name": f"node{self.number}",
            "sst-method": "rsync",
            "sst-receive-address": f"{HOST}:{free_port()}",
            "provider-options": ";".join(f"{k}={v}" for k, v in options.items()),
        }
        return [
            *super().command(),
            "--binlog-format=ROW",
            "--innodb-autoinc-lock-mode=2",
            *(f"--wsrep-{name}={value}" for name, value in settings.items()),
        ]

    def query(self, sql: str) -> str:
        """What a statement returns, as text."""
        client = [*self._client("mariadb"), "--batch", "--skip-column-names"]
        return self.order(*client, f"--execute={sql}").strip()

    def ping(self) -> bool:
        return super().ping() and "Synced" in self.query(
            "SHOW STATUS LIKE 'wsrep_local_state_comment'"
        )


@contextlib.contextmanager
def cluster(size: int = 3) -> Iterator[list[Node]]:
    """Run a cluster; every node takes writes."""
    members = [free_port() for _ in range(size)]
    nodes: list[Node] = []
    with contextlib.ExitStack() as stack:
        for number in range(size):
            nodes.append(stack.enter_context(Node(members, number)))
        yield nodes
