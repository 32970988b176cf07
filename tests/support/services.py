"""Private database servers, and what stands before them, for tests and development.

A server runs from the binaries that are installed, on a free port of the loopback
interface, with its data in a temporary folder. It ends with the block, and within a
moment when the process that started it is killed::

    with MariaDB() as server:
        server.url("shop")  # mysql://root@127.0.0.1:23456/shop, created if missing
        server.kill()  # like a crash
        server.restart()  # the same port and data

``python -m tests.support.services mariadb postgres`` starts servers,
prints their URLs and runs them until it is interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, TypeVar

HOST = "127.0.0.1"
START_TIMEOUT = 60
STOP_TIMEOUT = 30
ATTEMPTS = 20

#: Where SQLite's files are, whose commits then don't wait for the disk; nor do those
#: of the servers. Without such a folder, wherever temporary files are.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

AnyServer = TypeVar("AnyServer", bound="Server")

# Below Linux' range of ephemeral ports: while a killed server is down, no outgoing
# connection can be given its port.
PORTS = range(20000, 32000)

# Ends the server and removes its folder when the pipe closes, which is when the
# process that started the server has died without stopping it.
SENTINEL = """
trap '' INT TERM HUP
read -r _
kill -KILL "$1"
sleep 1
rm -rf "$2"
"""


class ServerError(Exception):
    """A server is not installed, doesn't start or refuses an order."""


