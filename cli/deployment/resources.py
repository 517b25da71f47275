"""Resources of a deployment (table, bucket, fleets), from flags, variables or stacks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from tidemill.offline.console.errors import CliError, KeyRefused, Refused
from tidemill.offline.extras import not_installed, require_extras

if TYPE_CHECKING:
    from tidemill.handler.aws.calls import Operation, T
    from tidemill.handler.aws.sync import Aws

Resource = Literal["table", "bucket", "fleets"]
# Outputs of the stack.
_OUTPUTS: Mapping[Resource, str] = {
    "table": "TableName",
    "bucket": "BucketName",
    "fleets": "FleetsPath",
}
_DEPLOYMENT = "tidemill"


def add_deployment_flags(parser: argparse.ArgumentParser, part: Resource = "table") -> None:
    """Add the flags that name a deployment, or the resource that a command needs."""
    group = parser.add_mutually_exclusive_group()
    variable = _environment_variable(part)
    group.add_argument(f"--{part}", help=f"give the deployment's {part} (default: {variable})")
    group.add_argument(
        "--deployment", metavar="NAME", help=f"give the deployment's name (default: {_DEPLOYMENT})"
    )


def require_cloud(what: str) -> None:
    """Raise CliError unless the `cloud` extra, which `what` needs, is installed."""
    require_extras(what, "cloud")
    try:
        import tidemill.handler.aws.sync  # noqa: F401
    except ModuleNotFoundError as exc:
        raise not_installed(what, [str(exc.name)], "cloud") from exc


def table_name(arguments: argparse.Namespace) -> str:
    """Return the table's name from arguments, environment or stack; raises Refused."""
    return resource_name(arguments, "table")


def resource_name(arguments: argparse.Namespace, part: Resource) -> str:
    """Return a resource's name from arguments, environment or stack; raises Refused."""
    name: str | None = getattr(arguments, part)
    if name is None and arguments.deployment is None:
        name = os.environ.get(_environment_variable(part))
    return name or _resource_of_stack(f"{arguments.deployment or _DEPLOYMENT}-data", part)


def tenant_name(text: str) -> str:
    """Return a valid tenant name; raises ArgumentTypeError."""
    from tidemill.batch.errors import InvalidOption
    from tidemill.batch.object_keys import check_tenant

    try:
        return check_tenant(text)
    except InvalidOption as exc:
        raise argparse.ArgumentTypeError(exc.message) from exc


def run(table: str, operation: Operation[T]) -> T:
    """Run an operation on the table; raises CliError."""
    return _run(f"the table {table}", operation)


def ask(operation: Operation[T], aws: Aws | None = None) -> T:
    """Run an operation on the deployment with the user's AWS settings or `aws`; raises CliError."""
    return _run("the deployment", operation, aws)


def _run(what: str, operation: Operation[T], aws: Aws | None = None) -> T:
    from botocore.exceptions import BotoCoreError

    from tidemill.handler.aws.sync import Aws
    from tidemill.handler.errors import AwsError

    from .aws import make_client

    try:
        return (aws or Aws(make_client)).run(operation)
    except (AwsError, BotoCoreError) as exc:
        raise CliError(f"{what} cannot be accessed: {exc}") from exc


def _environment_variable(part: Resource) -> str:
    return f"TIDEMILL_{part.upper()}"


def _error_code(exc: BaseException | None) -> str:
    """Return AWS's code of an error, or an empty string."""
    response: Mapping[str, Any] = getattr(exc, "response", {})
    return str(response.get("Error", {}).get("Code", ""))


def _resource_of_stack(stack: str, part: Resource) -> str:
    from .aws import aws_call, make_client

    cloudformation = make_client("cloudformation")
    try:
        with aws_call(f"reading the stack {stack}"):
            found = cloudformation.describe_stacks(StackName=stack)["Stacks"][0]
    except CliError as exc:
        code = _error_code(exc.__cause__)
        if code == "ValidationError":
            raise Refused(
                f"{exc}\npass --deployment with the deployment's name, or --{part} with the "
                f"{part}'s name, or check the region and the account"
            ) from exc
        if code == "AccessDenied":
            raise KeyRefused(f"{exc}\npass --{part} with the {part}'s name") from exc
        raise
    outputs = {output["OutputKey"]: output["OutputValue"] for output in found.get("Outputs", ())}
    key = _OUTPUTS[part]
    if key not in outputs:
        raise Refused(f"the stack {stack} is not a Tidemill stack: it has no output {key}")
    return str(outputs[key])
