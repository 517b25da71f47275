"""`tidemill workers`: which workers a deployment has, why there are no more, and both changed."""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from cli.deployment.place import add_place, ask, need_cloud, part_of, table_of
from cli.errors import Refused
from cli.tables import columns
from cli.terminal import put, say

if TYPE_CHECKING:
    from handler.batch.fleet import FleetPlan, FleetState, Worker
    from handler.deployment import Deployment

_HEADS = ("MODEL", "RELEASE", "STARTING", "RUNNING", "STOPPING", "MOST", "STARTS")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `workers` to the command line."""
    parser = commands.add_parser(
        "workers",
        help="workers of a deployment, and their brake",
        description="Shows the workers of a deployment's models and why no more are started, lets "
        "them be started again, and stops them, with the AWS credentials of whoever may.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="print a line for each model", allow_abbrev=False)
    listing.set_defaults(command=command_list)
    resume = actions.add_parser(
        "resume", help="let workers of a model be started again", allow_abbrev=False
    )
    resume.set_defaults(command=command_resume)
    stop = actions.add_parser(
        "stop", help="stop the workers of a model, and start no more", allow_abbrev=False
    )
    stop.set_defaults(command=command_stop)
    for action in (resume, stop):
        action.add_argument("model", metavar="MODEL", help="the model that they run")
    for action in (listing, resume, stop):
        add_place(action)
        action.add_argument(
            "--fleets",
            metavar="PATH",
            help="where the deployment's parameters of workers stand (default: TIDEMILL_FLEETS)",
        )


def command_list(arguments: argparse.Namespace) -> int:
    """Print a table of the models on standard output."""
    deployment, plans = _deployment_of(arguments)
    from handler.fleet.stop import running

    if not plans:
        say("this deployment starts no workers")
        return 0
    rows = []
    for model, plan in sorted(plans.items()):
        workers = ask(running(deployment, plan))
        state = ask(deployment.fleets.get_state(model))
        rows.append(_cells(plan, workers, state))
    put("\n".join(columns([_HEADS, *rows])))
    return 0


def command_resume(arguments: argparse.Namespace) -> int:
    """Lift the brake of a model's workers; without one it changes nothing."""
    deployment, plans = _deployment_of(arguments)
    plan = _plan_of(plans, arguments.model)
    from handler.fleet.brake import resumed

    ask(deployment.fleets.change(plan.model, resumed))
    say(f"workers of {plan.model} are started again when there is work, within a minute")
    return 0


def command_stop(arguments: argparse.Namespace) -> int:
    """Set the brake of a model, then ask its workers to end; waits for none of them."""
    deployment, plans = _deployment_of(arguments)
    plan = _plan_of(plans, arguments.model)
    from handler.fleet.brake import halted
    from handler.fleet.stop import stop

    halting = partial(halted, plan=plan, now=int(time.time()))
    ask(deployment.fleets.change(plan.model, halting))
    stopped = ask(stop(deployment, plan))
    say(
        f"{len(stopped)} workers of {plan.model} give their work back and end within a minute; "
        f"no more are started until `tidemill workers resume {plan.model}`"
    )
    return 0


def _cells(plan: FleetPlan, workers: list[Worker], state: FleetState) -> tuple[str, ...]:
    from handler.batch.fleet import WorkerStatus

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
    """Return whether workers are started, and why not."""
    from handler.fleet.brake import released, waiting_of

    waiting = waiting_of(released(state, plan.release), time.time())
    if waiting is None:
        return "when there is work"
    since = datetime.fromtimestamp(waiting.since, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{waiting.code} since {since}: {waiting.message}"


def _plan_of(plans: dict[str, FleetPlan], model: str) -> FleetPlan:
    if model not in plans:
        known = ", ".join(sorted(plans)) or "none"
        raise Refused(f"there are no workers of {model}; those that are started are of: {known}")
    return plans[model]


def _deployment_of(arguments: argparse.Namespace) -> tuple[Deployment, dict[str, FleetPlan]]:
    """Return the deployment that arguments or environment name, as far as fleets go; its plans."""
    need_cloud("`tidemill workers`")
    from handler.deployment import Deployment
    from handler.settings import Settings

    # A bucket and queues have no part in this.
    settings = Settings(
        table=table_of(arguments), bucket="", control_queue="", fleets=part_of(arguments, "fleets")
    )
    deployment = Deployment(settings)
    return deployment, ask(deployment.fleet_plans.read())
