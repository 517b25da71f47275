"""Concurrency of the Lambdas that queues call; apart from their stack, for who asks before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Results that are joined, webhooks that are told, ranges of files that are read: so many runs of
# each queue at once, and more wait. Few runs of control would let hanging webhooks hold up cancels.
MAX_RUNS: Final[Mapping[str, int]] = {"control": 50, "drops": 50, "intake": 50, "dead_letters": 5}
# Of one mapping, AWS takes 2 to 1,000.
_LEAST_RUNS: Final = 2
# Of the account's runs, for the API and the reaper, which no mapping calls.
_RESERVE: Final = 0.2


def runs_of_queues(limit: int) -> Mapping[str, int]:
    """Return the runs of each queue that leave room in an account with this limit; 0: not known.

    Above the limit Lambda throttles: a message then counts as received, and comes again after the
    visibility timeout only, which is a quarter of an hour.
    """
    total = sum(MAX_RUNS.values())
    share = min(1.0, limit * (1 - _RESERVE) / total) if limit else 1.0
    return {queue: max(_LEAST_RUNS, int(runs * share)) for queue, runs in MAX_RUNS.items()}
