"""The ECS services that run workers: one a model, with no task while there is nothing to do."""

from __future__ import annotations

from dataclasses import dataclass

from handler.aws.calls import Call, Operation
from handler.errors import NotThere


@dataclass(frozen=True, slots=True)
class WorkerService:
    """Makes the operations on one ECS service, named as `cluster/service`."""

    path: str

    def wake(self) -> Operation[bool]:
        """Ask for one task where none is wanted; False where there are tasks, or will be.

        A number that scaling sets between our look and our word is put back to one, until it looks
        again: ECS knows no conditions. Raises NotThere, and AwsError where that is forbidden.
        """
        cluster, _, service = self.path.partition("/")
        response = yield Call(
            "ecs", "describe_services", {"cluster": cluster, "services": [service]}
        )
        found = next(iter(response.get("services", ())), None)
        if found is None or found.get("status") != "ACTIVE":
            raise NotThere(f"there is no service {self.path}")
        if found["desiredCount"] > 0:
            return False
        wanted = {"cluster": cluster, "service": service, "desiredCount": 1}
        yield Call("ecs", "update_service", wanted)
        return True