class Server:
    """A private server; in a ``with`` block it is started, stopped and removed.

    ``time_zone`` is the server's offset from UTC, such as ``"+05:00"``. ``arguments``
    are appended to the server's command line. By default commits don't wait for the
    disk, which survives ``kill()`` but not the machine's end; ``durable=True`` leaves
    the server's own defaults, for measurements.
    """

    name: ClassVar[str]
    account: ClassVar[str]
    package: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(
        self,
        *,
        time_zone: str | None = None,
        arguments: Sequence[str] = (),
        durable: bool = False,
    ) -> None:
        self.time_zone = time_zone
        self.arguments = list(arguments)
        self.durable = durable
        self.port = 0
        self._served = False
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._databases: set[str] = set()

    def __enter__(self: AnyServer) -> AnyServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # What each kind of server has to say.

    def initialise(self) -> None:
        """Create the data folder."""

    def command(self) -> list[str]:
        """The command that runs the server in the foreground."""
        raise NotImplementedError

    def ping(self) -> bool:
        """Whether this server, and no other, answers."""
        raise NotImplementedError

    def create(self, database: str) -> None:
        """Create a database unless it exists."""
        raise NotImplementedError

    def address(self, database: str) -> str:
        raise NotImplementedError

    # What is the same for all of them.

    @property
    def folder(self) -> Path:
        if self._folder is None:
            raise ServerError(f"{self.name} has not been started.")
        return self._folder

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerError(f"{self.name} is not running.")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def url(self, database: str = "dblocks") -> str:
        """The URL of a database, which is created if this server doesn't have it."""
        if database not in self._databases:
            self.create(database)
            self._databases.add(database)
        return self.address(database)

    def start(self) -> None:
        """Start the server, for the first time or after ``stop()`` and ``kill()``."""
        if self.running:
            return
        if self._folder is None:
            self._folder = self._make_folder()
            self.initialise()
        # Again, because somebody may take the port after it was chosen, and processes
        # of a killed server end a little later than their parent.
        deadline = time.monotonic() + START_TIMEOUT
        for _ in range(ATTEMPTS):
            if not self._served:
                self.port = free_port()
            self._launch()
            if self._answers(deadline):
                self._served = True
                return
            self.kill()
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
        raise ServerError(f"{self.name} doesn't start.\n{self._log_tail()}")

    def stop(self) -> None:
        """End the server in good order; its data stay until ``close()``."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """End the server by SIGKILL, as a crash would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop the server if it runs, and start it with the same port and data."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop the server and remove its data."""
        try:
            self.stop()
        finally:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
            self._served = False
            self._databases.clear()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a client program to its end, as the server's account."""
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_TIMEOUT,
            cwd=self.folder,
            env=self._environment(),
            check=False,
            **self._identity(),
        )

    def order(self, *command: str) -> str:
        """Run a client program that must succeed."""
        result = self.run(*command)
        if result.returncode:
            raise ServerError(f"{' '.join(command)}: {result.stdout}")
        return result.stdout

    def program(self, name: str, *folders: str) -> str:
        """The path of an installed program."""
        found = find_program(name, *folders)
        if found is None:
            raise ServerError(
                f"{name} is not installed. On Debian: apt-get install {self.package}"
            )
        return found

    def _make_folder(self) -> Path:
        # Not $TMPDIR: the path of a socket is short, and the server's account must
        # be able to reach the folder.
        parent = "/tmp" if os.access("/tmp", os.W_OK) else None
        folder = Path(tempfile.mkdtemp(prefix=f"dblocks-{self.name}-", dir=parent))
        if os.geteuid() == 0:
            try:
                account = pwd.getpwnam(self.account)
            except KeyError:
                folder.rmdir()
                raise ServerError(
                    f"There is no user {self.account!r}. "
                    f"On Debian: apt-get install {self.package}"
                ) from None
            os.chown(folder, account.pw_uid, account.pw_gid)
        return folder

    def _identity(self) -> dict[str, Any]:
        """Arguments of Popen: root runs the server as its own account."""
        if os.geteuid() != 0:
            return {}
        account = pwd.getpwnam(self.account)
        return {
            "user": account.pw_uid,
            "group": account.pw_gid,
            "extra_groups": (),
            "umask": 0o077,
        }

    def _environment(self) -> dict[str, str]:
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder),
            "LC_ALL": "C.UTF-8",
        }

    def _launch(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._environment(),
                # Ctrl-C is for the one who started the server.
                start_new_session=True,
                **self._identity(),
            )
        self._sentinel = subprocess.Popen(
            ["sh", "-c", SENTINEL, "sentinel", str(self.pid), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _answers(self, deadline: float) -> bool:
        while self.running and time.monotonic() < deadline:
            if self.ping():
                return True
            time.sleep(0.05)
        return False

    def _end(self, signum: signal.Signals) -> None:
        if self._sentinel is not None:
            # First, or it might one day kill another process with that id.
            self._sentinel.kill()
            self._sentinel.communicate()
            self._sentinel = None
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signum)
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def _log_tail(self) -> str:
        log = self.folder / "log"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return "\n".join(lines[-20:])


class MariaDB(Server):
    """A private MariaDB server; ``root`` has no password."""

    name = "mariadb"
    account = "mysql"
    package = "mariadb-server"
    server_program: ClassVar[str] = "mariadbd"

    def initialise(self) -> None:
        self.order(
            self.program("mariadb-install-db"),
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            "--auth-root-authentication-method=normal",
            "--skip-test-db",
            *self._settings(),
        )

    def command(self) -> list[str]:
        command = [
            self.program(self.server_program),
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            f"--socket={self._socket}",
            f"--port={self.port}",
            f"--bind-address={HOST}",
            "--max-connections=300",
            # By default 110: when hundreds connect at once to a busy server, the kernel
            # drops some, which try again after 1, 3 and 7 seconds.
            "--back-log=1000",
            *self._settings(),
        ]
        if self.time_zone is not None:
            command.append(f"--default-time-zone={self.time_zone}")
        if not self.durable:
            command.append("--innodb-flush-log-at-trx-commit=2")
        return command + self.arguments

    def ping(self) -> bool:
        return self.run(*self._client("mariadb-admin"), "ping").returncode == 0

    def create(self, database: str) -> None:
        self.order(
            *self._client("mariadb"),
            f"--execute=CREATE DATABASE IF NOT EXISTS `{database}`"
            " CHARACTER SET utf8mb4",
        )

    def address(self, database: str) -> str:
        return f"mysql://root@{HOST}:{self.port}/{database}"

    @property
    def _socket(self) -> Path:
        return self.folder / "socket"

    def _settings(self) -> list[str]:
        return [
            "--skip-name-resolve",
            "--innodb-log-file-size=32M",
            "--innodb-buffer-pool-size=64M",
        ]

    def _client(self, program: str) -> list[str]:
        return [
            self.program(program),
            "--no-defaults",
            f"--socket={self._socket}",
            "--user=root",
        ]


class MySQL(MariaDB):
    """A private MySQL server, or the one that ``MYSQL_TEST_URL`` names.

    Such as ``mysql://root:secret@127.0.0.1:3306``; databases are made there, and left
    alone otherwise.
    """

    name = "mysql"
    package = "mysql-server"
    server_program = "mysqld"
    given = os.environ.get("MYSQL_TEST_URL", "").rstrip("/")

    @classmethod
    def is_there(cls) -> bool:
        """Whether there is one to be had: MariaDB has a mysqld too."""
        server = find_program(cls.server_program)
        if cls.given or server is None:
            return bool(cls.given)
        version = subprocess.run(
            [server, "--version"], capture_output=True, text=True, check=False
        )
        return not version.returncode and "MariaDB" not in version.stdout

    def start(self) -> None:
        if not self.given:
            super().start()

    def initialise(self) -> None:
        self.order(
            self.program(self.server_program),
            "--no-defaults",
            "--initialize-insecure",
            f"--datadir={self.folder / 'data'}",
        )

    def command(self) -> list[str]:
        command = [*super().command(), "--mysqlx=OFF"]
        return command if self.durable else [*command, "--sync-binlog=0"]

    def create(self, database: str) -> None:
        # On the one that is given, the tests make theirs.
        if not self.given:
            super().create(database)

    def address(self, database: str) -> str:
        return f"{self.given}/{database}" if self.given else super().address(database)

    def _settings(self) -> list[str]:
        # Names are resolved: its root is root@localhost alone.
        return ["--innodb-buffer-pool-size=64M"]

    def _client(self, program: str) -> list[str]:
        return super()._client(program.replace("mariadb", "mysql").replace("-", ""))


class PostgreSQL(Server):
    """A private PostgreSQL server; ``postgres`` has no password."""

    name = "postgres"
    account = "postgres"
    package = "postgresql"
    stop_signal = signal.SIGINT  # ends sessions; SIGTERM would wait for them

    def initialise(self) -> None:
        self.order(
            self.program("initdb"),
            f"--pgdata={self.folder / 'data'}",
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-sync",
        )

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": HOST,
            "port": self.port,
            "unix_socket_directories": self.folder,
            "max_connections": 300,
        }
        if self.time_zone is not None:
            settings["timezone"] = posix_time_zone(self.time_zone)
        if not self.durable:
            settings["fsync"] = "off"
        command = [self.program("postgres"), "-D", str(self.folder / "data")]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        return command + self.arguments

    def ping(self) -> bool:
        return self.run(*self._client("pg_isready")).returncode == 0

    def create(self, database: str) -> None:
        psql = [*self._client("psql"), "--username=postgres", "--dbname=postgres"]
        query = f"SELECT 1 FROM pg_database WHERE datname = '{database}'"
        if "1" not in self.order(*psql, "--tuples-only", f"--command={query}"):
            self.order(*psql, f'--command=CREATE DATABASE "{database}"')

    def address(self, database: str) -> str:
        return f"postgres://postgres@{HOST}:{self.port}/{database}"

    def program(self, name: str, *folders: str) -> str:
        # Debian keeps the server's programs of each version in a folder of their own.
        versions = sorted(
            Path("/usr/lib/postgresql").glob("*/bin"),
            key=lambda folder: float(folder.parent.name),
            reverse=True,
        )
        return super().program(name, *map(str, versions), *folders)

    def _client(self, program: str) -> list[str]:
        return [self.program(program), f"--host={self.folder}", f"--port={self.port}"]


