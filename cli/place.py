"""The table of a deployment, for commands of whoever has AWS credentials for it."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from cli.errors import CliError, Refused

if TYPE_CHECKING:
    from handler.aws.calls import Operation, T

_TABLE = "TIDEMILL_TABLE"
_DEPLOYMENT = "tidemill"


def add_place(parser: argparse.ArgumentParser) -> None:
    """Let a command say where the deployment is."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--table", help=f"the deployment's table (default: {_TABLE})")
    group.add_argument(
        "--deployment", metavar="NAME", help=f"the deployment's name ({_DEPLOYMENT})"
    )


def need_cloud(what: str) -> None:
    """Raise CliError unless the libraries of the cloud are installed, which `what` needs."""
    try:
        import handler.aws.sync  # noqa: F401
    except ModuleNotFoundError as exc:
        raise CliError(
            f"{what} need {exc.name}, which is not installed: pip install 'tidemill[cloud]'"
        ) from exc


def table_of(arguments: argparse.Namespace) -> str:
    """Return the table that the arguments or the environment name; raises Refused."""
    table: str | None = arguments.table
    if table is None and arguments.deployment is None:
        table = os.environ.get(_TABLE)
    return table or _table_of_stack(f"{arguments.deployment or _DEPLOYMENT}-data")


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
    from botocore.exceptions import BotoCoreError

    from handler.aws.sync import Aws
    from handler.errors import AwsError

    try:
        return Aws().run(operation)
    except (AwsError, BotoCoreError) as exc:
        raise CliError(f"the table {table} cannot be used: {exc}") from exc


def _table_of_stack(stack: str) -> str:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        found = boto3.client("cloudformation").describe_stacks(StackName=stack)["Stacks"][0]
    except (BotoCoreError, ClientError) as exc:
        raise Refused(
            f"the stack {stack} cannot be read: {exc}\nname the table by --table, or another "
            "deployment by --deployment"
        ) from exc
    outputs = {output["OutputKey"]: output["OutputValue"] for output in found.get("Outputs", ())}
    if "TableName" not in outputs:
        raise Refused(f"the stack {stack} is none of Tidemill's: it names no table")
    return str(outputs["TableName"])
