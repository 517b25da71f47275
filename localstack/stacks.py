"""The real stacks on an emulator: synthesised as for AWS, deployed through CloudFormation."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import boto3
from botocore.exceptions import BotoCoreError, ClientError, WaiterError

from infra.archive import zip_folder
from infra.ops.outputs import Outputs, read_outputs
from localstack.processes import ROOT

# The values of references in the places of assets.
_PLACE: Final = {"AWS::AccountId": "000000000000", "AWS::Region": "us-east-1"}
# Templates refuse to be deployed by a bootstrap older than 6.
_BOOTSTRAP_VERSION: Final = "30"
_CAPABILITIES: Final = ("CAPABILITY_IAM", "CAPABILITY_NAMED_IAM", "CAPABILITY_AUTO_EXPAND")
# Up to ten minutes.
_WAITING: Final = {"Delay": 0.2, "MaxAttempts": 3_000}


class DeploymentFailed(Exception):
    """The stacks could not be deployed; the message contains the reason."""


def synthesise(folder: Path, *, config: Path, **context: str) -> Path:
    """Write the templates of `config`, for Lambdas on this machine, below `folder`.

    Runs the program of cdk.json, as the CDK's command does after seconds of loading.
    Raises DeploymentFailed.
    """
    if shutil.which(os.environ.get("JSII_NODE", "node")) is None:
        raise DeploymentFailed("Node.js is not installed: install version 20 or newer")
    out = folder / "cdk"
    values = json.loads((ROOT / "cdk.json").read_text(encoding="utf-8"))["context"]
    values |= {"local": "true", "config": str(config.absolute()), **context}
    _run(
        [sys.executable, "-m", "infra.app"],
        CDK_OUTDIR=str(out),
        CDK_CONTEXT_JSON=json.dumps(values),
        CDK_VALIDATION="false",  # saves seconds per synthesis, for rules that no emulator has
    )
    return out


def deploy(
    environment: Mapping[str, str],
    folder: Path,
    *,
    config: Path,
    name: str,
    model_name: str = "",
    aliases: Sequence[str] = (),
) -> Outputs:
    """Deploy Data and Api to an emulator, again or for the first time; return their outputs.

    `environment` is `environment_for` the emulator, `name` the configuration's, `model_name`
    another name of its only model, `aliases` further ones. Raises DeploymentFailed.
    """
    out = synthesise(folder, config=config, model_name=model_name, aliases=json.dumps(aliases))
    try:
        cloudformation = boto3.client("cloudformation", **client_options(environment))
        _apply_all(out, environment, cloudformation)
        return read_outputs(cloudformation, name)
    except (BotoCoreError, ClientError) as exc:
        raise DeploymentFailed(f"a request to the emulator failed: {exc}") from exc


def _apply_all(out: Path, environment: Mapping[str, str], cloudformation: Any) -> None:
    options = client_options(environment)
    parameters = boto3.client("ssm", **options)
    for stack in _stacks(out):
        properties = stack["properties"]
        template = _publish(out, properties, boto3.client("s3", **options))
        version = properties["bootstrapStackVersionSsmParameter"]
        parameters.put_parameter(
            Name=version, Value=_BOOTSTRAP_VERSION, Type="String", Overwrite=True
        )
        _apply(
            cloudformation,
            StackName=properties["stackName"],
            TemplateURL=f"{environment['AWS_ENDPOINT_URL']}/{template}",
            Capabilities=_CAPABILITIES,
            Tags=[
                {"Key": key, "Value": value} for key, value in properties.get("tags", {}).items()
            ],
        )


def _stacks(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the stacks of synthesised templates, each after those that it depends on."""
    artifacts = json.loads((out / "manifest.json").read_text(encoding="utf-8"))["artifacts"]
    wanted = {
        name: artifact
        for name, artifact in artifacts.items()
        if artifact["type"] == "aws:cloudformation:stack"
    }
    while wanted:
        name = next(
            name
            for name, artifact in wanted.items()
            if wanted.keys().isdisjoint(artifact.get("dependencies", ()))
        )
        yield wanted.pop(name)


