"""Parameters in which a deployment says what its fleets are: read anew, so that a release shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from tidemill.batch.fleet import FleetPlan

from .calls import Call, Operation

_PLAN = TypeAdapter(FleetPlan)


@dataclass(frozen=True, slots=True)
class FleetPlans:
    """Makes the operation on the parameters below one path, each the plan of one model's fleet."""

    path: str

    def read(self) -> Operation[dict[str, FleetPlan]]:
        """Return the plans by model; none where the deployment starts no workers."""
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
