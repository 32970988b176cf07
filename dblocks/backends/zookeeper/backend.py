"""The engine's verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import NotSupportedError
from kazoo.exceptions import NoAuthError

from ... import clock
from ...permits import SEPARATOR, apart, in_order
from ..base import BaseBackend
from ..gates import Gate
from ..messages import warning
from ..values import (
    Described,
    Entry,
    Grant,
    Granted,
    Reading,
    Renewal,
    Renewed,
    Request,
    Waiters,
)
from . import nodes
from .asking import Asking, granted_at, moment, reading
from .connection import ERRORS, PASSING, Address
from .places import Place
from .sessions import Held, Session, close, opened, patiently, session

T = TypeVar("T")

AT_ONCE = 1000
"""Folders that are read together when all are listed."""

FOR_OPERATORS = 10.0
"""Seconds for which operators' verbs, such as listing, wait for the server."""


class ZooKeeperBackend(BaseBackend):
    """Locks as ephemeral nodes in ZooKeeper, in one session per process.

    ``LEASE`` is the session's timeout, and so the lease of all locks of the process; a
    lock's ``lease=`` may not differ. The ensemble's clock finds a killed holder. A
    fencing token is the id of the transaction that made the holder's node.

    Not supported: ``hold_at_least``, guards, and one ``owner=`` in several processes,
    which counts as a different owner in each.

    ``LOCATION`` has the servers (``"zk1:2181,zk2:2181"`` or a list). ``KEY_PREFIX`` is
    the path of the locks; default: ``"dblocks"``. ``OPTIONS`` goes to kazoo's client.
    """

    has_shared_owners = False
    has_cooling = False
    has_own_leases = False
    has_movable_clock = False
    system = "zookeeper"
    errors = ERRORS
    setting_names = frozenset({"LOCATION", "KEY_PREFIX"})
    option_names = frozenset(
        {
            "auth_data",
            "ca",
            "certfile",
            "check_hostname",
            "connection_retry",
            "default_acl",
            "keyfile",
            "keyfile_password",
            "randomize_hosts",
            "sasl_options",
            "use_ssl",
            "verify_certs",
        }
    )

    def __init__(self, alias: str, config: dict[str, Any]) -> None:
        super().__init__(alias, config)
        options = tuple(sorted(self.options.items()))
        try:
            if "LOCATION" not in config:
                raise ValueError("LOCATION is missing, such as 'zk1:2181,zk2:2181'")
            self._address = Address(
                alias,
                nodes.hosts(config["LOCATION"]),
                nodes.root(config.get("KEY_PREFIX", "dblocks")),
                self.lease,
                options,
                repr(options),
            )
        except ValueError as error:
            raise ImproperlyConfigured(f"DBLOCKS[{alias!r}]: {error}.") from error

    def check_terms(self, lease: float, hold_at_least: float) -> None:
        self._check_lease(lease)
        if hold_at_least:
            raise NotSupportedError(
                f"hold_at_least={hold_at_least!r} can't be kept by the backend "
                f"{self.alias!r}: ZooKeeper frees a key with its holder's session."
            )

    def _check_lease(self, lease: float) -> None:
        if lease != self.lease:
            raise NotSupportedError(
                f"lease={lease!r} can't be had from the backend {self.alias!r}: a "
                f"lease is ZooKeeper's session timeout there, the same for all. Leave "
                f"it out, or set DBLOCKS[{self.alias!r}]['LEASE'], now {self.lease:g}."
            )

    def check_server(self, databases: Sequence[str]) -> Iterable[CheckMessage]:
        failures: tuple[type[Exception], ...] = (*ERRORS, ImproperlyConfigured)

        def ask(session: Session, give_up: float) -> None:
            session.children([self._address.root], give_up)

        try:
            patiently(self._address, 0.0, ask)
        except failures as error:
            yield warning(
                "W019",
                f"ZooKeeper at {self._address.hosts} can't be asked: {error}",
                "See that the ensemble runs, and that LOCATION, LEASE and OPTIONS "
                "are right.",
            )

    # Acquiring

    def try_acquire(self, request: Request, patience: float) -> Granted | Reading:
        asking = Asking(request, self.lease)
        return self._granted(asking, asking.one, request, patience)

    def try_acquire_all(
        self, request: Request, keys: Sequence[str], patience: float
    ) -> list[Granted] | None:
        asking = Asking(request, self.lease)
        ask = partial(asking.all, keys)
        return self._granted(asking, ask, request, patience)

    def _granted(
        self,
        asking: Asking,
        ask: Callable[[Session, float], T],
        request: Request,
        patience: float,
    ) -> T:
        try:
            if not request.explicit:
                return patiently(self._address, patience, ask)
            # An explicit owner's threads would refuse each other, or get two permits.
            with patiently(self._address, patience, Session.alone):
                return patiently(self._address, patience, ask)
        finally:
            asking.doom(opened(self._address))

    def gate(self, request: Request) -> Gate | None:
        return Place(partial(session, self._address), request)

    # Holding

    def reenter(self, renewal: Renewal, count: int | None, patience: float) -> Renewed:
        outcome = self._renewed([renewal], patience)
        if renewal.grant in outcome.extended:
            found = opened(self._address)
            held = self._held(found, renewal.grant)
            if found is not None and held is not None:
                with found.mutex:
                    held.count = held.count + 1 if count is None else count
        return outcome

    def renew(self, renewals: Sequence[Renewal]) -> Renewed:
        for _, lease in renewals:
            if lease > self.lease:
                self._check_lease(lease)
        try:
            return self._renewed(renewals, self.lease / 10)
        except PASSING:
            silent = opened(self._address)
            if silent is not None and silent.client.connected:
                # kazoo itself would try another server after two thirds of the lease.
                silent.handler.hang_up()
            raise

    def _renewed(self, renewals: Sequence[Renewal], patience: float) -> Renewed:
        outcome = Renewed()

        def ask(session: Session, give_up: float) -> None:
            sent = clock.monotonic()
            known = [(each, self._held(session, each.grant)) for each in renewals]
            alive = [(each, held) for each, held in known if held is not None]
            stats = session.stats([held.path for _, held in alive], give_up)
            for ((grant, lease), held), stat in zip(alive, stats, strict=True):
                if stat is not None and session.extend(held, sent + lease):
                    outcome.extended.add(grant)
                    if stat.version > held.written:
                        outcome.requested.add(grant)

        patiently(self._address, patience, ask)
        for grant, _ in renewals:
            if grant not in outcome.extended:
                outcome.lost[grant] = self.reason(grant)
        return outcome

    def _held(self, session: Session | None, grant: Grant) -> Held | None:
        if session is None:
            return None
        held = session.grants.get((grant.key, grant.owner))
        return held if held is not None and held.grant == grant else None

    def release(self, grant: Grant, *, count: int | None, deadline: float) -> bool:
        return grant in self.release_all([grant], count=count, deadline=deadline)

    def release_all(
        self, grants: Sequence[Grant], *, count: int | None, deadline: float
    ) -> set[Grant]:
        found, released, last = opened(self._address), set[Grant](), list[Held]()
        for grant in grants:
            held = self._held(found, grant)
            if found is None or held is None:
                continue
            with found.mutex:
                left = held.count - 1 if count is None else count
                if left > 0:
                    held.count = left
                    released.add(grant)
                elif found.drop(held):
                    last.append(held)
        if found is not None and last:
            released |= self._delete(found, last)
        return released

    def _delete(self, holder: Session, last: list[Held]) -> set[Grant]:
        """Delete the nodes of grants; return those that were current."""
        unanswered = set[int]()

        def ask(session: Session, give_up: float) -> set[Grant]:
            there = session.give_back(last, give_up, unanswered)
            return {held.grant for held, was in zip(last, there, strict=True) if was}

        try:
            current = patiently(self._address, 0.0, ask)
        except BaseException:
            for held in last:
                holder.doom(held.folder, held.mark)
            raise
        for held in last:
            if held.grant not in current:
                # Kept until the lease is over, because reason() looks it up.
                holder.grants.setdefault((held.grant.key, held.grant.owner), held)
        return current

    def close(self) -> None:
        close(self._address)

    def reason(self, grant: Grant) -> str:
        def ask(session: Session, give_up: float) -> str:
            for _, _, _, stat in _holders(session, [grant.key], give_up):
                if stat.czxid != grant.version:
                    return "taken"
                # Nobody renews the node of an earlier session.
                return "expired" if stat.ephemeralOwner == session.id else "backend"
            held = self._held(session, grant)
            lives = held is not None and held.session_id == session.id
            # Only a force release deletes a node whose session is alive.
            return "forced" if lives else "expired"

        return patiently(self._address, 0.0, ask)

    # Reading

    def read_all(
        self, keys: Sequence[str], patience: float | None = None
    ) -> dict[str, Reading]:
        def ask(session: Session, give_up: float) -> dict[str, Reading]:
            return {
                key: reading(content, stat, self.lease)
                for key, _, content, stat in _holders(session, keys, give_up)
            }

        return patiently(self._address, patience or 0.0, ask)

    # Operators

    def entries(self, key: str | None = None) -> Iterable[Entry]:
        def ask(session: Session, give_up: float) -> list[str]:
            sent = session.client.get_children_async(self._address.root)
            # None if somebody has deleted the path above the keys, and all locks.
            names = session.wait_for_node(sent, give_up)
            return [nodes.unescaped(name) for name in names or ()]

        rows = patiently(self._address, FOR_OPERATORS, ask)
        if key is not None:
            rows = [row for row in rows if apart(row)[0] == key]
        rows = sorted((x for x in rows if not nodes.is_queue(x)), key=in_order)
        for start in range(0, len(rows), AT_ONCE):
            yield from self._entries(rows[start : start + AT_ONCE])

    def _entries(self, rows: Sequence[str]) -> Iterator[Entry]:
        found, now = patiently(
            self._address, FOR_OPERATORS, partial(_holders_and_time, rows)
        )
        lease = timedelta(seconds=self.lease)
        for row, _, content, stat in found:
            grant = Grant(row, content.owner, stat.czxid)
            mine = self._held(opened(self._address), grant)
            yield Entry(
                row,
                content.owner,
                content.holder,
                content.note,
                hold_count=1 if mine is None else mine.count,
                version=stat.czxid,
                acquired_at=moment(granted_at(content, stat)),
                # The first waiter, which is just being let in, holds nothing yet.
                expires_at=now + lease if now and not content.waits else None,
                remaining=self.lease,
                release_requested_at=moment(stat.mtime) if content.since else None,
            )

    def waiters(self, key: str) -> Waiters:
        def ask(session: Session, give_up: float) -> Waiters:
            folders = [session.folder(key), session.folder(key + SEPARATOR)]
            plain, queue = session.children(folders, give_up)
            paths = [f"{folders[0]}/{name}" for name in (plain or ())[1:]]
            paths += [f"{folders[1]}/{name}" for name in queue or ()]
            found = [each for each in session.contents(paths, give_up) if each]
            return Waiters(
                len(found),
                min((moment(stat.ctime) for _, stat in found), default=None),
                tuple(content.holder for content, _ in found if content.holder),
            )

        return patiently(self._address, FOR_OPERATORS, ask)

    def ask_holder(self, row_key: str, version: int | None) -> Described | None:
        def ask(session: Session, give_up: float) -> Described | None:
            nonlocal version
            while True:
                found = _holders(session, [row_key], give_up)
                if not found or version not in (None, found[0][3].czxid):
                    return None
                _, path, content, stat = found[0]
                if content.waits:
                    return None
                # A repeated request is for this grant alone, not for the next holder's.
                version = stat.czxid
                asked = content._replace(since=granted_at(content, stat)).written()
                if content.since or session.write(path, asked, give_up, stat.version):
                    return content.owner, content.holder, stat.czxid

        return patiently(self._address, FOR_OPERATORS, ask)

    def end_grant(
        self, row_key: str, version: int | None, age: float
    ) -> Described | None:
        # The holder finds out with its next renewal.
        aim: list[tuple[str, Described]] = []
        unanswered = False

        def ask(session: Session, give_up: float) -> Described | None:
            nonlocal unanswered
            if not aim:
                aim.extend(_overdue(session, row_key, version, age, give_up))
            # After a lost reply somebody else may have the key: look no more, or that
            # grant would be ended.
            for path, grant in aim:
                may_be_done, unanswered = unanswered, True
                if session.remove([path], give_up)[0] or may_be_done:
                    return grant
            return None

        return patiently(self._address, FOR_OPERATORS, ask)


