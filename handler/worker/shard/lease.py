"""A worker's own knowledge of its right to a shard, so that it never writes without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from handler.aws.calls import Operation, T
from handler.errors import HandlerError, LeaseLost


@dataclass(slots=True)
class Lease:
    """Ends `seconds` after the last write that kept it was sent, by this process's own clock.

    That clock goes on while the process is stopped, so a lease that ended meanwhile is noticed
    before anything else is done.
    """

    seconds: float
    sent_at: float
    clock: Callable[[], float] = time.monotonic

    @property
    def is_over(self) -> bool:
        """Say whether another worker may have the shard by now."""
        return self.clock() >= self.sent_at + self.seconds

    @property
    def is_due(self) -> bool:
        """Say whether it is time to renew."""
        return self.clock() >= self.sent_at + self.seconds / 3

    def check(self) -> None:
        """Raise LeaseLost once the lease is over."""
        if self.is_over:
            raise LeaseLost("the lease was not renewed in time")

    def renewed(self, sent_at: float) -> None:
        """Take note of a renewal that was sent at this time and succeeded."""
        self.sent_at = max(self.sent_at, sent_at)

    def end(self) -> None:
        """Take note that another worker has the shard."""
        self.seconds = float("-inf")


def guarded(operation: Operation[T], check: Callable[[], None]) -> Operation[T]:
    """Run an operation with a check before each of its calls; what `check` raises ends it."""
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
