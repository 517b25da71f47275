"""The eight statuses of a batch and their transitions.

`finalizing → failed` is an addition (docs/adr/0005): a running batch's input is gone or changed.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from .errors import InvalidMove


class Status(StrEnum):
    """Status of a batch, as OpenAI names them."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


MOVES: Final[dict[Status, frozenset[Status]]] = {
    Status.VALIDATING: frozenset(
        {Status.IN_PROGRESS, Status.FAILED, Status.EXPIRED, Status.CANCELLING}
    ),
    Status.IN_PROGRESS: frozenset({Status.FINALIZING, Status.EXPIRED, Status.CANCELLING}),
    Status.FINALIZING: frozenset({Status.COMPLETED, Status.FAILED, Status.EXPIRED}),
    Status.CANCELLING: frozenset({Status.CANCELLED}),
    Status.COMPLETED: frozenset(),
    Status.FAILED: frozenset(),
    Status.EXPIRED: frozenset(),
    Status.CANCELLED: frozenset(),
}
TERMINAL: Final = frozenset(status for status, following in MOVES.items() if not following)
# Rank of each status: every transition leads to a higher rank.
RANK: Final[dict[Status, int]] = {
    Status.VALIDATING: 0,
    Status.IN_PROGRESS: 1,
    Status.FINALIZING: 2,
    Status.CANCELLING: 2,
    **dict.fromkeys(TERMINAL, 3),
}


def sources_of(status: Status) -> tuple[Status, ...]:
    """Return the statuses from which a batch may move to this one."""
    return tuple(source for source, following in MOVES.items() if status in following)


def check_move(source: Status, target: Status) -> None:
    """Raise InvalidMove unless a batch may move from `source` to `target`."""
    if target not in MOVES[source]:
        raise InvalidMove(f"a batch that is {source} cannot become {target}")
