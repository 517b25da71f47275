"""Concurrency of the Lambdas that queues call; apart from their stack, for who asks before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

# Results that are joined, webhooks that are told, ranges of files that are read: so many runs of
# each queue at once, and more wait. Few runs of control would let hanging webhooks hold up cancels.
MAX_RUNS: Final[Mapping[str, int]] = {"control": 50, "drops": 50, "intake": 50, "dead_letters": 5}
