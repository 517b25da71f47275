"""Lease on a shard as its worker tracks it, so that the worker never writes without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.batch.errors import HandlerError

from ...aws.calls import Operation, T
from ...errors import LeaseLost


@dataclass(slots=True)
class Lease:
    """Lease that expires `seconds` after its last renewal was sent, by this process's own clock.

    The clock runs on while the process is stopped, so an expired lease is noticed before anything
    else is done. The shard's fencing token protects the table from late writes all the same.
    """

    seconds: float
    sent_at: float
    clock: Callable[[], float] = time.monotonic

    @property
    def is_over(self) -> bool:
        """Return whether another worker may have the shard by now."""
        return self.clock() >= self.sent_at + self.seconds

    @property
    def is_due(self) -> bool:
        """Return whether a renewal is due."""
        return self.clock() >= self.sent_at + self.seconds / 3

    def check(self) -> None:
        """Raise LeaseLost once the lease is over."""
        if self.is_over:
            raise LeaseLost("the lease was not renewed in time")

    def renewed(self, sent_at: float) -> None:
        """Record a successful renewal that was sent at this time."""
        self.sent_at = max(self.sent_at, sent_at)

    def end(self) -> None:
        """Record that another worker has the shard."""
        self.seconds = float("-inf")


def guarded(operation: Operation[T], check: Callable[[], None]) -> Operation[T]:
    """Run an operation with a check before each of its calls; an error of `check` ends it."""
    try:
        call = next(operation)
        while True:
            check()
            try:
                response = yield call
            except HandlerError as exc:
                call = operation.throw(exc)
            else:
                call = operation.send(response)
    except StopIteration as stop:
        result: T = stop.value
        return result
