"""The whole cloud on this machine: an emulator, the real stacks, a machine for workers, a key."""

from __future__ import annotations

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

from handler.aws.sync import Aws
from handler.batch.fleet import Brake, FleetPlan
from handler.batch.keys import DROP_TENANT
from handler.deployment import Deployment
from handler.errors import AwsError
from handler.settings import read_settings
from handler.tenants.keys import KeyStore
from infra.client import ENDED, Api, ApiFailed
from infra.config import Config, Model, read_config, with_aliases
from infra.drops import Drops
from infra.outputs import Outputs
from infra.worker import adapter_flags
from localstack.emulator import MAX_TRIES, LocalEmulator, Silence, Tries
from localstack.fleet import LocalFleet
from localstack.guard import Guard
from localstack.ministack import PortTaken, ServerEnded, ServerSilent, environment_for
from localstack.processes import Processes, why_ended
from localstack.stacks import client_options, deploy, local_api_url, local_page_url
from localstack.state import State, held_state

# Nobody pays for a machine by the hour here: as many as there may be, unless all is done sooner.
_TARGET_SECONDS = 60
_START_SECONDS = 15
# A worker that is told to end needs a minute at most, the emulator half of one to write its state.
_GUARD_SECONDS = 70.0
_LOOK_SECONDS = 0.1
# On this machine an answer takes milliseconds; what is late is asked for again a second later.
_READ_SECONDS = 10
_MAX_SILENT_SECONDS = 60.0


class WorkersBraked(Exception):
    """No worker of a model is started any more; the message says why."""


class CloudLost(Exception):
    """The emulator ended, and what was in it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """What a person may ask of a local cloud.

    `workers` is how many each model has at most; they end when there was no work for
    `idle_seconds`. `engine_flags` go to all of them, `aliases` are further names of the only model,
    `adapters` those of adapters that the flags give it. What the emulator holds is gone at the end
    unless `state` names a folder for it.
    """

    config: Path
    workers: int = 1
    idle_seconds: float = 60.0
    engine_flags: Sequence[str] = ()
    aliases: Sequence[str] = ()
    adapters: Sequence[str] = ()
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
    state: State | None
    say: Callable[[str], None]
    tries: Tries
    silence: Silence = field(default_factory=Silence)
    brakes: dict[str, Brake] = field(default_factory=dict)

    def api(self) -> AbstractContextManager[Api]:
        """Return a client of its API, to be closed by leaving it."""
        return closing(Api(self.api_url, self.key))

    def run_file(
        self, name: str, body: bytes, *, seconds: float, show: Callable[[dict[str, Any]], None]
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Drop a file; return its Batch, and its rows, good and bad, in the order of its lines."""

        def has_ended(batch: dict[str, Any]) -> bool:
            self.check()
            return batch["status"] in ENDED

        url = self.drops.drop(name, body)
        with self.api() as api:
            try:
                batch = api.follow(url, seconds=seconds, until=has_ended, show=show)
            except ApiFailed:
                self.check()  # which may know why
                raise
        rows = self.drops.rows(name) + self.drops.rows(name, ".errors")
        if not rows:
            return batch, []
        place = {custom_id: number for number, custom_id in enumerate(_custom_ids(body))}
        return batch, sorted(rows, key=lambda row: place[row["custom_id"]])

    def tend(self) -> None:
        """Start the emulator again if it has ended, tell of brakes; called about every second.

        A late answer is asked for again; who does not answer for a minute has ended. Raises
        CloudLost when the emulator has ended for good, or has kept nothing.
        """
        if (status := self.emulator.process.poll()) is not None:
            self._bring_back(why_ended(status, ""))
        try:
            self._tell_brakes()
        except AwsError:
            seconds = self.silence.seconds(time.monotonic())
            if seconds >= _MAX_SILENT_SECONDS:
                self._bring_back(f"it has not answered for {seconds:.0f} seconds")
            elif not seconds:
                self.say("the emulator is late with an answer: asking again")
        else:
            self.silence.end()

    def _tell_brakes(self) -> None:
        for model, plan in self.fleet.plans.items():
            brake = self.aws.run(self.deployment.fleets.get_state(model)).brake
            if brake is None or brake.release != plan.release:
                self.brakes.pop(model, None)
            elif brake != self.brakes.get(model):
                self.brakes[model] = brake
                self.say(f"no worker of {model} is started any more: {brake.reason} {brake.advice}")

    def check(self) -> None:
        """Tend it; raises WorkersBraked when no worker comes any more for some model."""
        self.tend()
        for model, brake in self.brakes.items():
            raise WorkersBraked(f"no worker of {model} is started any more: {brake.reason}")

    def wait_until_idle(self, seconds: float) -> bool:
        """Return whether the last worker has ended before so many seconds are over."""
        deadline = time.monotonic() + seconds
        while self.fleet.workers():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def release(self, *flags: str, **environment: str) -> None:
        """Let the workers of all models be started with these flags too, in the place of others."""
        for model in self.config.models:
            plan = FleetPlan(
                model=model.name,
                launcher="processes",
                release=datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f"),
                max_workers=self.options.workers,
                target_seconds=_TARGET_SECONDS,
                start_seconds=_START_SECONDS,
            )
            command = (sys.executable, "-m", "cli", "worker", *worker_flags(model, self.options))
            self.fleet.release(plan, *command, *flags, **environment)

    def _bring_back(self, reason: str) -> None:
        """Start the emulator again where it has kept what is in it."""
        self.silence.end()
        if self.state is None:
            raise CloudLost(f"the emulator ended ({reason}), and all that was in it is lost")
        while (seconds := self.tries.seconds_to_next(time.monotonic())) is not None:
            self.say(
                f"the emulator ended ({reason}); starting it again in {seconds:g} s with what "
                f"{self.state.folder} holds, which may lack the last seconds"
            )
            time.sleep(seconds)
            self.tries.is_due(time.monotonic())
            try:
                self.emulator.restart()
            except (PortTaken, ServerEnded, ServerSilent) as exc:
                reason = str(exc)
            else:
                self.say("the emulator is back")
                return
        raise CloudLost(f"the emulator ended {MAX_TRIES + 1} times in a row: {reason}")


