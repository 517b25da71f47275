"""Parameters that describe the fleets of a deployment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from pydantic import TypeAdapter

from tidemill.batch.fleet import FleetPlan

from .calls import Call, Operation

_PLAN = TypeAdapter(FleetPlan)
# SSM serves about 40 reads of a path per second, and files may come faster.
RECENT_SECONDS: Final = 60


class FleetPlans:
    """Creates operations on the parameters below one path, each with one fleet's plan."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._recent: tuple[float, Mapping[str, FleetPlan]] = (-math.inf, {})

    def read_recent(self, now: float) -> Operation[Mapping[str, FleetPlan]]:
        """Return the plans, at most RECENT_SECONDS old in this process."""
        if now - self._recent[0] >= RECENT_SECONDS:
            self._recent = now, (yield from self.read())
        return self._recent[1]

    def read(self) -> Operation[dict[str, FleetPlan]]:
        """Return the current plans by model; empty if the deployment starts no workers."""
        if not self.path:
            return {}
        arguments: dict[str, Any] = {"Path": self.path}
        plans: dict[str, FleetPlan] = {}
        while True:
            response = yield Call("ssm", "get_parameters_by_path", arguments)
            found = [_PLAN.validate_json(each["Value"]) for each in response["Parameters"]]
            plans |= {plan.model: plan for plan in found}
            if not (token := response.get("NextToken")):
                return plans
            arguments["NextToken"] = token


def plan_text(plan: FleetPlan) -> str:
    """Return a plan as the text of its parameter."""
    return _PLAN.dump_json(plan).decode()
