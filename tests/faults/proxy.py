"""A TCP proxy that can lose what a network can lose.

It stands between real clients and a real server on the loopback interface. Its
behaviour is changed while connections are open, from the test's thread::

    with Proxy(port) as proxy:
        proxy.swallow = True      # a black hole: nothing passes, nothing is closed
        proxy.lose_replies = 1    # the next answer is dropped, and its connection
        proxy.delay = (0.1, 0.3)  # seconds, for each piece in each direction
        proxy.reset_all()         # RST to both ends of every connection
"""

from __future__ import annotations

import random
import select
import socket
import struct
import threading
import time
from contextlib import suppress

HOST = "127.0.0.1"
PIECE = 65536


class Proxy:
    """Forwards connections to a port of this machine; ends with the block."""

    def __init__(self, port: int, *, seed: int = 0) -> None:
        #: Where new connections lead.
        self.target = port
        self._chance = random.Random(seed)
        self._listener = socket.create_server((HOST, 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._mutex = threading.Lock()
        self._links: set[_Link] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        #: Nothing passes any more; sockets stay open.
        self.swallow = False
        #: Seconds, from and to, for which each piece is late.
        self.delay = (0.0, 0.0)
        #: How likely a request that contains ``after`` resets its connection instead.
        self.resets = 0.0
        #: How many of the next answers to something that contains ``after`` are lost.
        self.lose_replies = 0
        self.after = b""
        #: How many of these answers pass before.
        self.skip = 0
        #: How many answers were lost, and connections reset.
        self.lost = 0
        self.reset = 0

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed = True
        self._listener.close()
        self.reset_all()
        for thread in self._threads:
            thread.join(timeout=5)

    def _start(self, function: object, *args: object) -> None:
        thread = threading.Thread(
            target=function,  # type: ignore[arg-type]
            args=args,
            name="proxy",
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def reset_all(self) -> None:
        """Reset every connection that is open."""
        with self._mutex:
            links = list(self._links)
        for link in links:
            link.broken = True

    def _accept(self) -> None:
        while not self._closed:
            try:
                ready, _, _ = select.select([self._listener], [], [], 0.1)
                if not ready:
                    continue
                client, _ = self._listener.accept()
            except (OSError, ValueError):
                return
            link = _Link(client)
            with self._mutex:
                self._links.add(link)
            self._start(self._serve, link)

    def _serve(self, link: _Link) -> None:
        try:
            if not self._connect(link):
                return
            while not self._closed and not link.broken:
                if self.swallow:
                    time.sleep(0.01)
                    continue
                ready, _, _ = select.select(link.sockets, [], [], 0.02)
                if self.swallow:
                    continue
                for source in ready:
                    if not self._pass_on(link, source):
                        return
        except (OSError, ValueError):
            link.broken = True
        finally:
            link.close()
            with self._mutex:
                self._links.discard(link)

    def _connect(self, link: _Link) -> bool:
        while self.swallow:
            if self._closed or link.broken:
                return False
            time.sleep(0.01)
        link.server = socket.create_connection((HOST, self.target), timeout=5)
        for end in link.sockets:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True

    def _pass_on(self, link: _Link, source: socket.socket) -> bool:
        data = source.recv(PIECE)
        if not data:
            return False
        if self.delay[1]:
            until = time.monotonic() + self._chance.uniform(*self.delay)
            while time.monotonic() < until and not self._closed:
                time.sleep(min(0.02, max(0.0, until - time.monotonic())))
        asks = source is link.client and self.after in data
        if asks and self._chance.random() < self.resets:
            self.reset += 1
            link.broken = True
            return False
        if source is link.client:
            link.asked = asks
            link.server.sendall(data)
            return True
        if self.lose_replies and link.asked and self.skip:
            self.skip -= 1
        elif self.lose_replies and link.asked:
            self.lose_replies -= 1
            self.lost += 1
            link.broken = True
            return False
        link.client.sendall(data)
        return True


class _Link:
    """One client's connection, and the proxy's own to the server."""

    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.server = client
        self.asked = False
        self.broken = False

    @property
    def sockets(self) -> list[socket.socket]:
        return [self.client, self.server]

    def close(self) -> None:
        """Close both ends; a broken link with RST, as a crashed machine would."""
        for end in {self.client, self.server}:
            if self.broken:
                with suppress(OSError):
                    linger = struct.pack("ii", 1, 0)
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            end.close()
