"""The whole cloud on this machine: an emulator, the real stacks, workers, a key for the API."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

from handler.aws.sync import Aws
from handler.batch.keys import DROP_TENANT
from handler.tenants.keys import KeyStore
from infra.client import Api
from infra.config import Config, read_config
from infra.drops import Drops
from infra.outputs import Outputs
from localstack.ministack import environment_for, free_port, running_ministack
from localstack.processes import Processes
from localstack.stacks import client_options, deploy, local_api_url, local_page_url


class WorkerEnded(Exception):
    """A worker ended by itself; the message shows the end of its log."""


class StateRefused(Exception):
    """A folder with the state of a cloud that cannot be gone on with as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """What a person may ask of a local cloud.

    `workers` is how many each model has, `engine_flags` go to all of them. What the emulator holds
    is gone at the end unless `state` names a folder for it.
    """

    config: Path
    workers: int = 1
    engine_flags: Sequence[str] = ()
    port: int | None = None
    state: Path | None = None


@dataclass(frozen=True, slots=True)
class LocalCloud:
    """A running local cloud, ready for drops."""

    endpoint_url: str
    outputs: Outputs
    drops: Drops
    api_url: str
    page_url: str
    key: str
    processes: Processes

    def api(self) -> AbstractContextManager[Api]:
        """Return a client of its API, to be closed by leaving it."""
        return closing(Api(self.api_url, self.key))

    def run_file(
        self, name: str, body: bytes, *, seconds: float, show: Callable[[dict[str, Any]], None]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Drop a file; return its Batch, and its rows, good and bad, in the order of its lines."""

        def look(batch: dict[str, Any]) -> None:
            self.check()
            show(batch)

        url = self.drops.drop(name, body)
        with self.api() as api:
            batch = api.follow(url, seconds=seconds, show=look)
        rows = self.drops.rows(name) + self.drops.rows(name, ".errors")
        if not rows:
            return batch, []
        place = {custom_id: number for number, custom_id in enumerate(_custom_ids(body))}
        return batch, sorted(rows, key=lambda row: place[row["custom_id"]])

    def check(self) -> None:
        """Raise WorkerEnded when a worker is no more."""
        for name, process in self.processes.processes.items():
            if process.poll() is not None:
                said = self.processes.log_of(name)[-2000:]
                raise WorkerEnded(f"{name} ended with {process.returncode}:\n{said}")


@contextmanager
def running_cloud(options: LocalOptions, say: Callable[[str], None]) -> Iterator[LocalCloud]:
    """Run a whole cloud until the block is left, and end all of it then."""
    config = read_config(options.config)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-")))
        say("starting the emulator and deploying the stacks to it")
        port, state = options.port, options.state
        if state is not None:
            port = _port_of(state.resolve(), port)
        endpoint_url = stack.enter_context(
            running_ministack(folder, port, state=state and state.resolve())
        )
        environment = environment_for(endpoint_url)
        outputs = deploy(environment, folder, config=options.config, name=config.name)
        # A worker that looks at its queue for a second only is stopped as quickly.
        told = environment | outputs.environment | {"TIDEMILL_WAIT_SECONDS": "1"}
        processes = stack.enter_context(Processes(told, folder))
        start_workers(processes, config, options)
        clients = client_options(environment)
        yield LocalCloud(
            endpoint_url,
            outputs,
            Drops(boto3.client("s3", **clients), outputs.bucket),
            local_api_url(endpoint_url, outputs),
            local_page_url(endpoint_url, outputs),
            new_key(clients, outputs, name="local"),
            processes,
        )


def _port_of(state: Path, wanted: int | None) -> int:
    """Return the port that the state was kept at: addresses in it, such as queues', name it."""
    state.mkdir(parents=True, exist_ok=True)
    kept = state / "port"
    if not kept.exists():
        kept.write_text(str(wanted or free_port()), encoding="utf-8")
    port = int(kept.read_text(encoding="utf-8"))
    if wanted not in (None, port):
        raise StateRefused(f"{state} was kept at port {port}; it cannot move to {wanted}")
    return port


def new_key(clients: Mapping[str, Any], outputs: Outputs, *, name: str) -> str:
    """Return the token of a new key of the API, for the tenant of what is dropped."""
    aws = Aws(lambda service, **options: boto3.client(service, **clients, **options))
    making = KeyStore(outputs.table).create(tenant=DROP_TENANT, name=name, now=int(time.time()))
    return aws.run(making)


def start_workers(processes: Processes, config: Config, options: LocalOptions) -> None:
    """Start the workers of every model; the demo model answers in its name unless told."""
    for model in config.models:
        flags = ("--served-model-name", model.name, *options.engine_flags)
        for number in range(1, options.workers + 1):
            name = f"worker-{model.slug}-{number}"
            processes.start(name, sys.executable, "-m", "cli", "worker", *flags)


def _custom_ids(body: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in body.split(b"\n") if line.strip()]
