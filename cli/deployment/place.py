"""The parts of a deployment, for commands of whoever has AWS credentials for it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from cli.errors import CliError, KeyRefused, Refused, Unreachable
from cli.extras import need_extras, not_installed

if TYPE_CHECKING:
    from handler.aws.calls import Operation, T

Part = Literal["table", "bucket", "fleets"]
# As the stack calls each: its name, or the path of several.
_OUTPUTS: Mapping[Part, str] = {
    "table": "TableName",
    "bucket": "BucketName",
    "fleets": "FleetsPath",
}
_DEPLOYMENT = "tidemill"


def add_place(parser: argparse.ArgumentParser, part: Part = "table") -> None:
    """Let a command say where the deployment is, by that part of it which it needs."""
    group = parser.add_mutually_exclusive_group()
    variable = _variable_of(part)
    group.add_argument(f"--{part}", help=f"the deployment's {part} (default: {variable})")
    group.add_argument(
        "--deployment", metavar="NAME", help=f"the deployment's name ({_DEPLOYMENT})"
    )


def need_cloud(what: str) -> None:
    """Raise CliError unless the libraries of the cloud are installed, which `what` needs."""
    need_extras(what, "cloud")
    try:
        import handler.aws.sync  # noqa: F401
    except ModuleNotFoundError as exc:
        raise not_installed(what, [str(exc.name)], "cloud") from exc


def table_of(arguments: argparse.Namespace) -> str:
    """Return the table that the arguments or the environment name; raises Refused."""
    return part_of(arguments, "table")


def part_of(arguments: argparse.Namespace, part: Part) -> str:
    """Return the name of what the arguments or the environment name; raises Refused."""
    name: str | None = getattr(arguments, part)
    if name is None and arguments.deployment is None:
        name = os.environ.get(_variable_of(part))
    return name or _part_of_stack(f"{arguments.deployment or _DEPLOYMENT}-data", part)


def tenant_name(text: str) -> str:
    """Return the name of a tenant, as an argument."""
    from handler.batch.keys import check_tenant
    from handler.errors import InvalidOption

    try:
        return check_tenant(text)
    except InvalidOption as exc:
        raise argparse.ArgumentTypeError(exc.message) from exc


def run(table: str, operation: Operation[T]) -> T:
    """Run one operation on the table; raises CliError."""
    return _run(f"the table {table}", operation)


def ask(operation: Operation[T]) -> T:
    """Run one operation on several parts of a deployment; raises CliError."""
    return _run("the deployment", operation)


def _run(what: str, operation: Operation[T]) -> T:
    from botocore.exceptions import BotoCoreError

    from cli.deployment.aws import client_of
    from handler.aws.sync import Aws
    from handler.errors import AwsError

    try:
        return Aws(client_of).run(operation)
    except (AwsError, BotoCoreError) as exc:
        raise CliError(f"{what} cannot be used: {exc}") from exc


def _variable_of(part: Part) -> str:
    return f"TIDEMILL_{part.upper()}"


def _part_of_stack(stack: str, part: Part) -> str:
    from cli.deployment.aws import client_of, told

    cloudformation = client_of("cloudformation")
    try:
        with told(f"reading the stack {stack}"):
            found = cloudformation.describe_stacks(StackName=stack)["Stacks"][0]
    except Unreachable:
        raise
    except CliError as exc:
        kind = KeyRefused if isinstance(exc, KeyRefused) else Refused
        raise kind(
            f"{exc}\nname the {part} by --{part}, or another deployment by --deployment"
        ) from exc
    outputs = {output["OutputKey"]: output["OutputValue"] for output in found.get("Outputs", ())}
    key = _OUTPUTS[part]
    if key not in outputs:
        raise Refused(f"the stack {stack} is none of Tidemill's: it names no {part}")
    return str(outputs[key])
