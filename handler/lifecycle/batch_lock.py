"""A lock on a batch, renewed while one Lambda run works on it, and that run's deadline.

The lock is an owner and an expiry on the batch's item, changed by conditional writes. A run that
dies blocks the batch until the lock expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import uuid4

from tidemill.batch.errors import HandlerError
from tidemill.batch.model import Batch

from ..aws.sync import Aws
from ..deployment import Deployment

# Reserved before a run's deadline, to finish what the run has started.
RESERVE_SECONDS = 8.0
# Many messages may arrive for one batch; a run that died blocks the others for this long.
LOCK_SECONDS = 20.0
_RENEW_EVERY_SECONDS = 5.0


class Requeue(HandlerError):
    """Work is left for another run, which starts after a delay."""

    code = "come_back"

    def __init__(self, delay_seconds: float = 0.0) -> None:
        super().__init__(f"in {delay_seconds:.0f} s")
        self.delay_seconds = delay_seconds


class LockLost(HandlerError):
    """Another run has the batch: this one must publish nothing more for it."""

    code = "turn_lost"


@dataclass(slots=True)
class BatchLock:
    """A lock on a batch for one run of intake or finalize, with state that the run's steps share.

    `acquire` and `release` are writes that return the batch, which saves a read.
    In between `batch` is the batch at the start of the run, with this run's changes. `now` returns
    Unix seconds, `time_left` the seconds until the run's deadline.
    """

    aws: Aws
    deployment: Deployment
    batch: Batch
    time_left: Callable[[], float]
    now: Callable[[], float] = time.time
    lock_seconds: float = LOCK_SECONDS
    owner: str = field(default_factory=lambda: uuid4().hex)
    _renewed_at: float = 0.0

    @property
    def is_held(self) -> bool:
        """Return whether `batch` shows this lock, which may have expired or been lost since."""
        return self.batch.turn == self.owner

    def acquire(self) -> bool:
        """Acquire the lock; False while another run holds it. `batch` is updated.

        A batch that this run created with its lock costs no write, unless renewal is due.
        """
        if self.is_held:
            self._renewed_at = self.batch.turn_until - self.lock_seconds
            if not self._is_due():
                return True
        now = self.now()
        self._renewed_at = now
        attempt = self.aws.run(
            self.deployment.table.acquire_lock(
                self.batch.id, self.owner, now=now, until=now + self.lock_seconds
            )
        )
        self.batch = attempt.batch or self.batch
        return attempt.is_acquired

    def renew(self) -> Batch:
        """Renew the lock and return the current batch; raises LockLost.

        `batch` is unchanged: a change by this run is conditional on the status it started with.
        """
        now = self.now()
        self._renewed_at = now
        renewed = self.aws.run(
            self.deployment.table.renew_lock(
                self.batch.id, self.owner, until=now + self.lock_seconds
            )
        )
        if renewed is None:
            raise LockLost(f"the lock on {self.batch.id}")
        return renewed

    def check_deadline(self) -> None:
        """Renew the lock if that is due; raises Requeue near the run's deadline, LockLost."""
        if self.time_left() < RESERVE_SECONDS:
            raise Requeue
        if self._is_due():
            self.renew()

    def check_active(self) -> None:
        """Renew the lock if that is due; raises LockLost, also for a batch that has to end.

        Such a batch was cancelled, or its window has ended.
        """
        if not self._is_due():
            return
        renewed = self.renew()
        if renewed.status is not self.batch.status:
            raise LockLost(f"{renewed.id} is no longer {self.batch.status}")
        if renewed.expires_at <= self.now():
            raise LockLost(f"the window of {renewed.id} has ended")

    def _is_due(self) -> bool:
        return self.now() - self._renewed_at >= _RENEW_EVERY_SECONDS

    def release(self) -> None:
        """Release the lock; `batch` is updated."""
        left = self.aws.run(self.deployment.table.release_lock(self.batch.id, self.owner))
        self.batch = left or self.batch

    def change(self, **changes: object) -> None:
        """Set fields of the batch; raises LockLost if its status has changed."""
        changed = self.aws.run(
            self.deployment.table.change_batch(self.batch.id, self.batch.status, **changes)
        )
        if changed is None:
            raise LockLost(f"{self.batch.id} is no longer {self.batch.status}")
        self.batch = changed