def _publish(out: Path, properties: Mapping[str, Any], s3: Any) -> str:
    """Upload the template and the code of a stack; return the template's bucket and key."""
    template = ""
    name = properties["templateFile"].removesuffix(".template.json")
    assets = json.loads((out / f"{name}.assets.json").read_text(encoding="utf-8"))["files"]
    for asset in assets.values():
        [destination] = asset["destinations"].values()
        bucket, key = (_resolve(destination[name]) for name in ("bucketName", "objectKey"))
        with suppress(s3.exceptions.BucketAlreadyOwnedByYou):
            s3.create_bucket(Bucket=bucket)
        path = out / asset["source"]["path"]
        if path.is_dir():
            archive = out / f"{path.name}.zip"
            zip_folder(path, archive, compresslevel=0)
            path = archive
        with path.open("rb") as body:
            s3.put_object(Bucket=bucket, Key=key, Body=body)
        if asset["source"]["path"] == properties["templateFile"]:
            template = f"{bucket}/{key}"
    return template


def _resolve(text: str) -> str:
    for name, value in _PLACE.items():
        text = text.replace(f"${{{name}}}", value)
    return text


def _apply(cloudformation: Any, **stack: Any) -> None:
    """Create or update a stack, and wait for it; raises DeploymentFailed."""
    name = stack["StackName"]
    try:
        try:
            cloudformation.update_stack(**stack)
            kind = "update"
        except ClientError as exc:
            words = str(exc)
            if "No updates are to be performed" in words:
                return
            if f"[{name}] does not exist" not in words:
                raise
            cloudformation.create_stack(**stack)
            kind = "create"
        cloudformation.get_waiter(f"stack_{kind}_complete").wait(
            StackName=name, WaiterConfig=_WAITING
        )
    except ClientError as exc:
        raise DeploymentFailed(f"the stack {name} cannot be deployed: {exc}") from exc
    except WaiterError as exc:
        events = cloudformation.describe_stack_events(StackName=name)["StackEvents"]
        started = (name, f"{kind.upper()}_IN_PROGRESS")
        reasons = [
            f"{event['LogicalResourceId']}: {event['ResourceStatusReason']}"
            for event in takewhile(  # the newest are first
                lambda event: (event["LogicalResourceId"], event["ResourceStatus"]) != started,
                events,
            )
            if event["ResourceStatus"].endswith("FAILED") and event.get("ResourceStatusReason")
        ]
        raise DeploymentFailed(
            f"the stack {name} was not deployed: {'; '.join(reasons) or exc}"
        ) from exc


def local_api_url(endpoint_url: str, outputs: Outputs) -> str:
    """Return an API address that every resolver supports; the stack's own needs a wildcard."""
    return f"{endpoint_url}/_aws/execute-api/{_api_id(outputs)}/$default"


def local_page_url(endpoint_url: str, outputs: Outputs) -> str:
    """Return an address of the dashboard with a separate host, which browsers know without DNS."""
    address = urlsplit(endpoint_url)
    host = f"{_api_id(outputs)}.execute-api.localhost:{address.port}"
    return f"{address.scheme}://{host}/dashboard"


def _api_id(outputs: Outputs) -> str:
    return outputs.api_url.split("//")[1].split(".")[0]


def client_options(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a boto3 client for the emulator of an environment."""
    return {
        "endpoint_url": environment["AWS_ENDPOINT_URL"],
        "region_name": environment["AWS_REGION"],
        "aws_access_key_id": environment["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
        "verify": environment.get("AWS_CA_BUNDLE"),
    }


def _run(command: list[str], **environment: str) -> None:
    process = subprocess.Popen(  # noqa: S603 - our own command
        command,
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ctrl-C is for the user's process, which ends this one and its children.
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    if process.returncode:
        raise DeploymentFailed(f"{' '.join(command)} failed:\n{output[-4000:]}")
