"""Scales fleets to the demand of open work, from zero, exactly once per missing worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from tidemill.batch.errors import HandlerError
from tidemill.batch.fleet import (
    START_REFUSED,
    EndKind,
    FleetPlan,
    FleetState,
    Launch,
    OpenWork,
    Worker,
    WorkerEnd,
    WorkerStatus,
)

from ..aws.calls import Operation
from ..aws.stores.usage import DAY_SECONDS
from ..deployment import Deployment
from ..errors import AwsError
from ..observability import Metric, emit, logger
from .backoff import back_off, record_failed_start, reset_backoff
from .circuit_breaker import STOPPED, forget_other_releases, open_on_refusal
from .demand import Demand, estimate_demand, start_order
from .launcher import Launcher, NoCapacity, NotStarted, StartRefused
from .launchers import launcher_for
from .refusals import exceeds_machines
from .stop import stop_hung_workers

# Launchers list a worker some time after its start was requested.
LAUNCH_SECONDS = 120
# Each start is a separate request; the rest follow at the next run of the reaper.
MAX_STARTS = 100
# A refused start costs nothing: a half-open breaker lets one through this often.
HALF_OPEN_SECONDS = 15 * 60


class Actions(NamedTuple):
    """Number of workers to start, and the workers to stop."""

    num_starts: int = 0
    stops: tuple[Worker, ...] = ()


def is_start_blocked(state: FleetState, release: str, now: float) -> bool:
    """Return whether starts of a release are blocked, by the breaker or by backoff."""
    return is_breaker_open(state, release, now) or now < state.not_before


def is_breaker_open(state: FleetState, release: str, now: float) -> bool:
    """Return whether an open circuit breaker blocks the starts of a release.

    A breaker opened by a refusal is half-open every HALF_OPEN_SECONDS and allows one start: a
    corrected role or quota does not create a new release.
    """
    breaker = state.breaker
    if breaker is None or breaker.release != release:
        return False
    return breaker.code != START_REFUSED or now < breaker.at + HALF_OPEN_SECONDS


def is_recent(launch: Launch, now: float) -> bool:
    """Return whether a launch may still be missing from the launcher's list."""
    return now < launch.at + LAUNCH_SECONDS


def unlisted(launches: Sequence[Launch], workers: Sequence[Worker], now: float) -> list[Launch]:
    """Return the launches that the launcher does not list yet."""
    known = {worker.id for worker in workers}
    return [launch for launch in launches if launch.worker not in known and is_recent(launch, now)]


def reconcile(
    workers: Sequence[Worker],
    launches: Sequence[Launch],
    demand: int,
    plan: FleetPlan,
    *,
    now: float,
    replaces: bool = True,
) -> Actions:
    """Return the actions that bring a fleet one step nearer to the demand, on the plan's release.

    `launches` are workers not listed yet. There are never more than `max_workers` at once, stopping
    ones included. A worker is stopped only to be replaced by one of the new release (a rolling
    update): the first new worker starts in addition to the old ones if there is room, and counts
    once it has run for `start_seconds`, so that a release that dies while loading stops no worker.
    Then old workers are replaced one by one, unless `replaces` is False.
    """
    alive = [worker for worker in workers if worker.status is not WorkerStatus.STOPPING]
    old = [worker for worker in alive if worker.release != plan.release]
    room = max(0, plan.max_workers - len(workers) - len(launches))
    missing = demand - len(alive) - len(launches)
    if missing > 0:
        return Actions(min(missing, room, MAX_STARTS))
    new = [worker for worker in workers if worker not in old]
    is_settled = not launches and all(worker.status is WorkerStatus.RUNNING for worker in new)
    if not (replaces and old and demand and is_settled):
        return Actions()
    if new and not any(_has_loaded(worker, plan, now) for worker in new):
        return Actions()
    has_new = len(alive) > len(old)
    if room and (len(alive) <= demand or not has_new):
        return Actions(1)
    return Actions(0, (min(old, key=lambda worker: (worker.started_at or 0, worker.id)),))


def _has_loaded(worker: Worker, plan: FleetPlan, now: float) -> bool:
    return (worker.started_at or 0) + plan.start_seconds <= now


# ECS serves about 20 list and describe calls per second, for all processes that check its fleets.
_LOOK_SECONDS = 10
# Three runs of the reaper: workers are kept again soon after a budget is raised.
_BLOCKED_SECONDS = 3 * 60


