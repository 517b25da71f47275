"""Deaths of engine processes: how many in a row mean that an engine or its machine is broken."""

from __future__ import annotations

from typing import Final

# Limits events in a row without a finished row in between: lives of one engine, deaths of all
# engines of a pool, and its quarantined requests. Bisecting 4,096 suspects takes twelve deaths;
# more deaths mean that the engine or its device is broken.
MAX_DEATHS_WITHOUT_ROW: Final = 16

# Limits the deaths in a row of a worker's engine while it loads, which may take minutes: no request
# can be blamed for them.
MAX_FAILED_STARTS: Final = 5

# In a pool, limits the deaths without a finished row in between once an engine reports that its
# machine is broken: bisecting requests would not find the cause.
MAX_MACHINE_FAILURES: Final = 5


class Streak:
    """Counts deaths, or other failures, in a row."""

    def __init__(self) -> None:
        self.length = 0

    def extend(self, limit: int) -> bool:
        """Count another failure; return whether the streak has reached its limit."""
        self.length += 1
        return self.length >= limit

    def end(self) -> None:
        """Start from zero, after a success."""
        self.length = 0
