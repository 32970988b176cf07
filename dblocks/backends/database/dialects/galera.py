"""The clocks of a Galera cluster, by which each node judges whether a lease is over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from django.core.checks import CheckMessage
from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ...messages import warning
from .base import ask

TOLERANCE = 0.5
"""Seconds by which two nodes' clocks may differ without a warning."""

CONNECT_TIMEOUT = 2
"""Seconds after which a node that doesn't answer isn't asked."""


def clock_findings(connection: Connection) -> Iterator[CheckMessage]:
    """W015: name the nodes whose clock differs from that of the node asked.

    A node that can't be reached from here, by the address that the cluster has for it,
    is passed over.
    """
    here = _ahead(connection)
    for node in _others(connection):
        with closing(node):
            try:
                node.ensure_connection()
                offset = _ahead(node) - here
            except Error:
                continue
        if abs(offset) > TOLERANCE:
            place = "{HOST}:{PORT}".format(**node.settings_dict)
            yield warning(
                "W015",
                f"The clock of the cluster's node {place} is {abs(offset):.1f} s "
                f"{'ahead of' if offset > 0 else 'behind'} that of the node behind "
                f"{connection.alias!r}.",
                "Each node judges by its own clock whether a lease is over: run NTP on "
                "all nodes, or send all writes to one.",
            )


def _others(connection: Connection) -> Iterator[Any]:
    """Make a connection, not open yet, to every node that has said its address."""
    _, addresses = ask(connection, "SHOW STATUS LIKE 'wsrep_incoming_addresses'")
    for address in addresses.split(","):
        host, _, port = address.strip().rpartition(":")
        if not host or not port.isdigit():
            continue
        node = connection.copy()
        options = node.settings_dict["OPTIONS"]
        options.pop("unix_socket", None)
        options["connect_timeout"] = CONNECT_TIMEOUT
        node.settings_dict.update(HOST=host.strip("[]"), PORT=port)
        yield node


def _ahead(connection: Connection) -> float:
    """Return how far a server's clock is ahead of this process's monotonic one."""
    before = time.monotonic()
    (seconds,) = ask(
        connection,
        "SELECT TIMESTAMPDIFF(MICROSECOND, '2000-01-01', UTC_TIMESTAMP(6)) / 1e6",
    )
    return float(seconds) - (before + time.monotonic()) / 2
