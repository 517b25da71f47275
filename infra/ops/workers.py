"""Lists and stops the workers of one model of a deployment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from infra.ops.outputs import NotDeployed
from tidemill.batch.fleet import FleetPlan, Worker, WorkerStatus
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.fleet.launchers import launcher_for
from tidemill.handler.fleet.stop import list_workers

_POLL_SECONDS = 2.0


class Workers:
    """Lists and stops workers by the launcher that starts them."""

    def __init__(self, aws: Aws, deployment: Deployment, model: str) -> None:
        self._aws, self._deployment, self._model = aws, deployment, model

    @property
    def plan(self) -> FleetPlan:
        """The model's current fleet plan; raises NotDeployed for a model that has none."""
        plans = self._aws.run(self._deployment.fleet_plans.read())
        if self._model not in plans:
            raise NotDeployed(f"nothing says how workers of {self._model} are started: deploy all")
        return plans[self._model]

    def list_workers(self) -> list[Worker]:
        """Return those that have not ended."""
        return self._aws.run(list_workers(self._deployment, self.plan))

    def stop_one(self) -> Worker | None:
        """Ask the one that has run longest to end, and return it; None where none runs."""
        running_ones = [each for each in self.list_workers() if each.status is WorkerStatus.RUNNING]
        chosen = min(running_ones, key=lambda each: each.started_at or 0, default=None)
        if chosen is not None:
            plan = self.plan
            self._aws.run(launcher_for(self._deployment, plan.launcher).stop(plan, chosen))
        return chosen

    def wait(self, until: Callable[[Sequence[Worker]], bool], seconds: float) -> float | None:
        """Return after how many seconds they were as `until` wants, None when they never were."""
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < seconds:
            if until(self.list_workers()):
                return passed
            time.sleep(_POLL_SECONDS)
        return None
