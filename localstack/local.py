"""Local cloud: an emulator, the real stacks, a fleet of worker processes, an API key."""

from __future__ import annotations

import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config as ClientConfig

from infra.config import Config, Model, read_config, with_aliases, with_name
from infra.ops.client import ENDED, Api, ApiFailed
from infra.ops.drops import Drops
from infra.ops.outputs import Outputs
from infra.worker_flags import adapter_flags
from localstack.emulator import MAX_RESTARTS, LocalEmulator, Outage, RestartBackoff
from localstack.fleet import LocalFleet
from localstack.ministack import PortTaken, ServerEnded, ServerSilent, environment_for
from localstack.processes import Processes, exit_reason
from localstack.stacks import client_options, deploy, local_api_url, local_page_url
from localstack.state_folder import StateFolder, locked_state
from localstack.watchdog import Watchdog
from tidemill.batch.file.formats import FileFormat, detect_file, open_lines
from tidemill.batch.file.lines import FormatError, read_lines
from tidemill.batch.fleet import CircuitBreaker, FleetPlan
from tidemill.batch.object_keys import DROP_TENANT, recipe_key
from tidemill.handler.aws.sync import Aws
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError
from tidemill.handler.settings import read_settings
from tidemill.handler.tenants.keys import KeyStore

# Machines are free here: start as many as allowed, unless all work is done sooner.
_TARGET_SECONDS = 60
_START_SECONDS = 15
# A worker needs at most a minute to end, the emulator half of that to write its state.
_WATCHDOG_SECONDS = 70.0
_POLL_SECONDS = 0.1
# On this machine a reply takes milliseconds; a late one is requested again a second later.
_READ_SECONDS = 10
_MAX_SILENT_SECONDS = 60.0


class WorkersBraked(Exception):
    """The circuit breaker prevents starts of a model's workers; the message has the reason."""


class CloudLost(Exception):
    """The emulator ended, and its content is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """Options of a local cloud.

    `workers` is the maximum per model; workers end after `idle_seconds` without work.
    `engine_flags` go to all of them. `model_name` replaces the name of the only model, `aliases`
    are additional ones, `adapters` are the names of adapters in the flags. `variables` are
    environment variables of the workers. The emulator's content is lost at the end unless `state`
    names a folder for it.
    """

    config: Path
    workers: int = 1
    idle_seconds: float = 60.0
    engine_flags: Sequence[str] = ()
    model_name: str = ""
    aliases: Sequence[str] = ()
    adapters: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
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
    config: Config
    options: LocalOptions
    processes: Processes
    fleet: LocalFleet
    aws: Aws
    deployment: Deployment
    emulator: LocalEmulator
    state: StateFolder | None
    notify: Callable[[str], None]
    backoff: RestartBackoff
    outage: Outage = field(default_factory=Outage)
    breakers: dict[str, CircuitBreaker] = field(default_factory=dict)

    def api(self) -> AbstractContextManager[Api]:
        """Return a client of its API, as a context manager."""
        return closing(Api(self.api_url, self.key))

    def run_file(
        self, name: str, body: bytes, *, seconds: float, show: Callable[[dict[str, Any]], None]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Drop a file; return its Batch, and its rows, successful and failed, in line order."""
        batch = self.follow(self.drop(name, body), seconds=seconds, show=show)
        return batch, self.rows(name, body)

    def drop(self, name: str, body: bytes, recipe: str | None = None) -> str:
        """Put a file, or a table with its recipe, into the bucket; return its URL.

        A table's name has the suffix of its format; a file gets one.
        """
        if recipe is None:
            name += _form_of(body).suffix
        else:
            self.drops.put(recipe_key(name), recipe.encode())
        return self.drops.put(name, body)

    def follow(
        self, url: str, *, seconds: float, show: Callable[[dict[str, Any]], None]
    ) -> dict[str, Any]:
        """Return the Batch of a drop once it has ended; workers and emulator are supervised."""

        def has_ended(batch: dict[str, Any]) -> bool:
            self.check()
            return batch["status"] in ENDED

        with self.api() as api:
            try:
                return api.follow(url, seconds=seconds, until=has_ended, show=show)
            except ApiFailed:
                self.check()  # it may know the reason
                raise

    def rows(self, name: str, body: bytes) -> list[dict[str, Any]]:
        """Return the rows of a dropped file, successful and failed, in line order."""
        rows = self.drops.rows(name) + self.drops.rows(name, ".errors")
        if not rows:
            return []
        lines = read_lines(open_lines(_form_of(body), io.BytesIO(body)))
        place = {json.loads(raw.data)["custom_id"]: raw.number for raw in lines}
        return sorted(rows, key=lambda row: place[row["custom_id"]])

    def table(self, batch: Mapping[str, Any]) -> bytes | None:
        """Return the table of an ended batch, or None if it has none."""
        url: str | None = batch["tidemill"]["table_url"]
        if url is None:
            return None
        return self.drops.read(url.removeprefix(f"s3://{self.outputs.bucket}/"))

    def supervise(self) -> None:
        """Restart an emulator that has ended and report circuit breakers; called every second.

        A late reply is requested again; an emulator that is silent for a minute has ended. Raises
        CloudLost if the emulator has ended for good, or has saved no state.
        """
        if (status := self.emulator.process.poll()) is not None:
            self._restart_emulator(exit_reason(status, ""))
        try:
            self._report_breakers()
        except AwsError:
            seconds = self.outage.record_failure(time.monotonic())
            if seconds >= _MAX_SILENT_SECONDS:
                self._restart_emulator(f"it has not replied for {seconds:.0f} seconds")
            elif not seconds:
                self.notify("the emulator is slow to reply: trying again")
        else:
            self.outage.end()

    def _report_breakers(self) -> None:
        for model, plan in self.fleet.plans.items():
            breaker = self.aws.run(self.deployment.fleets.get_state(model)).breaker
            if breaker is None or breaker.release != plan.release:
                self.breakers.pop(model, None)
            elif breaker != self.breakers.get(model):
                self.breakers[model] = breaker
                self.notify(
                    f"no more workers of {model} are started: {breaker.reason} {breaker.advice}"
                )

    def check(self) -> None:
        """Supervise once; raises WorkersBraked if a model's circuit breaker is open."""
        self.supervise()
        for model, breaker in self.breakers.items():
            raise WorkersBraked(f"no more workers of {model} are started: {breaker.reason}")

    def wait_until_idle(self, seconds: float) -> bool:
        """Return whether the last worker has ended within that many seconds."""
        deadline = time.monotonic() + seconds
        while self.fleet.workers():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def release(self, *flags: str, **environment: str) -> None:
        """Start all models' workers with these additional flags; existing ones are replaced."""
        for model in self.config.models:
            plan = FleetPlan(
                model=model.name,
                launcher="processes",
                release=datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f"),
                max_workers=self.options.workers,
                target_seconds=_TARGET_SECONDS,
                start_seconds=_START_SECONDS,
            )
            command = (
                sys.executable,
                "-m",
                "tidemill",
                "worker",
                *worker_flags(model, self.options),
            )
            self.fleet.release(plan, *command, *flags, **environment)

    def _restart_emulator(self, reason: str) -> None:
        """Restart the emulator if its state was persisted; raises CloudLost otherwise."""
        self.outage.end()
        if self.state is None:
            raise CloudLost(f"the emulator ended ({reason}), and its content is lost")
        while (seconds := self.backoff.next_delay(time.monotonic())) is not None:
            self.notify(
                f"the emulator ended ({reason}); restarting it in {seconds:g} s from "
                f"{self.state.folder}, which may lack the last seconds"
            )
            time.sleep(seconds)
            self.backoff.record_start(time.monotonic())
            try:
                self.emulator.restart()
            except (PortTaken, ServerEnded, ServerSilent) as exc:
                reason = str(exc)
            else:
                self.notify("the emulator is running again")
                return
        raise CloudLost(f"the emulator ended {MAX_RESTARTS + 1} times in a row: {reason}")