@contextmanager
def running_cloud(options: LocalOptions, say: Callable[[str], None]) -> Iterator[LocalCloud]:
    """Run a whole cloud until the block is left, and end all of it then, or when we are killed."""
    config = with_aliases(read_config(options.config), options.aliases, "--served-model-name")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-")))
        guard = stack.enter_context(Guard(_GUARD_SECONDS))
        state = None
        if options.state is not None:
            state = stack.enter_context(held_state(options.state.resolve(), options.port, say))
        say("starting the emulator and deploying the stacks to it")
        emulator = stack.enter_context(LocalEmulator(folder, guard, options.port, state))
        endpoint_url = emulator.endpoint_url
        environment = environment_for(endpoint_url)
        clients = client_options(environment)
        with nullcontext() if state is None else state.deploying():
            outputs = deploy(
                environment,
                folder,
                config=options.config,
                name=config.name,
                aliases=(*options.aliases, *options.adapters),
            )
            key = new_key(clients, outputs, name="local")
        # A worker that looks at its queue for a second only is stopped as quickly.
        told = environment | outputs.environment | {"TIDEMILL_WAIT_SECONDS": "1"}
        processes = stack.enter_context(Processes(told, folder, guard))
        brief = ClientConfig(read_timeout=_READ_SECONDS, retries={"total_max_attempts": 2})
        aws = Aws(
            lambda service, config: boto3.client(service, **clients, config=config.merge(brief))
        )
        deployment = Deployment(read_settings(outputs.environment))
        fleet = LocalFleet(processes, aws, deployment, say)
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
            say,
            Tries(time.monotonic()),
        )
        cloud.release()
        stack.enter_context(fleet.tending())
        yield cloud


def new_key(clients: Mapping[str, Any], outputs: Outputs, *, name: str) -> str:
    """Return the token of a new key of the API, for the tenant of what is dropped."""
    aws = Aws(lambda service, **options: boto3.client(service, **clients, **options))
    making = KeyStore(outputs.table).create(tenant=DROP_TENANT, name=name, now=int(time.time()))
    return aws.run(making)


def worker_flags(model: Model, options: LocalOptions) -> tuple[str, ...]:
    """Return the flags of a model's workers; the demo model answers in its name unless told.

    A model's own `args` come before what is asked of all.
    """
    names = ("--served-model-name", model.name, *model.aliases)
    idle = ("--exit-when-idle", f"{options.idle_seconds:g}")
    return (*names, *adapter_flags(model), *idle, *model.args, *options.engine_flags)


def _custom_ids(body: bytes) -> list[str]:
    return [json.loads(line)["custom_id"] for line in body.split(b"\n") if line.strip()]
