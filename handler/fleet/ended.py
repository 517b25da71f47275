"""What follows when a worker has ended: it is counted, and perhaps no more are started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from handler.aws.calls import Operation
from handler.batch.fleet import EndKind, Pace
from handler.deployment import Deployment
from handler.fleet.brake import counted, may_have_rows
from handler.fleet.ends import read_end
from handler.fleet.machines import leave_machine
from handler.fleet.stop import running
from handler.fleet.words import read_last_words
from handler.log import logger


def take_end(deployment: Deployment, event: Mapping[str, Any], now: int) -> Operation[None]:
    """Count the end that an event tells of; one that tells of none is logged and dropped.

    Workers whose machine is about to go are asked to end.
    """
    plans = yield from deployment.fleet_plans.read()
    if (yield from leave_machine(event, plans)):
        return
    told = read_end(event, plans, now)
    if told is None:
        logger.info("event dropped", reason="it tells of no end of a worker of ours")
        return
    end = told.end
    if end.kind is EndKind.BAD and end.last_words is None and told.log is not None:
        end = replace(end, last_words=(yield from read_last_words(told.log)))
    log = logger.error if end.kind is EndKind.BAD else logger.info
    log(
        "worker ended",
        model=end.model,
        worker=end.worker,
        release=end.release,
        kind=str(end.kind),
        reason=end.reason,
        last_words=end.last_words,
    )
    plan = plans[end.model]
    pace = yield from deployment.fleets.get_pace(end.model)
    if end.kind is EndKind.BAD:
        workers = yield from running(deployment, plan)
        if not may_have_rows(workers, plan.release):
            pace = Pace()  # of those whose place this release is to take
    count = partial(counted, end=end, plan=plan, pace=pace, now=now)
    state = yield from deployment.fleets.change(end.model, count)
    if state.brake is not None and state.brake.at == now:
        logger.error("no more workers are started", model=end.model, reason=state.brake.reason)