@contextmanager
def running_cloud(options: LocalOptions, notify: Callable[[str], None]) -> Iterator[LocalCloud]:
    """Run a whole cloud until the block is left or this process is killed."""
    config = with_name(read_config(options.config), options.model_name, "--served-model-name")
    config = with_aliases(config, options.aliases, "--served-model-name")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-")))
        watchdog = stack.enter_context(Watchdog(_WATCHDOG_SECONDS))
        state = None
        if options.state is not None:
            state = stack.enter_context(locked_state(options.state.resolve(), options.port, notify))
        notify("starting the emulator and deploying the stacks to it")
        emulator = stack.enter_context(LocalEmulator(folder, watchdog, options.port, state))
        endpoint_url = emulator.endpoint_url
        environment = environment_for(endpoint_url)
        clients = client_options(environment)
        with nullcontext() if state is None else state.deploying():
            outputs = deploy(
                environment,
                folder,
                config=options.config,
                name=config.name,
                model_name=options.model_name,
                aliases=(*options.aliases, *options.adapters),
            )
            key = create_key(clients, outputs, name="local")
        # A worker that polls its queue for a second only is also stopped that quickly.
        variables = environment | outputs.environment | {"TIDEMILL_WAIT_SECONDS": "1"}
        variables |= options.variables
        processes = stack.enter_context(Processes(variables, folder, watchdog))
        brief = ClientConfig(read_timeout=_READ_SECONDS, retries={"total_max_attempts": 2})
        aws = Aws(
            lambda service, config: boto3.client(service, **clients, config=config.merge(brief))
        )
        deployment = Deployment(read_settings(outputs.environment))
        fleet = LocalFleet(processes, aws, deployment, notify)
        cloud = LocalCloud(
            endpoint_url,
            outputs,
            Drops(boto3.client("s3", **clients), outputs.bucket),
            local_api_url(endpoint_url, outputs),
            local_page_url(endpoint_url, outputs),
            key,
            config,
            options,
            processes,
            fleet,
            aws,
            deployment,
            emulator,
            state,
            notify,
            RestartBackoff(time.monotonic()),
        )
        cloud.release()
        stack.enter_context(fleet.reconciling())
        yield cloud


def create_key(
    clients: Mapping[str, Any], outputs: Outputs, *, name: str, tenant: str = DROP_TENANT
) -> str:
    """Return the token of a new API key, for the tenant of drops outside any folder."""
    aws = Aws(lambda service, **options: boto3.client(service, **clients, **options))
    making = KeyStore(outputs.table).create(tenant=tenant, name=name, now=int(time.time()))
    return aws.run(making)


def worker_flags(model: Model, options: LocalOptions) -> tuple[str, ...]:
    """Return the flags of a model's workers; the demo model answers in its name by default.

    A model's own `args` come before the flags of all models.
    """
    names = ("--served-model-name", model.name, *model.aliases)
    idle = ("--exit-when-idle", f"{options.idle_seconds:g}")
    return (*names, *adapter_flags(model), *idle, *model.args, *options.engine_flags)


def _form_of(body: bytes) -> FileFormat:
    """Return the format of a file; that of an invalid one is left to intake."""
    try:
        return detect_file(io.BytesIO(body))
    except FormatError:
        return FileFormat()