def _holders(
    session: Session, rows: Sequence[str], give_up: float
) -> list[tuple[str, str, nodes.Content, Any]]:
    """Return the holders of some keys: row key, path, content and stat of the node."""
    folders = [session.folder(row) for row in rows]
    seen = session.children(folders, give_up)
    paths = {
        row: f"{folder}/{places[0]}"
        for row, folder, places in zip(rows, folders, seen, strict=True)
        if places
    }
    found = session.contents(list(paths.values()), give_up)
    return [
        (row, path, *node)
        for (row, path), node in zip(paths.items(), found, strict=True)
        if node is not None
    ]


def _holders_and_time(
    rows: Sequence[str], session: Session, give_up: float
) -> tuple[list[tuple[str, str, nodes.Content, Any]], datetime | None]:
    """Return the holders of some keys, and the server's time.

    The time is ``None`` if there are no holders, or if this client may only read.
    """
    found = _holders(session, rows, give_up)
    times = (session.now(path, give_up) for _, path, _, _ in found)
    # Only a write tells the time: into the folder of a holder that is still there.
    now = None
    with suppress(NoAuthError):
        now = next(filter(None, times), None)
    return found, None if now is None else moment(now)


def _overdue(
    session: Session, row: str, version: int | None, age: float, give_up: float
) -> Iterator[tuple[str, Described]]:
    """Yield the node, and owner, holder and token, of a grant of this version and age.

    Args:
        version: ``None`` stands for any.
    """
    for _, path, content, stat in _holders(session, [row], give_up):
        if version not in (None, stat.czxid):
            continue
        if age:
            since = granted_at(content, stat)
            now = session.now(path, give_up) or 0
            # The first waiter, which is just being let in, has waited but held nothing.
            if content.waits or now - since < age * 1000:
                continue
        yield path, (content.owner, content.holder, stat.czxid)