def scale_fleets(
    deployment: Deployment,
    plans: Mapping[str, FleetPlan],
    found: Iterable[OpenWork],
    now: int,
    *,
    keeps_ready: bool,
) -> Operation[None]:
    """Scale the fleets of all models to all open work; unless `keeps_ready`, idle workers end."""
    open_by_model: dict[str, list[OpenWork]] = {}
    for work in found:
        open_by_model.setdefault(work.model, []).append(work)
    if not keeps_ready:
        yield from _release_ready(deployment, plans, now)
        plans = {model: replace(plan, min_workers=0) for model, plan in plans.items()}
    yield from scale_all(deployment, plans, open_by_model, now)


def _release_ready(
    deployment: Deployment, plans: Mapping[str, FleetPlan], now: int
) -> Operation[None]:
    """Block the places of idle workers, which then end, until the day or the budget changes."""
    until = min(now + _BLOCKED_SECONDS, now - now % DAY_SECONDS + DAY_SECONDS - 1)
    for model, plan in plans.items():
        try:
            yield from deployment.fleets.block_ready(model, plan.min_workers, until=until)
        except AwsError:
            logger.exception("places of idle workers could not be blocked", model=model)


def scale_all(
    deployment: Deployment,
    plans: Mapping[str, FleetPlan],
    open_by_model: Mapping[str, Sequence[OpenWork]],
    now: int,
) -> Operation[None]:
    """Scale the fleets of all models, in `start_order`; a failure with one is only logged.

    `open_by_model` contains all open work, so workers of old releases are replaced. A hung worker
    is stopped even without open work: it would never end by itself.
    """
    for model in dict.fromkeys((*start_order(open_by_model), *sorted(plans))):
        if (plan := plans.get(model)) is None:
            continue
        try:
            yield from stop_hung_workers(deployment, plan)
            work = open_by_model.get(model, ())
            if work or plan.min_workers_at(now):
                yield from scale(deployment, plan, work, now, sees_all=True)
        except Exception:  # noqa: BLE001 - one model's failure must not stop the others
            logger.exception("fleet could not be scaled", model=model)


def scale_for_batch(deployment: Deployment, work: OpenWork, now: int) -> Operation[None]:
    """Scale for one batch alone, unless that was done for its model moments ago.

    In that case the reaper counts its work within a minute. A failure is only logged.
    """
    try:
        plans = yield from deployment.fleet_plans.read_recent(now)
        if (plan := plans.get(work.model)) is None:
            return
        if (yield from deployment.fleets.note_look(plan.model, now=now, seconds=_LOOK_SECONDS)):
            yield from scale(deployment, plan, [work], now)
    except Exception:  # noqa: BLE001 - the reaper retries within a minute
        logger.exception("workers could not be scaled for the batch", model=work.model)


def scale(
    deployment: Deployment,
    plan: FleetPlan,
    work: Iterable[OpenWork],
    now: int,
    *,
    sees_all: bool = False,
) -> Operation[None]:
    """Start the missing workers; a caller that `sees_all` open work also replaces old ones.

    Surplus workers are not stopped: idle workers exit by themselves (scale to zero). A caller that
    sees all also emits the metrics. Raises AwsError if the workers cannot be listed; a refused
    start is recorded, and retried later.
    """
    fleets = deployment.fleets
    state = yield from fleets.get_state(plan.model)
    if is_breaker_open(state, plan.release, now):
        if sees_all:
            _emit_breaker_open(deployment, state, plan)
        return
    # During a backoff the caller that sees all checks for a running worker, which ends it.
    if now < state.not_before and not sees_all:
        return
    launcher = launcher_for(deployment, plan.launcher)
    workers = yield from launcher.list_workers(plan)
    rate = yield from fleets.get_rate(plan.model)
    ready_at = _ready_at(workers, unlisted(state.launches, workers, now), plan)
    aim = estimate_demand(work, rate, plan, ready_at=ready_at, now=now)
    if aim.count < (least := plan.min_workers_at(now)):
        aim = Demand(least, "minimum number of workers at this hour")
    if sees_all:
        num_running = sum(worker.status is WorkerStatus.RUNNING for worker in workers)
        figures = {Metric.WORKERS: num_running, Metric.WORKERS_WANTED: aim.count}
        emit(figures, deployment.service, model=plan.model)
    reserved: list[int] = []
    stops: tuple[Worker, ...] = ()

    def reserve(state: FleetState) -> FleetState:
        nonlocal stops
        state = forget_other_releases(reset_backoff(state, workers), plan.release)
        # Listed ones are retained too: another caller's list may be older than ours.
        recent = [each for each in state.launches if is_recent(each, now)]
        launches = unlisted(recent, workers, now)
        moves = reconcile(workers, launches, aim.count, plan, now=now, replaces=sees_all)
        if is_start_blocked(state, plan.release, now):
            moves = moves._replace(num_starts=0, stops=())
        # A number is never reused, not even in another table of the same deployment.
        first = max(state.last_number + 1, now)
        reserved[:] = range(first, first + moves.num_starts)
        stops = moves.stops
        recent += [Launch(_placeholder_id(number), plan.release, now) for number in reserved]
        last = max(state.last_number, *reserved) if reserved else state.last_number
        return replace(state, last_number=last, launches=tuple(recent))

    yield from fleets.change(plan.model, reserve)
    if reserved:
        logger.info("workers wanted", model=plan.model, count=aim.count, why=aim.why)
        yield from _start(deployment, launcher, plan, reserved, now, workers=workers)
    for worker in stops:
        logger.info("worker of an old release stopped", model=plan.model, worker=worker.id)
        yield from launcher.stop(plan, worker)


