"""Checked by mypy and pyright alone: what type checkers make of decorated functions."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from dblocks import Lease, distributed_lock, transaction_lock
from dblocks.models import DistributedLock


@distributed_lock("order:{order_id}", timeout=2)
def pay(order_id: int, *, note: str = "") -> str:
    return f"{order_id}{note}"


@transaction_lock("stock:{product_id}")
def sell(product_id: int) -> bool:
    return product_id > 0


@distributed_lock(lambda number: f"job:{number}")
async def job(number: int) -> bytes:
    return bytes(number)


class Shop:
    @distributed_lock("shop:{self}")
    def close(self, hour: int) -> float:
        return hour / 2


paid: str = pay(5, note="n")
sold: bool = sell(product_id=7)
closed: float = Shop().close(18)
as_callable: Callable[[int], Coroutine[Any, Any, bytes]] = job

pay("5")  # type: ignore[arg-type]
sell()  # type: ignore[call-arg]
wrong: int = pay(5)  # type: ignore[assignment]
Shop().close("18")  # type: ignore[arg-type]


def blocks() -> None:
    with distributed_lock("k") as lease:
        held: Lease = lease
        token: int | None = held.fencing_token
    with transaction_lock("k") as row:
        maybe: DistributedLock | None = row
    tried: Lease | None = distributed_lock("k").try_acquire()
    print(token, maybe, tried)


async def ablocks() -> None:
    async with distributed_lock("k") as lease:
        await lease.arenew()
    got: Lease = await distributed_lock("k").aacquire(timeout=1)
    print(await got.arelease())
