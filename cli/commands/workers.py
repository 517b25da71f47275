"""`tidemill workers`: lists workers, and opens or closes their circuit breaker."""

from __future__ import annotations

import argparse
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from tidemill.offline.console.errors import Refused
from tidemill.offline.console.tables import columns
from tidemill.offline.console.terminal import log, print_output

from ..deployment.kubernetes import (
    add_cluster_flags,
    connect_clouds,
    plans_file,
    plans_reader,
    settings_of_environment,
)
from ..deployment.resources import (
    add_deployment_flags,
    ask,
    require_cloud,
    resource_name,
    table_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tidemill.batch.fleet import FleetPlan, FleetState, Worker
    from tidemill.handler.aws.sync import Aws
    from tidemill.handler.deployment import Deployment

_HEADS = ("MODEL", "RELEASE", "STARTING", "RUNNING", "STOPPING", "MOST", "STARTS")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `workers` to the command line."""
    parser = commands.add_parser(
        "workers",
        help="show, stop and resume the workers of a deployment",
        description="Show the workers of a deployment's models and their circuit breakers, "
        "stop workers, and resume starting them. Needs AWS credentials.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="print one line per model", allow_abbrev=False)
    listing.set_defaults(command=command_list)
    resume = actions.add_parser(
        "resume",
        help="close the circuit breaker of a model, so that workers start again",
        allow_abbrev=False,
    )
    resume.set_defaults(command=command_resume)
    stop = actions.add_parser(
        "stop",
        is_destructive=True,
        help="stop the workers of a model and open its circuit breaker",
        allow_abbrev=False,
    )
    stop.set_defaults(command=command_stop)
    for action in (resume, stop):
        action.add_argument("model", metavar="MODEL", help="name the model")
    for action in (listing, resume, stop):
        add_deployment_flags(action)
        action.add_argument(
            "--fleets",
            metavar="PATH",
            help="give the path of the deployment's worker parameters (default: TIDEMILL_FLEETS)",
        )
        add_cluster_flags(action.add_argument_group("on Kubernetes, in the launcher's pod"))


def command_list(arguments: argparse.Namespace) -> int:
    """Print a table of the models on standard output."""
    with _fleets_of(arguments) as (deployment, plans, aws):
        from tidemill.handler.fleet.stop import list_workers

        if not plans:
            log("this deployment does not start workers")
            return 0
        rows = []
        for model, plan in sorted(plans.items()):
            workers = ask(list_workers(deployment, plan), aws)
            state = ask(deployment.fleets.get_state(model), aws)
            rows.append(_cells(plan, workers, state))
    print_output("\n".join(columns([_HEADS, *rows])))
    return 0


def command_resume(arguments: argparse.Namespace) -> int:
    """Close the circuit breaker of a model, so that workers start again; idempotent."""
    with _fleets_of(arguments) as (deployment, plans, aws):
        plan = _plan_of(plans, arguments.model)
        from tidemill.handler.fleet.circuit_breaker import close_breaker

        ask(deployment.fleets.change(plan.model, close_breaker), aws)
    log(f"workers of {plan.model} start again within a minute when there is work")
    return 0


def command_stop(arguments: argparse.Namespace) -> int:
    """Open the circuit breaker of a model, then stop its workers without waiting."""
    with _fleets_of(arguments) as (deployment, plans, aws):
        plan = _plan_of(plans, arguments.model)
        from tidemill.handler.fleet.circuit_breaker import open_by_operator
        from tidemill.handler.fleet.stop import stop_workers

        halting = partial(open_by_operator, plan=plan, now=int(time.time()))
        ask(deployment.fleets.change(plan.model, halting), aws)
        stopped = ask(stop_workers(deployment, plan), aws)
    log(
        f"stopping {len(stopped)} workers of {plan.model} within a minute; unfinished work is "
        f"returned. Start workers again with `tidemill workers resume {plan.model}`"
    )
    return 0


def _cells(plan: FleetPlan, workers: list[Worker], state: FleetState) -> tuple[str, ...]:
    from tidemill.batch.fleet import WorkerStatus

    counts = [
        sum(worker.status in statuses for worker in workers)
        for statuses in (
            {WorkerStatus.STARTING},
            {WorkerStatus.RUNNING, WorkerStatus.HUNG},
            {WorkerStatus.STOPPING},
        )
    ]
    release = plan.release.rpartition("/")[2]
    return (plan.model, release, *map(str, counts), str(plan.max_workers), _starts(plan, state))


def _starts(plan: FleetPlan, state: FleetState) -> str:
    """Return when workers start, or the reason that none do."""
    from tidemill.handler.fleet.circuit_breaker import describe_waiting, forget_other_releases

    waiting = describe_waiting(forget_other_releases(state, plan.release), time.time())
    if waiting is None:
        return "when there is work"
    since = datetime.fromtimestamp(waiting.since, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{waiting.code} since {since}: {waiting.message}"


def _plan_of(plans: dict[str, FleetPlan], model: str) -> FleetPlan:
    if model not in plans:
        known = ", ".join(sorted(plans)) or "none"
        raise Refused(f"model {model} not found in this deployment. Its models: {known}")
    return plans[model]


@contextmanager
def _fleets_of(
    arguments: argparse.Namespace,
) -> Iterator[tuple[Deployment, dict[str, FleetPlan], Aws | None]]:
    """Yield the deployment, with its fleet resources only, and the fleet plans by model.

    For workers on Kubernetes, also yield the driver of operations, which reaches the cluster.
    """
    require_cloud("`tidemill workers`")
    from tidemill.handler.deployment import Deployment
    from tidemill.handler.settings import Settings

    if (path := plans_file(arguments)) is not None:
        of_launcher = settings_of_environment()
        plans = plans_reader(arguments, path, of_launcher)()
        with connect_clouds(arguments) as clouds:
            yield Deployment(of_launcher), plans, clouds
        return
    # A bucket and queues are not needed.
    settings = Settings(
        table=table_name(arguments),
        bucket="",
        control_queue="",
        fleets=resource_name(arguments, "fleets"),
    )
    deployment = Deployment(settings)
    yield deployment, ask(deployment.fleet_plans.read()), None
