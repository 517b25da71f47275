"""The emulators that adapters are tested on; no single one is trusted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import boto3
from botocore.config import Config
from pytest_localstack.session import RunningSession

from localstack.ministack import environment_for, find_ministack, running_ministack, running_moto
from localstack.resources import Resources, create_resources
from tests import framed_calls
from tests.warm_start import COLD_VARIABLE
from tidemill.handler.aws.calls import Operation, client_options
from tidemill.handler.aws.stores.table import Table, id_of_active
from tidemill.handler.deployment import Deployment
from tidemill.handler.settings import read_settings

MODEL = "tidemill-demo"
SERVICES = ("s3", "sqs", "dynamodb", "events")
# A client takes longer to create than most of its calls. Event listeners are removed at the end.
_clients: dict[tuple[str, str, str], Any] = {}
# What was created first, by its emulator and arguments, and the requests for it.
_deployments: dict[tuple[Any, ...], tuple[Resources, list[framed_calls.Request]]] = {}
ARE_FRAMED = COLD_VARIABLE not in os.environ  # `make test-all` uses HTTP, and signs its calls
if ARE_FRAMED:
    framed_calls.install()
# A third one if Docker or a LocalStack account exists.
NAMES = ("ministack", "moto", *(["localstack"] if "AWS_ENDPOINT_URL" in os.environ else []))


@dataclass(frozen=True, slots=True)
class Emulator:
    """A server that emulates AWS."""

    name: str
    endpoint_url: str

    def client(self, service: str, config: Config | None = None) -> Any:
        """Return a boto3 client for it, as `sync.Aws` does; equal configs share a client."""
        config = config or Config(**client_options(service))
        key = (self.endpoint_url, service, repr(config._user_provided_options))
        if key not in _clients:
            _clients[key] = boto3.client(
                service,
                endpoint_url=self.endpoint_url,
                region_name="us-east-1",
                aws_access_key_id="test",
                aws_secret_access_key="test",
                config=config,
            )
        return _clients[key]

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables for a process that uses it."""
        return environment_for(self.endpoint_url)

    def create(self, *models: str, **visibility: int) -> Resources:
        """Return a separate deployment for one test."""
        prefix, models = f"tidemill-{uuid4().hex[:10]}", models or (MODEL,)
        if self.name != "ministack" or not ARE_FRAMED:
            return create_resources(self.endpoint_url, prefix=prefix, models=models, **visibility)
        # A thousand deployments differ only in their names: their requests are made once.
        key = (self.endpoint_url, models, *visibility.items())
        if key not in _deployments:
            with framed_calls.recorded() as requests:
                found = create_resources(
                    self.endpoint_url, prefix=prefix, models=models, **visibility
                )
            _deployments[key] = found, requests
            return found
        found, requests = _deployments[key]
        framed_calls.repeat(self.endpoint_url, requests, found.bucket, prefix)
        return _renamed(found, prefix)


def _renamed(resources: Resources, prefix: str) -> Resources:
    old = resources.bucket
    names = {
        field.name: getattr(resources, field.name).replace(old, prefix)
        for field in fields(resources)
        if field.name != "work"
    }
    work = {model: url.replace(old, prefix) for model, url in resources.work.items()}
    return Resources(**names, work=work)


def deployment_of(resources: Resources, **settings: str) -> Deployment:
    """Return the factories of operations on these resources."""
    more = {f"TIDEMILL_{name.upper()}": value for name, value in settings.items()}
    return Deployment(read_settings(resources.environment | more))


def active_ids(table: Table) -> Operation[list[str]]:
    """Return the IDs of all batches in the list of active ones."""
    found: list[str] = []
    after = None
    while True:
        names, after = yield from table.page_of_active(after)
        found += map(id_of_active, names)
        if after is None:
            return found


@contextmanager
def running(name: str, folder: Path) -> Iterator[Emulator]:
    """Run the emulator of this name, or use the one in `AWS_ENDPOINT_URL`."""
    with ExitStack() as stack:
        run_ministack = _framed_ministack if ARE_FRAMED else running_ministack
        if name == "localstack":
            url = os.environ["AWS_ENDPOINT_URL"]
        else:
            url = stack.enter_context(
                running_moto(folder) if name == "moto" else run_ministack(folder)
            )
        address = urlsplit(url)
        services = dict.fromkeys(SERVICES, address.port)
        # Wait until each service is up.
        stack.enter_context(
            RunningSession(address.hostname, services=services, region_name="us-east-1")
        )
        yield Emulator(name, url)


@contextmanager
def _framed_ministack(folder: Path) -> Iterator[str]:
    """Run MiniStack so that calls of this process need no HTTP."""
    python = find_ministack().resolve().with_name("python")
    script = Path(__file__).with_name("framed_ministack.py")
    with (
        # The path of a socket must be short.
        TemporaryDirectory(prefix="frames-") as short,
        # -P: a folder of ours is called like MiniStack's modules.
        running_ministack(folder, command=(python, "-P", script, f"{short}/s")) as url,
        framed_calls.framed(url, Path(short, "s")),
    ):
        yield url


def count_messages(sqs: Any, url: str) -> int:
    """Return the number of messages in a queue, including those in flight."""
    names = ["ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible"]
    found = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=names)["Attributes"]
    return sum(int(found[name]) for name in names)
