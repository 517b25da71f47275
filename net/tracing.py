"""Tracing: spans of work and of a sample of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]

MAX_PER_SECOND: Final = 5.0
"""Limit of spans per second: of successful requests, and separately of failed ones."""


class WorkSpan(Protocol):
    """Span of a run, a batch or a shard, and the sample of its requests."""

    @property
    def captures_content(self) -> bool:
        """Say whether spans of requests contain their messages."""

    def takes(self, *, is_success: bool) -> bool:
        """Say whether the next request is in the sample."""

    def add_request(
        self, name: str, started_ns: int, attributes: Attributes, error_type: str | None
    ) -> None:
        """Add the span of a request that ends now."""

    def end(self, attributes: Attributes, error_type: str | None = None) -> None:
        """End the span."""


class Tracing(Protocol):
    """Spans of one process."""

    def start(self, name: str, attributes: Attributes, *, trace: str | None = None) -> WorkSpan:
        """Start a span; all spans of one `trace` are children of its root."""

    def add_root(self, trace: str, name: str, started_ns: int, attributes: Attributes) -> None:
        """Add the root of a `trace`, which ends now."""

    def close(self) -> None:
        """Send the remaining spans, within a short timeout."""


class Sample:
    """Sample of requests: a share of them, up to a rate per second; failures count separately."""

    def __init__(
        self,
        share: float = 1.0,
        max_per_second: float = MAX_PER_SECOND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._share = share
        self._max_per_second = max_per_second
        self._clock = clock
        self._left = {True: max_per_second, False: max_per_second}
        self._taken_at = dict.fromkeys(self._left, clock())
        self._carry = 1.0 - share if share else 0.0  # the first one is in the sample

    def takes(self, *, is_success: bool) -> bool:
        """Say whether the next request is in the sample."""
        self._carry += self._share
        if self._carry < 1.0:
            return False
        self._carry -= 1.0
        now, most = self._clock(), self._max_per_second
        gained = (now - self._taken_at[is_success]) * most
        left = min(most, self._left[is_success] + gained)
        self._taken_at[is_success] = now
        is_taken = left >= 1.0
        self._left[is_success] = left - is_taken
        return is_taken