class Standby(PostgreSQL):
    """A streaming replica of a PostgreSQL server, by the name of ``standby``."""

    def __init__(self, *, primary: PostgreSQL, **options: Any) -> None:
        super().__init__(**options)
        self.primary = primary

    def initialise(self) -> None:
        self.order(
            self.program("pg_basebackup"),
            f"--pgdata={self.folder / 'data'}",
            f"--host={HOST}",
            f"--port={self.primary.port}",
            "--username=postgres",
            "--checkpoint=fast",
            "--write-recovery-conf",
            "--no-sync",
        )

    def command(self) -> list[str]:
        return [*super().command(), "-c", "cluster_name=standby"]

    def promote(self) -> None:
        """Make it the primary, and wait until it is."""
        psql = [*self._client("psql"), "--username=postgres", "--dbname=postgres"]
        self.order(*psql, "--command=SELECT pg_promote()")


class PgBouncer(Server):
    """A private PgBouncer before a PostgreSQL server, which must outlive it.

    ``upstream`` is that server's port; ``mode`` is ``session``, ``transaction`` or
    ``statement``.
    """

    name = "pgbouncer"
    account = "postgres"
    package = "pgbouncer"
    stop_signal = signal.SIGINT

    def __init__(
        self,
        *,
        upstream: int,
        mode: str = "transaction",
        size: int = 20,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.upstream, self.mode, self.size = upstream, mode, size

    def command(self) -> list[str]:
        path = self.folder / "config"
        path.write_text(
            "[databases]\n"
            f"* = host={HOST} port={self.upstream} user=postgres\n"
            "[pgbouncer]\n"
            f"listen_addr = {HOST}\n"
            f"listen_port = {self.port}\n"
            "unix_socket_dir =\n"
            "auth_type = any\n"
            f"pool_mode = {self.mode}\n"
            f"default_pool_size = {self.size}\n"
            "max_client_conn = 300\n"
            "ignore_startup_parameters = extra_float_digits\n"
        )
        path.chmod(0o644)
        return [self.program("pgbouncer"), str(path), *self.arguments]

    def ping(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, self.port), timeout=1),
        ):
            return self.running
        return False

    def create(self, database: str) -> None:
        """Databases are the server's."""

    def address(self, database: str) -> str:
        return f"postgres://postgres@{HOST}:{self.port}/{database}"


