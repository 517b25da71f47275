"""One step of the cluster's launcher: ends of Jobs are counted, then the fleets are scaled.

Bad ends of Jobs count towards the circuit breaker, once each.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import Any

from tidemill.batch.fleet import FleetPlan, FleetState, Worker

from ..aws.calls import Call, Operation
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere
from ..observability import logger
from .backoff import back_off
from .kubernetes.config import KubernetesConfig
from .kubernetes.job import COUNTED_LABEL
from .kubernetes.job_status import (
    broken_start,
    failed_end,
    name_of,
    pods_by_job,
    unscheduled,
    worker_of,
)
from .kubernetes.launcher import KubernetesLauncher, list_jobs, list_pods
from .open_batches import read_open_work
from .scale import scale_fleets
from .worker_ended import count_worker_end


def scale_once(aws: Aws, deployment: Deployment, plans: Mapping[str, FleetPlan], now: int) -> None:
    """Count the ends of all fleets' Jobs, and scale the fleets to the open work.

    The reaper's Lambda does everything else that batches need. Raises AwsError if the open work
    cannot be read; a failure with one fleet is logged.
    """
    for model, plan in sorted(plans.items()):
        try:
            aws.run(_count_ends(deployment, plan, now))
        except Exception:  # noqa: BLE001 - one model's failure must not stop the others
            logger.exception("ends could not be counted", model=model)
    found = read_open_work(aws, deployment, now)
    keeps_ready = not aws.run(deployment.limits.is_budget_spent(now))
    aws.run(scale_fleets(deployment, plans, found, now, keeps_ready=keeps_ready))


def _count_ends(deployment: Deployment, plan: FleetPlan, now: int) -> Operation[None]:
    """Count the ends of a fleet's Jobs, and the shortages that other Jobs wait for.

    A failed Job is labelled once it is counted, and stays for its log until Kubernetes removes it.
    A Job whose container can never start is deleted.
    """
    jobs = yield from list_jobs(plan)
    pods = pods_by_job((yield from list_pods(plan)))
    ended = {name_of(job) for job in jobs if worker_of(job, ()) is None}
    yield from deployment.fleets.change(plan.model, partial(_forget_launches, ended=ended))
    for job in jobs:
        own = pods.get(name_of(job), ())
        if end := failed_end(plan.model, job, own, now):
            yield from count_worker_end(deployment, plan, end, now)
            yield from _mark_counted(plan, job)
        elif end := broken_start(plan.model, job, own, now):
            yield from count_worker_end(deployment, plan, end, now)
            yield from KubernetesLauncher().stop(plan, Worker(end.worker, end.release))
        elif (end := unscheduled(plan.model, job, own, now)) and end.release == plan.release:
            yield from deployment.fleets.change(plan.model, partial(back_off, end=end))


def _forget_launches(state: FleetState, *, ended: AbstractSet[str]) -> FleetState:
    """Return the state without launches of workers that have ended already."""
    launches = tuple(each for each in state.launches if each.worker not in ended)
    return replace(state, launches=launches)


def _mark_counted(plan: FleetPlan, job: Mapping[str, Any]) -> Operation[None]:
    config = KubernetesConfig.model_validate(plan.means)
    arguments = {
        "namespace": config.namespace,
        "name": name_of(job),
        "patch": {"metadata": {"labels": {COUNTED_LABEL: "true"}}},
    }
    try:
        yield Call("kubernetes", "patch_job", arguments)
    except NotThere:
        return
