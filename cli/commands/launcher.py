"""`tidemill launcher`: starts workers as Kubernetes Jobs while there are open batches."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidemill.offline.arguments.argument_types import positive_int
from tidemill.offline.console.errors import CliError, Refused, Stopped
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import log

from ..deployment.kubernetes import (
    add_cluster_flags,
    connect_clouds,
    plans_file,
    plans_reader,
    settings_of_environment,
)
from ..deployment.resources import require_cloud
from ..health import VARIABLE, Heartbeat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tidemill.batch.fleet import FleetPlan
    from tidemill.handler.aws.sync import Aws
    from tidemill.handler.deployment import Deployment

_INTERVAL_SECONDS: Final = 15
_NAP_SECONDS: Final = 0.2
# Value of the dimension `service` in its metrics (docs/reference/metrics.md).
_SERVICE: Final = "launcher"
_EPILOG = """\
Run the launcher in the cluster, for a deployment with compute = "none". Environment variables
describe the deployment (TIDEMILL_TABLE, TIDEMILL_WORK_QUEUES and so on: the output
WorkerEnvironment) and are passed to the workers. SIGTERM ends the launcher with 0, but no worker.
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `launcher` to the command line."""
    parser = commands.add_parser(
        "launcher",
        help="start workers on Kubernetes while there are open batches",
        description="Poll a deployment's open batches, and start the missing worker Jobs on "
        "Kubernetes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_cluster_flags(parser)
    parser.add_argument(
        "--interval",
        type=positive_int,
        default=_INTERVAL_SECONDS,
        metavar="SECONDS",
        help=f"set the polling interval (default: {_INTERVAL_SECONDS})",
    )
    parser.add_argument(
        "--health-file",
        type=Path,
        metavar="PATH",
        help="touch this file every few seconds, for python -m tidemill.cli.health "
        f"(default: {VARIABLE})",
    )
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run until a signal, and return the exit status."""
    try:
        with StopSignals() as signals:
            require_cloud("`tidemill launcher`")
            return _run(arguments, signals)
    except Stopped:
        return 0


def _run(arguments: argparse.Namespace, signals: StopSignals) -> int:
    from tidemill.handler.deployment import Deployment
    from tidemill.handler.observability import logger

    path = plans_file(arguments)
    if path is None:
        raise Refused(
            "no plans: pass --plans or set TIDEMILL_PLANS (docs/integrations/kubernetes.md)"
        )
    settings = settings_of_environment()
    read = plans_reader(arguments, path, settings)
    plans = read()
    deployment = Deployment(settings, service=_SERVICE)
    health_file = arguments.health_file or os.environ.get(VARIABLE)
    heartbeat = Heartbeat(Path(health_file) if health_file else None)
    with connect_clouds(arguments) as clouds, signals.on_signal(lambda: None):
        _check(deployment, clouds, plans)
        logger.info("launcher started", models=sorted(plans), interval=arguments.interval)
        while not signals.received:
            heartbeat.beat()
            plans = _newest_plans(read, plans)
            _step(deployment, clouds, plans)
            _rest(arguments.interval, heartbeat, signals)
    logger.info("launcher ended")
    return 0


def _rest(seconds: float, heartbeat: Heartbeat, signals: StopSignals) -> None:
    """Wait until the time has passed or a signal arrives."""
    until = time.monotonic() + seconds
    while not signals.received and time.monotonic() < until:
        heartbeat.beat()
        time.sleep(_NAP_SECONDS)


def _check(deployment: Deployment, clouds: Aws, plans: Mapping[str, FleetPlan]) -> None:
    """Make one call to Kubernetes and to AWS; raises CliError if one fails."""
    from tidemill.handler.errors import AwsError
    from tidemill.handler.fleet.stop import list_workers

    if not plans:
        log("the plans contain no model: no worker is started until they do")
    for model, plan in plans.items():
        try:
            clouds.run(list_workers(deployment, plan))
        except AwsError as exc:
            raise CliError(f"the Jobs of {model} cannot be listed: {exc}") from exc
    try:
        clouds.run(deployment.table.page_of_active(limit=1))
        clouds.run(deployment.overview.get_batches(["batch_none"]))
    except AwsError as exc:
        raise CliError(f"the table {deployment.settings.table} cannot be read: {exc}") from exc


def _newest_plans(
    read: Callable[[], dict[str, FleetPlan]], plans: dict[str, FleetPlan]
) -> dict[str, FleetPlan]:
    """Return the plans in the file, or the last valid plans while the file is invalid."""
    from tidemill.handler.observability import logger

    try:
        newest = read()
    except Refused as exc:
        logger.error("plans not read, using the last valid ones", reason=str(exc))
        return plans
    for model in sorted(newest):
        if model in plans and newest[model].release != plans[model].release:
            logger.info("new release", model=model, release=newest[model].release)
    return newest


def _step(deployment: Deployment, clouds: Aws, plans: Mapping[str, FleetPlan]) -> None:
    """Scale the fleets to the open batches once; failures are logged."""
    from tidemill.handler.fleet.kubernetes_scaling import scale_once
    from tidemill.handler.observability import logger

    try:
        scale_once(clouds, deployment, plans, int(time.time()))
    except Exception:  # noqa: BLE001 - the next step may succeed
        logger.exception("fleets not scaled")
