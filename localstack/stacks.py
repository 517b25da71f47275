"""The real stacks on an emulator: synthesised as for AWS, deployed by the same command."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3

from infra.ops.outputs import Outputs, read_outputs
from localstack.processes import ROOT

_NODE_BIN = ROOT / "infra" / "node_modules" / ".bin"
# The emulator has no GPUs to scale: workers are separate processes.
_STACKS = ("Data", "Api")
_ACCOUNT = "aws://000000000000/us-east-1"


class DeploymentFailed(Exception):
    """The stacks could not be deployed; the message contains the command's output."""


def synthesise(folder: Path, *, config: Path, **context: str) -> Path:
    """Write the templates of `config`, for Lambdas on this machine, below `folder`."""
    out = folder / "cdk"
    pairs = {"local": "true", "config": str(config.absolute()), **context}
    words = [word for name, value in pairs.items() for word in ("-c", f"{name}={value}")]
    _wait_for(_start(["cdk", "synth", "--quiet", "--output", str(out), *words], {}))
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
    # With a named account, outside cdk.json's folder, bootstrapping needs no synthesis.
    bootstrapping = _start(["cdklocal", "bootstrap", _ACCOUNT], environment, cwd=folder)
    try:
        out = synthesise(folder, config=config, model_name=model_name, aliases=json.dumps(aliases))
    except BaseException:
        _kill(bootstrapping)
        raise
    _wait_for(bootstrapping)
    _wait_for(
        _start(
            ["cdklocal", "deploy", "--app", str(out), *_STACKS, "--require-approval", "never"],
            environment,
        )
    )
    return read_outputs(boto3.client("cloudformation", **client_options(environment)), name)


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


def _start(
    command: list[str], environment: Mapping[str, str], *, cwd: Path = ROOT
) -> subprocess.Popen[str]:
    found = shutil.which(command[0], path=str(_NODE_BIN))
    if found is None:
        raise DeploymentFailed(
            f"{command[0]} is not installed: run `make demo`, which installs it (it needs Node.js)"
        )
    quiet = {
        "CI": "true",
        "CDK_DISABLE_CLI_TELEMETRY": "true",  # also where cdk.json is not read
        "CDK_VALIDATION": "false",  # saves seconds per synthesis, for rules that no emulator has
    }
    return subprocess.Popen(  # noqa: S603 - our own command
        [found, *command[1:]],
        cwd=cwd,
        env={**os.environ, **quiet, **environment, "PATH": _path()},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Ctrl-C is for the user's process, which ends this one and its children.
        start_new_session=True,
    )


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _wait_for(process: subprocess.Popen[str]) -> None:
    try:
        output, _ = process.communicate()
    except BaseException:
        _kill(process)
        raise
    if process.returncode:
        command = " ".join(str(word) for word in process.args)  # type: ignore[union-attr]
        raise DeploymentFailed(f"{command} failed:\n{output[-4000:]}")


def _path() -> str:
    """Return a PATH on which `python` is the running one, as cdk.json requires."""
    return os.pathsep.join((str(Path(sys.executable).parent), str(_NODE_BIN), os.environ["PATH"]))
