"""The text of every statement on the lock table, in each database's dialect.

Django's ORM would build the same text anew for each lock, which takes longer than the
round trip. Values are named placeholders; constants stand in the text.

Three rules make the conditions hold on every database:

* All times are the database's clock, read when the statement begins. A statement
  that waits for the row keeps its earlier reading, which only ever refuses more.
* MySQL and MariaDB evaluate ``SET`` from left to right with the new values, so
  ``expires_at`` and ``owner``, which other columns ask for, come last.
* Rows stay until they are pruned, and pruning raises a floor below which no token of
  a new row can start.
"""

from __future__ import annotations

from functools import cache, cached_property, lru_cache

from ..values import PINNED_GRACE
from .dialects import FLOOR, TABLE, Dialect

READING = ("owner", "holder", "note", "version")


class Statements:
    """The statements of one dialect, put together when first used."""

    def __init__(self, dialect: Dialect) -> None:
        d = self.dialect = dialect
        name = d.column
        self.table, self.floor = name(TABLE), name(FLOOR)
        self.key, self.owner = name("key"), name("owner")
        self.version, self.hold_count = name("version"), name("hold_count")
        self.acquired_at, self.expires_at = name("acquired_at"), name("expires_at")
        self.min_until, self.max_until = name("min_until"), name("max_until")
        columns = [*map(name, READING), d.utc(self.acquired_at)]
        columns += map(d.seconds_until, (self.expires_at, self.max_until))
        self.reading = ", ".join(columns)
        value = name("value")
        # Under a lock: pruning raises the floor before it deletes.
        self.lowest = f"SELECT {value} FROM {self.floor} WHERE id = 1 {d.share}"
        self.this_key = f"{self.key} = {d.text('key')}"
        self.current = (
            f"{self.this_key} AND {self.owner} = {d.text('owner')} "
            f"AND {self.version} = {d.integer('version')}"
        )
        self.over = f"{self.expires_at} <= {d.now}"
        lease_end = d.after(d.now, d.seconds("lease"))
        # Never earlier than it was, never past the limit.
        self.extended = (
            f"{d.greatest}({self.expires_at}, CASE WHEN {self.max_until} < {lease_end} "
            f"THEN {self.max_until} ELSE {lease_end} END)"
        )
        self.cooled = (
            f"CASE WHEN {self.min_until} > {d.now} THEN {self.min_until} "
            f"ELSE {d.now} END"
        )

    def _returning(self, *columns: str) -> str:
        return f" RETURNING {', '.join(columns)}" if self.dialect.returns_rows else ""

    def _from_now(self, slot: str, given: bool) -> str:
        d = self.dialect
        return d.after(d.now, d.seconds(slot)) if given else "NULL"

    @cache  # noqa: B019
    def grant(self, queued: bool, cools: bool, ends: bool) -> str:
        """Grant a free key; a row that another transaction has locked counts as taken.

        ``queued`` needn't yield to those that queue. Where it ``cools`` there is a
        ``hold_at_least``, where it ``ends`` a ``max_hold``.
        """
        d = self.dialect
        free = self.over
        if not queued:
            # The first of those that queue may be a process that was stopped.
            grace = d.after(d.now, f"-{PINNED_GRACE}")
            free = d.yields(self.over, f"{self.expires_at} <= {grace}")
        free = d.unlocked(f"{self.this_key} AND {free}")
        return (
            f"{d.at_once}UPDATE {self.table} SET "
            f"{self.version} = {d.next_version(f'{self.version} + 1')}, "
            f"{self.hold_count} = 1, "
            f"{d.column('holder')} = {d.text('holder')}, "
            f"{d.column('note')} = {d.text('note')}, "
            f"{self.acquired_at} = {d.now}, "
            f"{self.min_until} = {self._from_now('hold_at_least', cools)}, "
            f"{self.max_until} = {self._from_now('max_hold', ends)}, "
            f"{self.expires_at} = {d.after(d.now, d.seconds('lease'))}, "
            f"{self.owner} = {d.text('owner')} "
            f"WHERE {free}{self._returning(self.version, *d.session)}"
        )

    @cache  # noqa: B019
    def create(self, cools: bool, ends: bool) -> str:
        """Grant a key that has no row yet."""
        d = self.dialect
        return self._insert(
            self.table,
            **{name: d.text(name) for name in ("key", "owner", "holder", "note")},
            hold_count="1",
            version=d.next_version(f"({self.lowest}) + 1"),
            acquired_at=d.now,
            min_until=self._from_now("hold_at_least", cools),
            max_until=self._from_now("max_hold", ends),
            expires_at=d.after(d.now, d.seconds("lease")),
        ) + self._returning(self.version)

    @cached_property
    def create_free(self) -> str:
        d = self.dialect
        return self._insert(
            self.table,
            key=d.text("key"),
            owner="''",
            holder="''",
            note="''",
            hold_count="0",
            version=f"({self.lowest})",
            expires_at=d.now,
        )

    @cached_property
    def create_floor(self) -> str:
        return self._insert(self.floor, id="1", value="0")

    def _insert(self, table: str, **values: str) -> str:
        columns = ", ".join(map(self.dialect.column, values))
        row = f"{table} ({columns}) VALUES ({', '.join(values.values())})"
        return self.dialect.insert_unless_there.format(row)

    @cached_property
    def reenter(self) -> str:
        """Count one more hold of a grant, or set its holds, unless its row is locked.

        What ``forfeited`` says ended without being given back.
        """
        d = self.dialect
        left = f"{self.hold_count} - {d.integer('forfeited')}"
        up = f"CASE WHEN {left} > 0 THEN {left} ELSE 0 END + 1"
        live = f"{self.current} AND {self.expires_at} > {d.now}"
        return (
            f"{d.at_once}UPDATE {self.table} "
            f"SET {self.hold_count} = COALESCE({d.integer('count')}, {up}), "
            f"{self.expires_at} = {self.extended} "
            f"WHERE {d.unlocked(live)}"
        )

    @cached_property
    def read(self) -> str:
        return f"SELECT {self.reading} FROM {self.table} WHERE {self.this_key}"

    @lru_cache(maxsize=64)  # noqa: B019
    def read_all(self, size: int) -> str:
        keys = ", ".join(self.dialect.text(f"key{n}") for n in range(size))
        return (
            f"SELECT {self.key}, {self.reading} FROM {self.table} "
            f"WHERE {self.key} IN ({keys})"
        )

    @cached_property
    def free(self) -> str:
        """End a grant; until its ``min_until`` the key stays taken, cooling."""
        return (
            f"UPDATE {self.table} SET {self.expires_at} = {self.cooled}, "
            f"{self.owner} = '', {self.hold_count} = 0 WHERE {self.current}"
        )

    @cached_property
    def count(self) -> str:
        """Set how many holds of a grant are left."""
        return (
            f"UPDATE {self.table} SET {self.hold_count} = "
            f"{self.dialect.integer('count')} WHERE {self.current}"
        )

    @cached_property
    def count_down(self) -> str:
        """Give back one hold; the last one frees the key or leaves it cooling."""
        last = f"{self.hold_count} <= 1"
        return (
            f"UPDATE {self.table} SET "
            f"{self.expires_at} = CASE WHEN {last} THEN {self.cooled} "
            f"ELSE {self.expires_at} END, "
            f"{self.owner} = CASE WHEN {last} THEN '' ELSE {self.owner} END, "
            f"{self.hold_count} = {self.hold_count} - 1 WHERE {self.current}"
        )

    @cached_property
    def force_release(self) -> str:
        """End one grant over its holder's head, and fence the holder off."""
        return (
            f"UPDATE {self.table} SET {self.version} = {self.version} + 1, "
            f"{self.hold_count} = 0, {self.acquired_at} = NULL, "
            f"{self.min_until} = NULL, {self.max_until} = NULL, "
            f"{self.owner} = '', {self.expires_at} = {self.dialect.now} "
            f"WHERE {self.this_key} AND {self.version} = "
            f"{self.dialect.integer('version')}"
        )

    @cached_property
    def pin(self) -> str:
        """Verify a grant in a transaction and keep others off until its end."""
        d = self.dialect
        if not d.has_row_locks:
            # The database's only write lock does as well.
            return (
                f"UPDATE {self.table} SET {self.version} = {self.version} "
                f"WHERE {self.current}{self._returning(self.version)}"
            )
        return (
            f"{d.pin_prefix}SELECT {self.version} FROM {self.table} "
            f"WHERE {self.current} {d.strength}"
        )

    @cached_property
    def touch(self) -> str:
        return (
            f"UPDATE {self.table} SET {self.version} = {self.version} "
            f"WHERE {self.this_key}"
        )

    @cached_property
    def make_older(self) -> str:
        """Move all moments; for tests."""
        moments = self.acquired_at, self.expires_at, self.min_until, self.max_until
        ago = self.dialect.seconds("ago")
        moved = [f"{each} = {self.dialect.after(each, ago)}" for each in moments]
        return f"UPDATE {self.table} SET {', '.join(moved)}"

    @lru_cache(maxsize=64)  # noqa: B019
    def renew(self, size: int, wait: bool, overdue: bool) -> str:
        """Extend so many grants; not locked rows, nor overdue ones, unless told to."""
        d = self.dialect
        rows = [
            f"({d.text(f'key{n}')}, {d.text(f'owner{n}')}, {d.integer(f'version{n}')})"
            for n in range(size)
        ]
        keys = ", ".join(d.text(f"key{n}") for n in range(size))
        current = d.rows_in(f"{self.key}, {self.owner}, {self.version}", rows)
        # The keys by themselves lead every planner to the index.
        current = f"{self.key} IN ({keys}) AND {current}"
        if not overdue:
            current += f" AND {self.expires_at} > {d.now}"
        change = f"{self.expires_at} = {self.extended}"
        text = f"UPDATE {self.table} SET {change} WHERE {current}"
        if not wait:
            text = d.renew_unlocked(change, current, size)
        return text + self._returning(self.key, self.version)


@cache
def of(dialect: Dialect) -> Statements:
    return Statements(dialect)
