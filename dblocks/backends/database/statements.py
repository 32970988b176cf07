"""The text of every statement on the lock table, in each database's dialect.

Django's ORM would build the same text anew for each lock, which takes longer than the
round trip. Values are named placeholders; constants are part of the text.

Three rules make the conditions hold on every database:

* All times are the database's clock, read when the statement begins. A statement
  that waits for the row keeps its earlier reading, which only ever refuses more.
* MySQL and MariaDB evaluate ``SET`` from left to right with the new values, so
  ``expires_at`` and ``owner``, on which other columns depend, come last.
* Rows stay until they are pruned, and pruning first raises a floor: the tokens of a new
  row can't start below it.
"""

from __future__ import annotations

from functools import cache, cached_property, lru_cache

from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ..values import PINNED_GRACE
from . import dialects
from .dialects import FLOOR, Dialect


class Statements:
    """The statements of one dialect, put together when first used."""

    def __init__(self, dialect: Dialect) -> None:
        d = self.dialect = dialect
        self.reading = (
            f"owner, holder, note, version, {d.utc('acquired_at')}, "
            f"{d.seconds_until('expires_at')}, {d.seconds_until('max_until')}"
        )
        # Under a lock: pruning raises the floor before it deletes.
        self.lowest = f"SELECT value FROM {FLOOR} WHERE id = 1 {d.share}"
        self.this_key = f"{d.key} = %(key)s"
        self.current = (
            f"{self.this_key} AND owner = %(owner)s "
            f"AND version = {d.integer('version')}"
        )
        self.over = f"expires_at <= {d.now}"
        self.cooled = f"WHEN min_until > {d.now} THEN min_until ELSE {d.now}"
        self.lease_end = end = d.after(d.now, d.seconds("lease"))
        # Never earlier than it was, never past the limit.
        self.extended = (
            f"{d.greatest}(expires_at, "
            f"CASE WHEN max_until < {end} THEN max_until ELSE {end} END)"
        )

    def _returning(self, *columns: str) -> str:
        return f" RETURNING {', '.join(columns)}" if self.dialect.returns_rows else ""

    def _from_now(self, slot: str, given: bool) -> str:
        d = self.dialect
        return d.after(d.now, d.seconds(slot)) if given else "NULL"

    def _granted(self, version: str, cools: bool, ends: bool, holds: str = "1") -> str:
        d = self.dialect
        return (
            f"hold_count = {holds}, version = {version}, "
            f"holder = %(holder)s, note = %(note)s, acquired_at = {d.now}, "
            f"min_until = {self._from_now('hold_at_least', cools)}, "
            f"max_until = {self._from_now('max_hold', ends)}, "
            f"release_requested_at = NULL, "
            f"expires_at = {self.lease_end}, owner = %(owner)s"
        )

    def _free(self, queued: bool, gate: str) -> str:
        if queued:
            return self.over
        # Only for the grace: the first in the queue may be a stopped process.
        d = self.dialect
        grace = d.after(d.now, f"-{PINNED_GRACE}")
        return d.yields(self.over, f"expires_at <= {grace}", gate)

    @cache  # noqa: B019
    def grant(self, queued: bool, cools: bool, ends: bool) -> str:
        """Grant a free key; a row that another transaction has locked counts as taken.

        A ``queued`` caller needn't yield to those that queue. A lock that ``cools`` has
        a ``hold_at_least``; one that ``ends`` has a ``max_hold``.
        """
        d = self.dialect
        version = d.next_version("version + 1")
        free = d.unlocked(f"{self.this_key} AND {self._free(queued, '%(gate)s')}")
        return (
            f"{d.at_once}UPDATE {d.table} SET {self._granted(version, cools, ends)} "
            f"WHERE {free}{self._returning('version', *d.session)}"
        )

    @lru_cache(maxsize=64)  # noqa: B019
    def grant_all(self, size: int, queued: bool, cools: bool, ends: bool) -> str:
        """Grant ``size`` keys if all are free and unlocked.

        Without ``RETURNING``, grant those that are; the reply tells how many, and when.
        """
        d = self.dialect
        free = self._free(queued, d.gate_of_key)
        text = d.all_or_none(
            self._granted("version + 1", cools, ends, d.timed_hold),
            f"{d.key} IN ({_keys(size)}) AND {free}",
            size,
        )
        return text + self._returning(d.key, "version", *d.session)

    @lru_cache(maxsize=64)  # noqa: B019
    def grant_any(self, size: int, queued: bool, cools: bool, ends: bool) -> str:
        """Grant one free and unlocked row of ``size``, preferably the ``first``."""
        d = self.dialect
        free = f"{d.key} IN ({_keys(size)}) AND {self._free(queued, '%(gate)s')}"
        change = self._granted("version + 1", cools, ends, d.first_hold)
        returned = self._returning(d.key, "version", *d.session)
        return d.update_any(change, free) + returned

    @lru_cache(maxsize=64)  # noqa: B019
    def versions(self, size: int, at_once: bool = False) -> str:
        """Read what an owner has; ``at_once``: only what was granted at one moment."""
        d = self.dialect
        granted = f" AND {d.microseconds('acquired_at')} = %(moment)s"
        return (
            f"SELECT {d.key}, version FROM {d.table} "
            f"WHERE {d.key} IN ({_keys(size)}) AND owner = %(owner)s"
            f"{granted if at_once else ''}"
        )

    @lru_cache(maxsize=64)  # noqa: B019
    def undo(self, size: int) -> str:
        """Release one hold of ``size`` grants, or all but ``count``; none cools."""
        d = self.dialect
        change = self._counted_to(f"ELSE {d.now}")
        return f"UPDATE {d.by_key} SET {change} WHERE {self._all_current(size)}"

    @cache  # noqa: B019
    def create(self, cools: bool, ends: bool) -> str:
        """Grant a key that has no row yet."""
        d = self.dialect
        return d.insert_unless_there(
            f"{d.table} ({d.key}, owner, holder, note, hold_count, version, "
            f"acquired_at, min_until, max_until, expires_at) VALUES "
            f"(%(key)s, %(owner)s, %(holder)s, %(note)s, 1, "
            f"{d.next_version(f'({self.lowest}) + 1')}, {d.now}, "
            f"{self._from_now('hold_at_least', cools)}, "
            f"{self._from_now('max_hold', ends)}, {self.lease_end})"
        ) + self._returning("version")

    @lru_cache(maxsize=64)  # noqa: B019
    def create_free(self, size: int) -> str:
        """Make rows for ``size`` keys, which are free."""
        d = self.dialect
        rows = ", ".join(
            f"(%(key{n})s, '', '', '', 0, ({self.lowest}), {d.now})"
            for n in range(size)
        )
        return d.insert_unless_there(
            f"{d.table} ({d.key}, owner, holder, note, hold_count, version, "
            f"expires_at) VALUES {rows}"
        )

    @cached_property
    def lockable(self) -> str:
        """Find a key's row unless a transaction has it locked."""
        d = self.dialect
        return (
            f"SELECT 1 FROM {d.by_key} WHERE {d.key} = %(key)s FOR UPDATE SKIP LOCKED"
        )

    @cached_property
    def create_floor(self) -> str:
        return self.dialect.insert_unless_there(f"{FLOOR} (id, value) VALUES (1, 0)")

    @cached_property
    def floor(self) -> str:
        return f"SELECT value FROM {FLOOR} WHERE id = 1"

    @cached_property
    def raise_floor(self) -> str:
        d = self.dialect
        higher = f"{d.greatest}(value, {d.integer('version')}) + {d.integer('spare')}"
        return f"UPDATE {FLOOR} SET value = {higher} WHERE id = 1"

    @cached_property
    def reenter(self) -> str:
        """Count one more hold of a grant, or set its holds, unless its row is locked.

        Subtracts ``forfeited`` holds, which ended without being released.
        """
        d = self.dialect
        left = f"hold_count - {d.integer('forfeited')}"
        up = f"CASE WHEN {left} > 0 THEN {left} ELSE 0 END + 1"
        live = f"{self.current} AND expires_at > {d.now}"
        unlocked = d.unlocked_or_pinned or d.unlocked
        return (
            f"{d.at_once}UPDATE {d.table} "
            f"SET hold_count = COALESCE({d.integer('count')}, {up}), "
            f"expires_at = {self.extended} WHERE {unlocked(live)}"
        )

    @lru_cache(maxsize=64)  # noqa: B019
    def read_all(self, size: int) -> str:
        d = self.dialect
        return (
            f"SELECT {d.key}, {self.reading} FROM {d.table} "
            f"WHERE {d.key} IN ({_keys(size)})"
        )

    @cached_property
    def free(self) -> str:
        """End a grant; the key stays taken, cooling, until its ``min_until``."""
        return f"UPDATE {self.dialect.table} SET {self._freed} WHERE {self.current}"

    @cached_property
    def _freed(self) -> str:
        return (
            f"expires_at = CASE {self.cooled} END, owner = '', hold_count = 0, "
            f"release_requested_at = NULL"
        )

    @cached_property
    def release(self) -> str:
        """Release one hold, or all but ``count``; the last one ends the grant."""
        return f"UPDATE {self.dialect.table} SET {self._counted} WHERE {self.current}"

    @cached_property
    def _counted(self) -> str:
        return self._counted_to(self.cooled)

    def _counted_to(self, end: str) -> str:
        left = f"COALESCE({self.dialect.integer('count')}, hold_count - 1)"
        return (
            f"expires_at = CASE WHEN {left} > 0 THEN expires_at "
            f"{end} END, owner = CASE WHEN {left} > 0 THEN owner ELSE '' END, "
            f"release_requested_at = CASE WHEN {left} > 0 THEN release_requested_at "
            f"END, hold_count = {left}"
        )

    @lru_cache(maxsize=64)  # noqa: B019
    def release_all(self, size: int, frees: bool) -> str:
        """:attr:`free` or :attr:`release` for ``size`` grants."""
        d = self.dialect
        change = self._freed if frees else self._counted
        text = f"UPDATE {d.by_key} SET {change} WHERE {self._all_current(size)}"
        return text + self._returning(d.key, "version")

    def _all_current(self, size: int) -> str:
        d = self.dialect
        rows = ", ".join(
            f"(%(key{n})s, %(owner{n})s, {d.integer(f'version{n}')})"
            for n in range(size)
        )
        # The keys alone as well: not every planner uses their index for row values.
        current = f"({d.key}, owner, version) IN ({d.rows(rows)})"
        return f"{d.key} IN ({_keys(size)}) AND {current}"

    @cached_property
    def force_release(self) -> str:
        """End one grant without its holder's consent, and fence the holder off."""
        d = self.dialect
        return (
            f"UPDATE {d.table} SET version = version + 1, hold_count = 0, "
            f"acquired_at = NULL, min_until = NULL, max_until = NULL, "
            f"release_requested_at = NULL, owner = '', expires_at = {d.now} "
            f"WHERE {self.current}"
        )

    @cached_property
    def request(self) -> str:
        """Note in a grant's row that its holder is asked to finish, and since when."""
        d = self.dialect
        return (
            f"UPDATE {d.table} "
            f"SET release_requested_at = COALESCE(release_requested_at, {d.now}) "
            f"WHERE {self.current} AND expires_at > {d.now}"
        )

    @lru_cache(maxsize=64)  # noqa: B019
    def requested(self, size: int) -> str:
        d = self.dialect
        return (
            f"SELECT {d.key}, version FROM {d.table} "
            f"WHERE {d.key} IN ({_keys(size)}) AND release_requested_at IS NOT NULL"
        )

    @lru_cache(maxsize=64)  # noqa: B019
    def pin(self, size: int) -> str:
        """Verify grants in a transaction, and keep others off until its end.

        In the order of the keys, so that two transactions can't deadlock.
        """
        d = self.dialect
        which = self._all_current(size)
        if not d.has_row_locks:
            # The database's only write lock serves as well.
            return (
                f"UPDATE {d.table} SET version = version "
                f"WHERE {which}{self._returning(d.key, 'version')}"
            )
        return (
            f"{d.pin_prefix}SELECT {d.key}, version FROM {d.by_key} "
            f"WHERE {which} ORDER BY {d.key} {d.strength}"
        )

    @lru_cache(maxsize=64)  # noqa: B019
    def touch(self, size: int) -> str:
        d = self.dialect
        which = f"{d.key} IN ({_keys(size)})"
        return f"UPDATE {d.by_key} SET {self._touched} WHERE {which}"

    @cached_property
    def _touched(self) -> str:
        if not self.dialect.certifies:
            return "version = version"
        # The other nodes hear of a row only if something in it changes.
        return f"expires_at = {self.dialect.after('expires_at', '0.000001')}"

    @lru_cache(maxsize=64)  # noqa: B019
    def touch_current(self, size: int) -> str:
        """Write the rows of ``size`` grants, in the order of :meth:`pin`."""
        d = self.dialect
        return (
            f"{d.pin_prefix}UPDATE {d.by_key} SET {self._touched} "
            f"WHERE {self._all_current(size)} ORDER BY {d.key}"
        )

    def delete(self, size: int) -> str:
        """Delete the rows of ``size`` keys."""
        return self.dialect.delete(f"{self.dialect.key} IN ({_keys(size)})", size)

    @cached_property
    def make_older(self) -> str:
        """Move all times; for tests."""
        d = self.dialect
        moments = "acquired_at", "expires_at", "min_until", "max_until"
        moved = [f"{each} = {d.after(each, d.seconds('ago'))}" for each in moments]
        return f"UPDATE {d.table} SET {', '.join(moved)}"

    @lru_cache(maxsize=64)  # noqa: B019
    def renew(self, size: int, wait: bool, overdue: bool) -> str:
        """Extend ``size`` grants; skip locked rows and overdue ones by default."""
        d = self.dialect
        current = self._all_current(size)
        if not overdue:
            current += f" AND expires_at > {d.now}"
        change = f"{d.tells_requests}expires_at = {self.extended}"
        text = f"UPDATE {d.by_key} SET {change} WHERE {current}"
        if not wait:
            text = d.update_unlocked(change, current, size)
        # The column itself: in SQLite 3.40's RETURNING every column IS NOT NULL.
        return text + self._returning(d.key, "version", "release_requested_at")


def _keys(size: int) -> str:
    return ", ".join(f"%(key{n})s" for n in range(size))


@cache
def of(dialect: Dialect) -> Statements:
    return Statements(dialect)


def on(connection: Connection) -> Statements:
    return of(dialects.of(connection))
