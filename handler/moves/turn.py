"""One run of a Lambda with a batch: one at a time has the turn, and each knows when to stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import uuid4

from handler.aws.sync import Aws
from handler.batch.model import Batch
from handler.deployment import Deployment
from handler.errors import HandlerError

# What a run keeps back for what it has begun when its time is nearly over.
RESERVE_SECONDS = 8.0
# Many doorbells may ring for one batch; a run that died holds the others off for this long.
TURN_SECONDS = 20.0
_KEEP_EVERY_SECONDS = 5.0


class ComeBack(HandlerError):
    """There is more to do, in another run that begins after a delay."""

    code = "come_back"

    def __init__(self, delay_seconds: float = 0.0) -> None:
        super().__init__(f"in {delay_seconds:.0f} s")
        self.delay_seconds = delay_seconds


class TurnLost(HandlerError):
    """Another run has the batch: nothing may be published for it any more."""

    code = "turn_lost"


@dataclass(slots=True)
class Run:
    """What the steps of intake and finalize share: batch, means, the turn, the time that is left.

    Taking the turn and giving it back are writes that say how the batch is: nobody has to read it.
    In between `batch` is what this run began with, and what it changed since. `now` gives Unix
    seconds, `time_left` the seconds until this run must have ended.
    """

    aws: Aws
    deployment: Deployment
    batch: Batch
    time_left: Callable[[], float]
    now: Callable[[], float] = time.time
    turn_seconds: float = TURN_SECONDS
    owner: str = field(default_factory=lambda: uuid4().hex)
    _kept_at: float = 0.0

    def take_turn(self) -> bool:
        """Take the turn; False while another run has it. `batch` is then as it is now."""
        now = self.now()
        self._kept_at = now
        turn = self.aws.run(
            self.deployment.table.take_turn(
                self.batch.id, self.owner, now=now, until=now + self.turn_seconds
            )
        )
        self.batch = turn.batch or self.batch
        return turn.is_ours

    def keep_turn(self) -> Batch:
        """Make sure that the turn is still ours and return the batch as it is now; raises TurnLost.

        `batch` stays what it was: what this run changes has to have the status that it began with.
        """
        now = self.now()
        self._kept_at = now
        kept = self.aws.run(
            self.deployment.table.keep_turn(
                self.batch.id, self.owner, until=now + self.turn_seconds
            )
        )
        if kept is None:
            raise TurnLost(f"the turn with {self.batch.id}")
        return kept

    def check(self) -> None:
        """Keep the turn if that is due; raises ComeBack when the time is nearly over, TurnLost."""
        if self.time_left() < RESERVE_SECONDS:
            raise ComeBack
        if self._is_due():
            self.keep_turn()

    def stay(self) -> None:
        """Keep the turn if that is due; raises TurnLost, for a batch that has to end, too.

        That is one that has been cancelled, or one that is looked at behind its window.
        """
        if not self._is_due():
            return
        kept = self.keep_turn()
        if kept.status is not self.batch.status:
            raise TurnLost(f"{kept.id} is no longer {self.batch.status}")
        if kept.expires_at <= self.now():
            raise TurnLost(f"the window of {kept.id} has ended")

    def _is_due(self) -> bool:
        return self.now() - self._kept_at >= _KEEP_EVERY_SECONDS

    def give_turn(self) -> None:
        """Let another run go on; `batch` is then as it is now."""
        left = self.aws.run(self.deployment.table.give_turn(self.batch.id, self.owner))
        self.batch = left or self.batch

    def change(self, **changes: object) -> None:
        """Set fields of the batch; raises TurnLost when its status is no longer what it was."""
        changed = self.aws.run(
            self.deployment.table.change_batch(self.batch.id, self.batch.status, **changes)
        )
        if changed is None:
            raise TurnLost(f"{self.batch.id} is no longer {self.batch.status}")
        self.batch = changed
