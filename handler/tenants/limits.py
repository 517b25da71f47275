"""Tenant limits: checked before any work is done, counted only if a limit is set."""

from __future__ import annotations

import time

from tidemill.batch.errors import HandlerError
from tidemill.batch.model import Batch, BatchError, Pause

from ..aws.calls import Operation
from ..aws.stores.usage import DAY_SECONDS, EVERYBODY, Counted, UsageStore, name_of_day
from ..settings import Limits
from .tenants import KnownTenants

# The end of the next batch is unknown.
_LINES_RETRY_SECONDS = 60
_MINUTE_SECONDS = 60
QUEUE_FULL = "queued_lines_exceeded"
GPU_HOURS_SPENT = "gpu_hours_used_up"
BUDGET_SPENT = "budget_used_up"


class LimitReached(HandlerError):
    """A limit of the tenant is reached; a retry may succeed after `retry_after_seconds`."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class TenantLimits:
    """Creates the operations that check the limits of tenants and count their usage.

    `default` holds for tenants without a separate limit, `budget_gpu_hours` for all together.
    """

    def __init__(
        self,
        tenants: KnownTenants,
        usage: UsageStore,
        default: Limits,
        budget_gpu_hours: int = 0,
    ) -> None:
        self._known = tenants
        self._usage = usage
        self._default = default
        self._budget_gpu_hours = budget_gpu_hours

    def admit_request(self, tenant: str, now: float) -> Operation[None]:
        """Count one API call; raises LimitReached at the limit of the minute or the day."""
        limits = yield from self._limits(tenant, now)
        yield from self._admit_this_minute(tenant, now, limit=limits.requests_per_minute)
        limit = limits.requests_per_day
        words = f"Rate limit reached: {limit:,} requests per day; it resets at 00:00 UTC."
        yield from self._admit_today(
            tenant, now, what="requests", number=1, limit=limit, words=words
        )

    def admit_bytes(self, tenant: str, num_bytes: int, now: float) -> Operation[None]:
        """Count bytes of an upload; raises LimitReached if they exceed the day's limit."""
        limit = (yield from self._limits(tenant, now)).bytes_per_day
        words = (
            f"An upload of {num_bytes:,} bytes would exceed the limit of {limit:,} bytes per day; "
            "it resets at 00:00 UTC."
        )
        yield from self._admit_today(
            tenant, now, what="bytes", number=num_bytes, limit=limit, words=words
        )

    def admit_batch(self, tenant: str, now: float) -> Operation[None]:
        """Raise LimitReached if the tenant's active batches contain its maximum of lines."""
        limit = (yield from self._limits(tenant, now)).queued_lines
        if not limit:
            return
        num_lines = yield from self._usage.count_lines(tenant)
        if num_lines >= limit:
            raise LimitReached(
                f"Batches that have not ended contain {num_lines:,} lines, and the limit is "
                f"{limit:,}: wait for one to end, or cancel one.",
                retry_after_seconds=_LINES_RETRY_SECONDS,
            )

    def queue_lines(self, batch: Batch, num_lines: int) -> Operation[BatchError | None]:
        """Count the lines of a batch until it ends; return the error if it must fail.

        This applies to drops in the bucket too.
        """
        limit = (yield from self._limits(batch.tenant, time.time())).queued_lines
        if not limit or (yield from self._usage.reserve_lines(batch, num_lines, limit)):
            return None
        return BatchError(
            QUEUE_FULL,
            f"The {num_lines:,} lines of this file and those of batches that have not ended exceed "
            f"the limit of {limit:,}: wait for one to end, or cancel one, then resend the file.",
        )

    def find_pause(self, tenant: str, now: int) -> Operation[Pause | None]:
        """Return why batches of a tenant wait until tomorrow; None if they may run."""
        if (yield from self.is_budget_spent(now)):
            code = BUDGET_SPENT
            words = f"The deployment's budget of {self._budget_gpu_hours:,} GPU hours per day"
        else:
            code = GPU_HOURS_SPENT
            limit = (yield from self._limits(tenant, now)).gpu_hours_per_day
            if not (yield from self._is_spent(tenant, limit, now)):
                return None
            words = f"The tenant's limit of {limit:,} GPU hours per day"
        message = f"{words} is used up. Waiting lines run from 00:00 UTC on."
        return Pause(code, message, now, now - now % DAY_SECONDS + DAY_SECONDS)

    def is_budget_spent(self, now: int) -> Operation[bool]:
        """Return whether the deployment's GPU hours of the day are used up."""
        return (yield from self._is_spent(EVERYBODY, self._budget_gpu_hours, now))

    def _is_spent(self, tenant: str, gpu_hours: int, now: int) -> Operation[bool]:
        if not gpu_hours:
            return False
        return (yield from self._usage.gpu_seconds_today(tenant, now)) >= gpu_hours * 3600

    def _limits(self, tenant: str, now: float) -> Operation[Limits]:
        known = yield from self._known.find(tenant, now)
        return known.limits(self._default)

    def _admit_this_minute(self, tenant: str, now: float, *, limit: int) -> Operation[None]:
        if not limit:
            return
        minute, second = divmod(int(now), _MINUTE_SECONDS)
        is_counted = yield from self._usage.add(
            tenant, "requests", 1, limit=limit, period=f"MINUTE#{minute:09}", now=int(now)
        )
        if not is_counted:
            words = f"Rate limit reached: {limit:,} requests per minute."
            raise LimitReached(words, retry_after_seconds=_MINUTE_SECONDS - second)

    def _admit_today(
        self,
        tenant: str,
        now: float,
        *,
        what: Counted,
        number: int,
        limit: int,
        words: str,
    ) -> Operation[None]:
        if not limit:
            return
        is_counted = yield from self._usage.add(
            tenant, what, number, limit=limit, period=name_of_day(now), now=int(now)
        )
        if not is_counted:
            left_seconds = DAY_SECONDS - int(now) % DAY_SECONDS
            raise LimitReached(words, retry_after_seconds=left_seconds)
