"""Concurrency of the Lambdas that queues invoke; a separate module for preflight's sake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Maximum concurrent runs for each queue (joining results, sending webhooks, scanning ranges of
# files); further messages wait. With few control runs, hanging webhooks would delay cancels.
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
