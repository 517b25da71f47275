"""Workers for what is open: as many as it wants are started, once, whoever asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from handler.aws.calls import Operation
from handler.batch.fleet import (
    START_REFUSED,
    End,
    EndKind,
    FleetPlan,
    FleetState,
    Launch,
    OpenWork,
    Worker,
    WorkerStatus,
)
from handler.deployment import Deployment
from handler.errors import AwsError, HandlerError
from handler.fleet.brake import STOPPED, barred, released
from handler.fleet.capacity import granted, not_started, refused
from handler.fleet.launcher import Launcher, NoCapacity, NotStarted, StartRefused
from handler.fleet.launchers import launcher_of
from handler.fleet.plan import is_braked, is_held, is_recent, plan_moves, unlisted
from handler.fleet.stop import stop_hung
from handler.fleet.wanted import wanted
from handler.log import logger
from handler.metrics import Metric, emit


def tend(
    deployment: Deployment,
    plans: Mapping[str, FleetPlan],
    open_by_model: Mapping[str, Sequence[OpenWork]],
    now: int,
) -> Operation[None]:
    """See to the fleets of all models; what fails with one is only logged.

    `open_by_model` is all that there is: workers of old releases are replaced. One that hangs is
    stopped also when nothing is open: it would never end by itself.
    """
    for model, plan in sorted(plans.items()):
        try:
            yield from stop_hung(deployment, plan)
            if work := open_by_model.get(model):
                yield from ensure(deployment, plan, work, now, sees_all=True)
        except Exception:  # noqa: BLE001 - one model's misfortune must not be the others'
            logger.exception("fleet not tended", model=model)


def ensure_for(deployment: Deployment, work: OpenWork, now: int) -> Operation[None]:
    """See that one batch has its workers, without a look at others; what fails is only logged."""
    try:
        plans = yield from deployment.fleet_plans.read()
        if work.model in plans:
            yield from ensure(deployment, plans[work.model], [work], now)
    except Exception:  # noqa: BLE001 - the reaper does it, in a minute
        logger.exception("no worker started", model=work.model)


def ensure(
    deployment: Deployment,
    plan: FleetPlan,
    work: Iterable[OpenWork],
    now: int,
    *,
    sees_all: bool = False,
) -> Operation[None]:
    """Start the workers that are missing; where this `sees_all` open work, replace old ones too.

    Nobody is stopped for being too many: workers end by themselves. Who sees all also tells how
    many there are. Raises AwsError when AWS does not say how things are; a start that it refuses
    is remembered, and made later.
    """
    fleets = deployment.fleets
    state = yield from fleets.get_state(plan.model)
    if is_braked(state, plan.release, now):
        if sees_all:
            _tell_brake(state, plan)
        return
    # In a pause who sees all looks whether a worker runs by now, which ends it.
    if now < state.not_before and not sees_all:
        return
    launcher = launcher_of(deployment, plan.launcher)
    workers = yield from launcher.running(plan)
    pace = yield from fleets.get_pace(plan.model)
    ready_at = _ready_at(workers, unlisted(state.launches, workers, now), plan)
    aim = wanted(work, pace, plan, ready_at=ready_at, now=now)
    if sees_all:
        num_running = sum(worker.status is WorkerStatus.RUNNING for worker in workers)
        emit({Metric.WORKERS: num_running, Metric.WORKERS_WANTED: aim.count}, model=plan.model)
    reserved: list[int] = []
    stops: tuple[Worker, ...] = ()

    def reserve(state: FleetState) -> FleetState:
        nonlocal stops
        state = released(granted(state, workers), plan.release)
        # Also those that are listed by now: this list may be older than somebody else's.
        recent = [each for each in state.launches if is_recent(each, now)]
        launches = unlisted(recent, workers, now)
        moves = plan_moves(workers, launches, aim.count, plan, now=now, replaces=sees_all)
        if is_held(state, plan.release, now):
            moves = moves._replace(num_starts=0, stops=())
        # A number that never comes again, not even in another table of the same deployment.
        first = max(state.last_number + 1, now)
        reserved[:] = range(first, first + moves.num_starts)
        stops = moves.stops
        recent += [Launch(_unnamed(number), plan.release, now) for number in reserved]
        last = max(state.last_number, *reserved) if reserved else state.last_number
        return replace(state, last_number=last, launches=tuple(recent))

    yield from fleets.change(plan.model, reserve)
    if reserved:
        logger.info("workers wanted", model=plan.model, count=aim.count, why=aim.why)
        yield from _start(deployment, launcher, plan, reserved, now)
    for worker in stops:
        logger.info("worker of an old release stopped", model=plan.model, worker=worker.id)
        yield from launcher.stop(plan, worker)


def _tell_brake(state: FleetState, plan: FleetPlan) -> None:
    """Tell, at each look, that there is work and no start; what a person stopped alarms nobody."""
    brake = state.brake
    if brake is not None and brake.release == plan.release and brake.code != STOPPED:
        emit({Metric.FLEET_BRAKED: 1}, model=plan.model)


def _start(
    deployment: Deployment,
    launcher: Launcher,
    plan: FleetPlan,
    numbers: Sequence[int],
    now: int,
) -> Operation[None]:
    """Start workers under numbers that nobody else has, and remember what became of each."""
    names: dict[str, str] = {}
    refusal: HandlerError | None = None
    lost = set(map(_unnamed, numbers))
    for number in numbers:
        try:
            names[_unnamed(number)] = yield from launcher.start(plan, number)
        except NotStarted as exc:
            refusal = exc
            break
        except AwsError as exc:
            refusal = exc
            # It may have been started: until it is listed or should have been, it counts.
            lost.discard(_unnamed(number))
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
    """Return the state when it is known which workers were started, and which were not."""
    launches = tuple(
        replace(each, worker=names.get(each.worker, each.worker))
        for each in state.launches
        if each.worker not in lost
    )
    state = replace(state, launches=launches)
    if refusal is None:
        is_over = state.brake is not None and state.brake.code == START_REFUSED
        return replace(state, brake=None) if is_over else state
    if isinstance(refusal, StartRefused):
        return barred(state, plan, str(refusal), now)
    is_shortage = isinstance(refusal, NoCapacity)
    kind = EndKind.NO_CAPACITY if is_shortage else EndKind.NOT_STARTED
    end = End(plan.model, f"refused at {now}", plan.release, now, kind, str(refusal))
    return refused(state, end) if is_shortage else not_started(state, end)


def _ready_at(
    workers: Iterable[Worker], launches: Iterable[Launch], plan: FleetPlan
) -> list[float]:
    begun = [each.started_at or 0 for each in workers if each.status is not WorkerStatus.STOPPING]
    begun += [each.at for each in launches]
    return [at + plan.start_seconds for at in begun]


def _unnamed(number: int) -> str:
    """Return what stands for a worker whose launcher has not told its id yet."""
    return f"number {number}"
