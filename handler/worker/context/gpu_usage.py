"""GPU usage: the GPU time of each tenant's requests and of all, for the limits of a day."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from ...aws.stores.usage import EVERYBODY

REPORT_SECONDS = 30.0


class GpuUsage:
    """Sums up GPU seconds by tenant, and EVERYBODY's, until `collect`; `now` is monotonic."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._collected_at = float("-inf")

    def add(self, tenant: str, seconds: float) -> None:
        """Add GPU time that this worker has written to the table as progress."""
        if seconds > 0:
            self.put_back({tenant: seconds, EVERYBODY: seconds})

    def put_back(self, left: Mapping[str, float]) -> None:
        """Keep what was collected and not written, of each tenant or of EVERYBODY."""
        for tenant, seconds in left.items():
            self._seconds[tenant] += seconds

    def is_due(self, now: float) -> bool:
        """Say whether there is GPU time that is old enough to be written."""
        return bool(self._seconds) and now >= self._collected_at + REPORT_SECONDS

    def collect(self, now: float) -> dict[str, float]:
        """Return the seconds by tenant and reset."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        self._collected_at = now
        return seconds
