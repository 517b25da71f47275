"""`python -m infra.ops.linked_roles`: creates service-linked roles that a new account lacks.

Each service creates its own when it is first used, but continues before the role has propagated:
the first cluster of an account fails, and so does the first Spot machine. Roles created beforehand
avoid that. Existing ones are unchanged.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError

from tidemill.handler.aws.sync import aws_client

SERVICES: Final = (
    "ecs.amazonaws.com",
    "ecs-compute.amazonaws.com",
    "spot.amazonaws.com",
    "autoscaling.amazonaws.com",
)


class RolesRefused(Exception):
    """The caller may not create service-linked roles; the message names the missing permission."""


def make_roles(iam: Any) -> list[str]:
    """Return the services whose roles were created now; raises RolesRefused, ClientError.

    `iam` is a boto3 client.
    """
    made, denied = [], []
    for service in SERVICES:
        try:
            iam.create_service_linked_role(AWSServiceName=service)
        except ClientError as exc:
            if exc.response["Error"]["Code"] == "AccessDenied":
                denied.append(service)
            elif not _is_there(exc):
                raise
        else:
            made.append(service)
    if denied:
        raise RolesRefused(_refusal(denied))
    return made


def _is_there(refused: ClientError) -> bool:
    """Return whether a role was not created because it exists: only IAM's message reveals it."""
    error = refused.response["Error"]
    return error["Code"] == "EntityAlreadyExists" or "has been taken" in error["Message"]


def _refusal(denied: list[str]) -> str:
    commands = [f"  aws iam create-service-linked-role --aws-service-name {it}" for it in denied]
    message = (
        "these credentials may not create service-linked roles "
        "(iam:CreateServiceLinkedRole). If this account has used ECS, its Managed Instances, "
        "Spot and Auto Scaling before, the roles exist and nothing is missing; "
        "if not, ask its administrator to run:"
    )
    return "\n".join([message, *commands])


def main() -> int:
    """Create the missing roles and report it; return 0 if all exist."""
    try:
        made = make_roles(aws_client("iam"))
    except (RolesRefused, BotoCoreError, ClientError) as exc:
        sys.stderr.write(f"service-linked roles: {exc}\n")
        return 1
    message = f"created for {', '.join(made)}" if made else "all exist"
    sys.stdout.write(f"service-linked roles: {message}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