class Redis(Server):
    """A private Redis server, which keeps its data on disk."""

    name = "redis"
    account = "redis"
    package = "redis-server"

    def command(self) -> list[str]:
        return [
            self.program("redis-server"),
            *("--port", str(self.port)),
            *("--bind", HOST),
            *("--unixsocket", str(self._socket)),
            *("--dir", str(self.folder)),
            *("--save", ""),
            *("--appendonly", "yes"),
            *self.arguments,
        ]

    def ping(self) -> bool:
        return "PONG" in self._ask("ping")

    def has_written(self) -> bool:
        """Tell whether all is in the append-only file."""
        return "aof_buffer_length:0\n" in self._ask("info", "persistence")

    def _ask(self, *command: str) -> str:
        client = self.program("redis-cli")
        return self.run(client, "-s", str(self._socket), *command).stdout

    def create(self, database: str) -> None:
        """Databases of Redis are numbered and always there."""

    def url(self, database: str = "0") -> str:
        return super().url(database)

    def address(self, database: str) -> str:
        return f"redis://{HOST}:{self.port}/{database}"

    @property
    def _socket(self) -> Path:
        return self.folder / "socket"


class ZooKeeper(Server):
    """A private ZooKeeper server, alone or as one of an ensemble.

    ``members`` are the addresses of all servers of the ensemble, this one's included,
    each with its two ports for the others; ``number`` says which this one is. A tick
    is so short that sessions of half a second can be had.
    """

    name = "zookeeper"
    account = "zookeeper"
    package = "zookeeper default-jre-headless"

    TICK = 0.1

    def __init__(
        self, *, number: int = 0, members: Sequence[str] = (), **options: Any
    ) -> None:
        super().__init__(**options)
        self.number = number
        self.members = list(members)

    def command(self) -> list[str]:
        (self.folder / "config").write_text(self._configuration())
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        (data / "myid").write_text(f"{self.number}")
        if os.geteuid() == 0:
            account = pwd.getpwnam(self.account)
            for path in (data, data / "myid", self.folder / "config"):
                os.chown(path, account.pw_uid, account.pw_gid)
        return [
            self.program("java"),
            *("-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
            *([] if self.durable else ["-Dzookeeper.forceSync=no"]),
            *("-cp", "/usr/share/java/zookeeper.jar"),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            str(self.folder / "config"),
            *self.arguments,
        ]

    def _configuration(self) -> str:
        tick = round(self.TICK * 1000)
        lines = [
            f"dataDir={self.folder / 'data'}",
            f"clientPort={self.port}",
            f"clientPortAddress={HOST}",
            f"tickTime={tick}",
            f"minSessionTimeout={4 * tick}",
            "maxSessionTimeout=60000",
            "maxClientCnxns=0",
            "admin.enableServer=false",
            "4lw.commands.whitelist=*",
            "initLimit=100",
            "syncLimit=20",
        ]
        for number, member in enumerate(self.members, 1):
            lines.append(f"server.{number}={member}")
        return "\n".join(lines) + "\n"

    def ping(self) -> bool:
        # A server of an ensemble that has no majority says that it isn't serving.
        return "Mode: " in self.ask("srvr")

    def ask(self, word: str) -> str:
        """Return the answer to a command of four letters; empty without one."""
        with (
            contextlib.suppress(OSError),
            socket.create_connection((HOST, self.port), timeout=1) as connection,
        ):
            connection.sendall(word.encode())
            return b"".join(iter(lambda: connection.recv(4096), b"")).decode()
        return ""

    def create(self, database: str) -> None:
        """There is one tree."""

    def url(self, database: str = "") -> str:
        return super().url(database)

    def address(self, database: str) -> str:
        return f"{HOST}:{self.port}"


SERVERS: dict[str, type[Server]] = {
    server.name: server for server in (MariaDB, MySQL, PostgreSQL, Redis, ZooKeeper)
}


@contextlib.contextmanager
def engine(name: str) -> Iterator[dict[str, str]]:
    """Run the servers of an engine of locks, which the environment names then."""
    with contextlib.ExitStack() as stack:
        match name:
            case "redis":
                yield {"REDIS_URL": stack.enter_context(Redis()).url()}
            case "redlock":
                urls = [stack.enter_context(Redis()).url() for _ in range(5)]
                yield {"REDLOCK_URLS": ",".join(urls)}
            case "zookeeper":
                yield {"ZOOKEEPER_HOSTS": stack.enter_context(ZooKeeper()).url()}
            case _:
                raise ServerError(f"There is no engine {name!r}.")


def find_program(name: str, *folders: str) -> str | None:
    """The path of a program, if it is installed; servers may be on no user's path."""
    usual = os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"
    return shutil.which(name, path=os.pathsep.join([*folders, *usual]))


_given: set[int] = set()


def free_port() -> int:
    """A port of the loopback interface that nobody listens on.

    Another one each time: who asked for one may not listen there yet.
    """
    # Not as the tests are shuffled, which begins anew with each of them.
    for port in random.SystemRandom().sample(PORTS, k=200):
        if port in _given:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            _given.add(port)
            return port
    raise ServerError("There is no free port.")


def posix_time_zone(offset: str) -> str:
    """The POSIX name, whose sign is the other way round, of an offset from UTC."""
    flipped = offset.translate(str.maketrans("+-", "-+"))
    return f"<{offset}>{flipped}"


def exit_on_signals() -> None:
    """Make SIGTERM and SIGINT unwind the stack, so that servers are stopped."""

    signals = (signal.SIGINT, signal.SIGTERM)

    def handler(signum: int, frame: FrameType | None) -> None:
        # Ctrl-C in a terminal reaches all processes, and a parent may pass it on: the
        # second one must not interrupt the stopping.
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + signum)

    # A shell ignores SIGINT for what it runs in the background.
    for each in signals:
        signal.signal(each, handler)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.services",
        description="Run private database servers until interrupted.",
    )
    parser.add_argument("servers", nargs="+", choices=SERVERS, metavar="SERVER")
    parser.add_argument("--time-zone", help="offset from UTC, such as +05:00")
    parser.add_argument("--durable", action="store_true", help="flush each commit")
    options = parser.parse_args()

    exit_on_signals()
    with contextlib.ExitStack() as stack:
        for name in options.servers:
            server = SERVERS[name](time_zone=options.time_zone, durable=options.durable)
            stack.enter_context(server)
            print(f"{name}: {server.url()} (process {server.pid})", flush=True)
        print("Ctrl-C stops them.", flush=True)
        signal.pause()


if __name__ == "__main__":
    main()
