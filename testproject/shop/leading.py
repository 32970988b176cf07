"""One leader among many processes: who leads chooses what the shop recommends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from django.utils import timezone

from dblocks import Lease, LeaseLost, distributed_lock

from .board import LEADER_LOCK
from .models import Product, Recommendation

#: Seconds between two looks at whether the lock is free, and for which a leader that
#: stepped down lets others lead.
REST = 1.0


@dataclass
class Candidate:
    """Leads when it is its turn, until it is told to stop."""

    name: str
    #: Seconds after which another leads, if this process is killed.
    lease: float
    #: Seconds between two recommendations.
    pause: float
    say: Callable[[str], object]
    stopping: bool = False

    def stop(self, signum: int | None = None, frame: object = None) -> None:
        """End after this step; also a signal's handler, so it does nothing more."""
        self.stopping = True

    def run(self) -> None:
        """Stand for leader again and again."""
        election = distributed_lock(LEADER_LOCK, lease=self.lease, note=self.name)
        while not self.stopping:
            lease = election.try_acquire(timeout=REST)
            if lease is not None:
                self._lead(lease)
                if not self.stopping:
                    time.sleep(REST)

    def _lead(self, lease: Lease) -> None:
        self.say(f"leads, term {lease.fencing_token}")
        try:
            with lease:
                while lease.held and not (lease.release_requested or self.stopping):
                    recommend(lease, self.name)
                    time.sleep(self.pause)
        except LeaseLost as error:
            self.say(f"no longer leads: {error}")
        else:
            self.say("steps down")


def recommend(lease: Lease, name: str) -> None:
    """Choose a product, at random.

    Raises:
        LeaseLost: A later leader has chosen already.
    """
    Recommendation.objects.get_or_create(pk=1)
    product = Product.objects.filter(stock__gt=0).order_by("?").first()
    Recommendation.objects.filter(pk=1).fenced_update(
        lease,
        product=product.name if product else "",
        chosen_by=name,
        chosen_at=timezone.now(),
    )
