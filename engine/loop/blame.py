"""Blame for failed steps: the cause is a sequence, the device, or neither."""

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
    """Follows up the failures of one loop.

    A `postponed` failure is followed up before the next step. `accused` sequences have left the
    loop; their errors are not reported yet.
    """

    def __init__(self, failures: StepFailures, runner: Runner) -> None:
        self._failures = failures
        self._runner = runner
        self.postponed: tuple[Failure, list[StepPlan]] | None = None
        self.accused: list[Sequence] = []
        self.num_failures = 0

    def follow_up_postponed(self) -> None:
        """Follow up the postponed failure, if there is one."""
        if self.postponed is not None:
            failure, self.postponed = self.postponed, None
            self.follow_up(*failure)

    def follow_up(self, failure: Failure, plans: list[StepPlan]) -> None:
        """Arrange retries for the sequences of lost steps, and accuse the one to blame.

        Raises `DeviceFailed` if the device is to blame.
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
        self.accused.append(culprit)

    def judge(self, is_finite: Callable[[int], bool], vocab_size: int) -> list[Sequence]:
        """Return the accused, which end with their errors, after a canary step has succeeded.

        `is_finite` runs a canary of one token. Raises `DeviceFailed` if none succeeds.
        """
        run_canaries(is_finite, vocab_size)
        accused, self.accused = self.accused, []
        return accused

    def forget(self, unwanted: AbstractSet[object]) -> None:
        """Drop accused sequences whose requests were aborted."""
        self.accused = [one for one in self.accused if one not in unwanted]
