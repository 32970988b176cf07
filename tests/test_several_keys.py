"""Several keys at once: all of them or none."""

from __future__ import annotations

from typing import Any

from dblocks import current_lease, distributed_lock


def test_in_one_order(key: str, backend: str) -> None:
    """The leases come by key, in an order of their own; each can be found."""
    names = [f"{key}:{number}" for number in (3, 1, 2)]
    for _ in range(2):
        with distributed_lock(*names, backend=backend) as leases:
            assert list(leases) == sorted(names)
            assert leases.held
            assert current_lease() is leases
            assert current_lease(names[0]) is leases[names[0]]
        assert not leases.held


def test_all_permits_are_taken(key: str, backend: str) -> None:
    """At most so many owners at a time."""

    def lock(**options: Any) -> Any:
        return distributed_lock(key, permits=3, backend=backend, **options)

    held = [lock(owner=f"owner {number}").acquire(timeout=0) for number in range(3)]
    assert {lease.permit for lease in held} == {0, 1, 2}
    assert lock().locked()
    assert lock().try_acquire() is None
    held[1].release()
    with lock() as lease:
        assert lease.permit == held[1].permit
    for lease in held:
        lease.release()
