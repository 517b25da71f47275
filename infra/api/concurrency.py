"""Concurrency of the Lambdas that queues invoke; a separate module for preflight's sake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Maximum concurrent runs for each queue (joining results, sending webhooks, scanning ranges of
# files); further messages wait. With few control runs, hanging webhooks would delay cancels.
MAX_RUNS: Final[Mapping[str, int]] = {"control": 50, "drops": 50, "intake": 50, "dead_letters": 5}
# AWS's limits for one mapping are 2 to 1,000.
_LEAST_RUNS: Final = 2
# Concurrency reserved for the API and the reaper, which no mapping invokes.
_RESERVE: Final = 0.2


def runs_of_queues(limit: int | None) -> Mapping[str, int]:
    """Return the concurrency of each queue that fits into the account's limit; None: unknown.

    Above the limit Lambda throttles: a message then counts as received, and comes again only after
    the visibility timeout of a quarter of an hour.
    """
    total = sum(MAX_RUNS.values())
    share = min(1.0, limit * (1 - _RESERVE) / total) if limit else 1.0
    return {queue: max(_LEAST_RUNS, int(runs * share)) for queue, runs in MAX_RUNS.items()}
