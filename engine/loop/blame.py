"""Blame for failed steps: a sequence's, the device's, or nobody's."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from tidemill.protocol.errors import InternalError

from ..scheduling.sequence import Sequence
from ..scheduling.step_failures import StepFailures
from ..scheduling.step_plan import StepPlan
from .device_health import Failure, refuse_machine_failure, run_canaries
from .runner import Runner


class Blame:
    """Follows failures of one loop up; `is_open` while one is not followed up, or nobody judged.

    A sequence is `accused` once it is out for good, with an error that nobody has heard of yet.
    """

    def __init__(self, failures: StepFailures, runner: Runner) -> None:
        self._failures = failures
        self._runner = runner
        self._postponed: tuple[Failure, list[StepPlan]] | None = None
        self.accused: list[Sequence] = []
        self.num_failures = 0
        self.is_open = False

    def accuse(self, sequence: Sequence) -> None:
        """Add a sequence that has its error."""
        self.accused.append(sequence)
        self.is_open = True

    def postpone(self, failure: Failure, plans: list[StepPlan]) -> None:
        """Follow a failure up in the next step, once what came out before it is told."""
        self._postponed = failure, plans
        self.is_open = True

    def follow_up_postponed(self) -> None:
        """Follow up the failure that was postponed, if there is one."""
        if self._postponed is not None:
            (failure, plans), self._postponed = self._postponed, None
            self.follow_up(failure, plans)
        self.is_open = bool(self.accused)

    def follow_up(self, failure: Failure, plans: list[StepPlan]) -> None:
        """Let the sequences of steps that are lost go on in another way, but for a culprit.

        Raises `DeviceFailed` where it is plain that none of them is.
        """
        if failure.is_for_want_of_memory:
            self._runner.free_memory()
            culprit = self._failures.make_room(plans)
        else:
            self.num_failures += 1
            self._runner.probe()
            culprit = self._failures.retry(plans)
        if culprit is None:
            return
        refuse_machine_failure(failure)
        culprit.error = InternalError(failure.words, code=failure.code)
        self.accuse(culprit)

    def judge(self, is_finite: Callable[[int], bool], vocab_size: int) -> list[Sequence]:
        """Return the accused, who end with their errors, if a step of ours goes well.

        `is_finite` runs one of a token. Raises `DeviceFailed` where it does not.
        """
        run_canaries(is_finite, vocab_size)
        accused, self.accused, self.is_open = self.accused, [], False
        return accused

    def forget(self, unwanted: AbstractSet[object]) -> None:
        """Let those of the accused go that nobody wants to hear of."""
        self.accused = [one for one in self.accused if one not in unwanted]
