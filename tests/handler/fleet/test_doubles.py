"""Each start happens once, despite concurrent runs and lost replies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.emulators import MODEL, Emulator
from tests.handler.fleet.services import Services
from tests.handler.fleet.test_ecs import MEANS as TASK
from tests.handler.fleet.test_sagemaker import L4
from tests.handler.fleet.test_sagemaker import MEANS as JOB
from tests.handler.intake.rig import Cloud
from tests.long_parameters import with_long
from tidemill.batch.fleet import FleetPlan, OpenWork, WorkerRate
from tidemill.handler.aws.calls import Call, Operation
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet.scale import LAUNCH_SECONDS, scale

NOW = 2_000_000_000
WANTED = 3
PACE = WorkerRate(NOW, rows_per_second=1.0)
WORK = OpenWork("b", MODEL, 9000, 50, NOW + 86_400, since=NOW)
PLANS = {
    "ecs": FleetPlan(MODEL, "ecs", TASK["task_definition"], max_workers=9, means=TASK),
    "sagemaker": FleetPlan(MODEL, "sagemaker", "r:1", max_workers=9, means=JOB),
}
# More than any operation here makes.
MANY = 30


class World:
    """A fleet's table and services; `run` may do something else before one of the calls."""

    def __init__(self, emulator: Emulator, plan: FleetPlan) -> None:
        self.cloud = Cloud.on(emulator)
        self.services = Services(quotas={L4: 1000})
        self.plan = plan
        self.cloud.run(self.cloud.deployment.fleets.put_rate(MODEL, PACE))

    @property
    def num_workers(self) -> int:
        """Number of workers that were ever started; none has ended."""
        return len(self.services.tasks) + len(self.services.jobs)

    def look(self, after: int = 0, aside: Callable[[int], None] = lambda _: None) -> int:
        """Look once, and return how many calls that took; `aside` is called after each."""
        work = replace(WORK, since=NOW + after)
        operation = scale(self.cloud.deployment, self.plan, [work], NOW + after, sees_all=True)
        return self._drive(operation, aside)

    def _drive(self, operation: Operation[None], aside: Callable[[int], None]) -> int:
        number = 0
        try:
            call = next(operation)
            while True:
                try:
                    answer = self._answer(call)
                    number += 1
                    aside(number)
                except AwsError as exc:
                    call = operation.throw(exc)
                else:
                    call = operation.send(answer)
        except StopIteration:
            return number

    def _answer(self, call: Call) -> Any:
        if call.service == "dynamodb":
            return self.cloud.run(_one(call))
        return self.services.answer(call)

    def settle(self) -> None:
        """Let all that was started run, and look again and again."""
        for minute in range(6):
            for task in self.services.tasks.values():
                begun = datetime.fromtimestamp(NOW + 60 * minute, UTC)
                task |= {"lastStatus": "RUNNING", "startedAt": begun}
            for job in self.services.jobs.values():
                job["CreationTime"] = datetime.fromtimestamp(NOW + 60 * minute, UTC)
            self.look(LAUNCH_SECONDS + 60 * minute)


def _one(call: Call) -> Operation[Any]:
    return (yield call)


@pytest.fixture(params=with_long([*PLANS][:1], [*PLANS][1:]))
def make(request: pytest.FixtureRequest, ministack: Emulator) -> Callable[[], World]:
    """Return what makes a world whose workers are of one launcher."""
    return lambda: World(ministack, PLANS[request.param])


@pytest.mark.parametrize("num_others", [1, 2])
def test_who_comes_between_two_calls_starts_no_double(
    make: Callable[[], World], num_others: int
) -> None:
    """Two looks at once, in all orders in which one is done between two calls of the other.

    Or two are: the second finds listed what the first has started.
    """
    for between in range(1, MANY):
        world = make()

        def come(number: int, world: World = world, between: int = between) -> None:
            if number == between:
                for other in range(num_others):
                    world.look(1 + other)

        num_calls = world.look(aside=come)
        assert world.num_workers == WANTED
        if num_calls < between:
            return
    pytest.fail("it makes more calls than were tried")


def test_a_lost_answer_starts_no_double(make: Callable[[], World]) -> None:
    """Each call loses its reply in turn; exactly the required workers run, and never one more."""
    for lost in range(1, MANY):
        world = make()

        def lose(number: int, lost: int = lost) -> None:
            if number == lost:
                raise AwsError("the answer was lost")

        try:
            num_calls = world.look(aside=lose)
        except AwsError:
            num_calls = lost
        assert world.num_workers <= WANTED
        world.look(1)
        assert world.num_workers <= WANTED
        world.settle()
        assert world.num_workers == WANTED
        if num_calls < lost:
            return
    pytest.fail("it makes more calls than were tried")


def test_who_is_killed_leaves_no_double(make: Callable[[], World]) -> None:
    """A Lambda may die after any call: the next run continues, with new numbers."""
    for killed in range(1, MANY):
        world = make()

        def die(number: int, killed: int = killed) -> None:
            if number == killed:
                raise KeyboardInterrupt

        try:
            num_calls = world.look(aside=die)
        except KeyboardInterrupt:
            num_calls = killed
        world.look(1)
        assert world.num_workers <= WANTED
        world.settle()
        assert world.num_workers == WANTED
        if num_calls < killed:
            return
    pytest.fail("it makes more calls than were tried")
