"""The account: its credentials, its region and its service-linked roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from botocore.config import Config as ClientConfig
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,  # noqa: A004 - botocore's, which is not an OSError
    HTTPClientError,
)

from infra.config import Config
from tidemill.handler.aws.sync import aws_client
from tidemill.handler.errors import AwsError

SHORT_TIMEOUTS: Final = ClientConfig(
    connect_timeout=3, read_timeout=5, retries={"total_max_attempts": 2}
)
# Codes of AWS services for missing permissions.
_DENIED: Final = frozenset(
    {"AccessDenied", "AccessDeniedException", "Forbidden", "UnauthorizedOperation"}
)
# And for operations that a region, or an emulator, lacks.
_UNKNOWN: Final = frozenset({"InvalidAction", "UnknownOperationException"})
_THROTTLED: Final = frozenset({"RequestLimitExceeded", "SlowDown", "TooManyRequestsException"})
# Without a region the CDK would silently use us-east-1.
_NO_REGION = "No AWS region is set: export AWS_REGION, or set a region in your AWS profile."


class NotReady(Exception):
    """A requirement of a deployment is missing; the message has the remedy."""


def is_unanswered(error: Exception) -> bool:
    """Return whether an error is not about the account: access denied, throttled, unreachable."""
    cause = error.__cause__ if isinstance(error, AwsError) else error
    if not isinstance(cause, ClientError):
        return isinstance(cause, ConnectionError | HTTPClientError)
    response: Mapping[str, Any] = cause.response
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400)
    # A status instead of a code gives no reason: S3's for HEAD, or that of a missing
    # service.
    is_reason = not code.isdigit() and status < 500
    return not is_reason or code in _DENIED | _THROTTLED | _UNKNOWN or code.startswith("Throttl")


def check_account(image: str = "") -> str:
    """Return the account, region and identity that a deployment would use; raises NotReady.

    The workers' `image` must be in the same region: they reach no other.
    """
    missing = []
    try:
        sts = aws_client("sts", config=SHORT_TIMEOUTS)
        region = sts.meta.region_name
        if region == "aws-global":
            missing.append(_NO_REGION)
        elif image and f".dkr.ecr.{region}." not in image:
            missing.append(f"Workers in {region} cannot reach {image}: copy it to that region.")
        found = sts.get_caller_identity()
    except (ConnectionError, HTTPClientError) as exc:
        missing.append(f"AWS cannot be reached: {exc}")
    except (BotoCoreError, ClientError, ValueError) as exc:
        missing.append(
            f"AWS rejects your credentials: {str(exc).rstrip('.')}. They are those of the AWS "
            "CLI: `aws sts get-caller-identity` should succeed."
        )
    if missing:
        raise NotReady("\n".join(missing))
    return f"AWS account {found['Account']}, {region}, as {found['Arn']}"


def check_roles(config: Config, iam: Any) -> None:
    """Raise NotReady for service-linked roles that workers need and the account lacks."""
    missing = [service for service in _services(config) if not _has_role(iam, service)]
    if missing:
        raise NotReady(
            f"This account has no service-linked role of {', '.join(missing)}, and the first start "
            "of a worker would fail: create it with `make bootstrap`."
        )


def _services(config: Config) -> Iterator[str]:
    """Yield the services whose roles a deployment needs before it starts anything."""
    if config.compute == "sagemaker":
        return
    yield "ecs.amazonaws.com"
    yield (
        "ecs-compute.amazonaws.com"
        if config.compute == "managed-instances"
        else ("autoscaling.amazonaws.com")
    )
    if any(config.capacity_of(model) == "spot" for model in config.models):
        yield "spot.amazonaws.com"


def _has_role(iam: Any, service: str) -> bool:
    """Return whether a service has its role, judging by the path, whatever the role's name."""
    return bool(iam.list_roles(PathPrefix=f"/aws-service-role/{service}/")["Roles"])
