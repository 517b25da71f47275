"""A launcher on a deployment of an emulator and on a cluster, with a shared clock."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from botocore.config import Config
from botocore.model import OperationModel

from tests.emulators import MODEL, Emulator
from tests.handler.fleet.kubernetes.cluster import NAMESPACE, Cluster, Job
from tests.handler.intake.rig import Cloud, lines_of
from tidemill.batch.fleet import FleetPlan, FleetState, WorkerRate
from tidemill.batch.model import Batch
from tidemill.handler.aws.sync import Aws
from tidemill.handler.fleet.kubernetes.api_server import KubernetesClient
from tidemill.handler.fleet.kubernetes.plans import read_plans
from tidemill.handler.fleet.kubernetes_scaling import scale_once

# A worker needs 20 minutes a line: nine lines are work for three of them within the hour.
_LINE_SECONDS = 1200
NUM_LINES = 9


def plan_of(image: str = "tidemill:1", **changes: Any) -> dict[str, Any]:
    """Return a plan as a file has it; other words than of a plan are of its means."""
    means = {"image": image}
    plan: dict[str, Any] = {"max_workers": 3, "means": means}
    for name, value in changes.items():
        (plan if name.endswith(("workers", "hours", "seconds")) else means)[name] = value
    return plan


@dataclass
class Rig:
    """A launcher, its cluster and its deployment; `at` is the time of all three."""

    cloud: Cloud
    cluster: Cluster
    file: Path
    at: int = field(default_factory=lambda: int(time.time()))
    denied: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Let the cluster go by the clock."""
        self.cluster.now = lambda: datetime.fromtimestamp(self.at, UTC)
        self.client = client = KubernetesClient(self.cluster.url, retry_delays_seconds=(0.0,))
        emulator: Emulator = self.cloud.emulator

        def make_client(service: str, **options: Any) -> Any:
            if service == "kubernetes":
                return client
            # A separate client: others of this process are not launchers.
            own = Config(user_agent_extra=f"launcher-{id(self)}")
            made = emulator.client(service, options["config"].merge(own))
            made.meta.events.register("provide-client-params", self._check_right)
            return made

        self.aws = Aws(make_client)

    def _check_right(self, params: Any, model: OperationModel, **_: Any) -> None:
        """Note what the policy of a launcher does not allow (`infra.permissions`)."""
        key = params.get("Item") or params.get("Key") or {}
        is_fleet = key.get("pk", {}).get("S", "").startswith("FLEET#")
        reading = {"BatchGetItem", "GetItem", "Query"}
        allowed = reading | ({"PutItem", "UpdateItem"} if is_fleet else set())
        if model.service_model.service_name != "dynamodb" or model.name not in allowed:
            self.denied.append(f"{model.name} of {key}")

    def write(self, **changes: Any) -> None:
        """Write the plan of the only model into the file."""
        self.file.write_text(json.dumps({MODEL: plan_of(**changes)}), encoding="utf-8")

    @property
    def plans(self) -> Mapping[str, FleetPlan]:
        """The plans as the file has them now."""
        settings = self.cloud.deployment.settings
        return read_plans(self.file, settings, NAMESPACE, self.cloud.environment)

    def step(self, after: int = 0) -> None:
        """Let the launcher look, some seconds later."""
        self.at += after
        scale_once(self.aws, self.cloud.deployment, self.plans, self.at)

    def open(self) -> Batch:
        """Make a batch that is work for three workers."""
        rate = WorkerRate(rows_per_second=1 / _LINE_SECONDS)
        self.cloud.run(self.cloud.deployment.fleets.put_rate(MODEL, rate))
        return self.cloud.ingest(self.cloud.create(lines_of(NUM_LINES)))

    @property
    def alive(self) -> list[Job]:
        """The Jobs that have not ended."""
        return self.cluster.alive()

    @property
    def state(self) -> FleetState:
        """The stored state of the fleet."""
        return self.cloud.run(self.cloud.deployment.fleets.get_state(MODEL))