def _emit_breaker_open(deployment: Deployment, state: FleetState, plan: FleetPlan) -> None:
    """Emit the metric of an open breaker, unless an operator has stopped the workers."""
    breaker = state.breaker
    if breaker is not None and breaker.release == plan.release and breaker.code != STOPPED:
        emit({Metric.FLEET_BRAKED: 1}, deployment.service, model=plan.model)


def _start(
    deployment: Deployment,
    launcher: Launcher,
    plan: FleetPlan,
    numbers: Sequence[int],
    now: int,
    *,
    workers: Sequence[Worker],
) -> Operation[None]:
    """Start workers under reserved numbers, and record the outcome of each."""
    names: dict[str, str] = {}
    refusal: HandlerError | None = None
    lost = set(map(_placeholder_id, numbers))
    for number in numbers:
        try:
            names[_placeholder_id(number)] = yield from launcher.start(plan, number)
        except NotStarted as exc:
            refusal = StartRefused(str(exc)) if exceeds_machines(str(exc), workers) else exc
            break
        except AwsError as exc:
            refusal = exc
            # It may have started: it counts until a list would contain it.
            lost.discard(_placeholder_id(number))
            break
    lost -= names.keys()
    yield from deployment.fleets.change(
        plan.model, partial(_settled, names=names, lost=lost, refusal=refusal, plan=plan, now=now)
    )
    for name in names.values():
        logger.info("worker started", model=plan.model, worker=name, release=plan.release)
    if refusal is not None:
        logger.warning("worker not started", model=plan.model, reason=str(refusal))


def _settled(
    state: FleetState,
    *,
    names: Mapping[str, str],
    lost: set[str],
    refusal: HandlerError | None,
    plan: FleetPlan,
    now: int,
) -> FleetState:
    """Return the state once it is known which workers were started."""
    launches = tuple(
        replace(each, worker=names.get(each.worker, each.worker))
        for each in state.launches
        if each.worker not in lost
    )
    state = replace(state, launches=launches)
    if refusal is None:
        is_over = state.breaker is not None and state.breaker.code == START_REFUSED
        return replace(state, breaker=None) if is_over else state
    if isinstance(refusal, StartRefused):
        return open_on_refusal(state, plan, str(refusal), now)
    is_shortage = isinstance(refusal, NoCapacity)
    kind = EndKind.NO_CAPACITY if is_shortage else EndKind.NOT_STARTED
    end = WorkerEnd(plan.model, f"refused at {now}", plan.release, now, kind, str(refusal))
    return back_off(state, end) if is_shortage else record_failed_start(state, end)


def _ready_at(
    workers: Iterable[Worker], launches: Iterable[Launch], plan: FleetPlan
) -> list[float]:
    started = [each.started_at or 0 for each in workers if each.status is not WorkerStatus.STOPPING]
    started += [each.at for each in launches]
    return [at + plan.start_seconds for at in started]


def _placeholder_id(number: int) -> str:
    """Return a placeholder for the ID of a worker that its launcher has not named yet."""
    return f"number {number}"
