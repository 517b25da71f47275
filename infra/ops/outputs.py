"""Outputs of a deployment's stacks: names and addresses of its resources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError


class NotDeployed(Exception):
    """The deployment does not exist; the message names the missing stack."""


@dataclass(frozen=True, slots=True)
class Outputs:
    """Names and addresses of one deployment; `work_queues` maps models to URLs.

    The fleet plans are in parameters below the path `fleets`.
    """

    name: str
    bucket: str
    table: str
    control_queue: str
    intake_queue: str
    drops_queue: str
    fleets: str
    work_queues: Mapping[str, str]
    event_bus: str
    api_url: str

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that a process of this deployment needs."""
        return {
            "TIDEMILL_BUCKET": self.bucket,
            "TIDEMILL_TABLE": self.table,
            "TIDEMILL_CONTROL_QUEUE": self.control_queue,
            "TIDEMILL_INTAKE_QUEUE": self.intake_queue,
            "TIDEMILL_DROPS_QUEUE": self.drops_queue,
            "TIDEMILL_FLEETS": self.fleets,
            "TIDEMILL_WORK_QUEUES": json.dumps(dict(self.work_queues)),
            "TIDEMILL_EVENT_BUS": self.event_bus,
        }


def read_outputs(cloudformation: Any, name: str, *, needs_api: bool = True) -> Outputs:
    """Return the outputs of the deployment with this name; raises NotDeployed.

    `api_url` is empty without an API, which a half created or half deleted deployment lacks.
    """
    found = _outputs_of(cloudformation, f"{name}-data", "FleetsPath")
    if needs_api:
        found |= _outputs_of(cloudformation, f"{name}-api", "ApiUrl")
    return Outputs(
        name=name,
        bucket=found["BucketName"],
        table=found["TableName"],
        control_queue=found["ControlQueueUrl"],
        intake_queue=found["IntakeQueueUrl"],
        # A stack of an older version has all messages in one queue.
        drops_queue=found.get("DropsQueueUrl", found["ControlQueueUrl"]),
        fleets=found["FleetsPath"],
        work_queues=json.loads(found["WorkQueueUrls"]),
        event_bus=found["EventBusName"],
        api_url=found.get("ApiUrl", ""),
    )


def _outputs_of(cloudformation: Any, stack: str, needed: str) -> dict[str, str]:
    try:
        described = cloudformation.describe_stacks(StackName=stack)["Stacks"][0]
    except ClientError as exc:
        if exc.response["Error"]["Code"] != "ValidationError":
            raise
        raise NotDeployed(
            f"stack {stack} not found: deploy first, or check the region and the account"
        ) from exc
    found = {output["OutputKey"]: output["OutputValue"] for output in described.get("Outputs", ())}
    if "NoApi" in found and needed == "ApiUrl":
        raise NotDeployed(f"the stack {stack} has no API, which is required: {found['NoApi']}")
    if needed not in found:
        raise NotDeployed(
            f"the stack {stack} ({described['StackStatus']}) has no output {needed}: deploy again, "
            "or delete the stack in the CloudFormation console"
        )
    return found
