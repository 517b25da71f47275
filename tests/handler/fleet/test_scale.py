"""Workers are started when there is work, once, despite concurrent runs and AWS failures."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace

import pytest

from tests.emulators import MODEL, Emulator
from tests.handler.emf import lines_in
from tests.handler.fleet.rig import ListLauncher
from tests.handler.intake.rig import Cloud, lines_of, plenty
from tidemill.batch.fleet import (
    CircuitBreaker,
    FleetPlan,
    FleetState,
    OpenWork,
    Worker,
    WorkerRate,
    WorkerStatus,
)
from tidemill.handler.aws.calls import Call, Operation, T
from tidemill.handler.aws.parameters import plan_text
from tidemill.handler.aws.queues import shard_message
from tidemill.handler.aws.stores.usage import DAY_SECONDS, EVERYBODY
from tidemill.handler.control.advance import advance
from tidemill.handler.control.dead_letters import handle_dead_letter
from tidemill.handler.control.reaper import reap
from tidemill.handler.deployment import Deployment
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet import scale as ensuring
from tidemill.handler.fleet.circuit_breaker import close_breaker as lifted
from tidemill.handler.fleet.circuit_breaker import describe_waiting
from tidemill.handler.fleet.launcher import NoCapacity, NotStarted, StartRefused
from tidemill.handler.fleet.scale import LAUNCH_SECONDS, scale, scale_all, scale_for_batch
from tidemill.handler.fleet.stop import list_workers, stop_workers

NOW = 2_000_000_000
PLAN = FleetPlan(MODEL, "processes", "r:1", max_workers=4)
# Three workers' worth.
PACE = WorkerRate(NOW, rows_per_second=1.0)
WORK = OpenWork("b", MODEL, 9000, 50, NOW + 86_400, since=NOW)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> ListLauncher:
    """Return what starts all workers here."""
    found = ListLauncher()
    monkeypatch.setattr(ensuring, "launcher_for", lambda *_: found)
    return found


@pytest.fixture
def mill(ministack: Emulator) -> Cloud:
    """Return a deployment whose workers have a pace."""
    cloud = Cloud.on(ministack)
    cloud.run(cloud.deployment.fleets.put_rate(MODEL, PACE))
    return cloud


def state_of(cloud: Cloud) -> FleetState:
    """Return what is remembered of the fleet."""
    return cloud.run(cloud.deployment.fleets.get_state(MODEL))


def look(cloud: Cloud, after: int = 0, plan: FleetPlan = PLAN) -> None:
    """Let the reaper see to the fleet, some seconds later, when as much is open."""
    work = replace(WORK, since=NOW + after)
    cloud.run(scale(cloud.deployment, plan, [work], NOW + after, sees_all=True))


def test_what_is_wanted_is_started_once(mill: Cloud, launcher: ListLauncher) -> None:
    """The next run finds them, listed or not, and starts none."""
    look(mill)
    assert len(launcher.workers) == 3
    launcher.lists = False
    look(mill, 1)
    look(mill, LAUNCH_SECONDS - 1)
    launcher.lists = True
    launcher.run(NOW)
    look(mill, LAUNCH_SECONDS)
    assert len(launcher.workers) == 3
    assert launcher.requested == [NOW, NOW + 1, NOW + 2]
    look(mill, LAUNCH_SECONDS + 1)
    assert state_of(mill).launches == ()


def test_min_workers_are_kept_ready_without_work(mill: Cloud, launcher: ListLauncher) -> None:
    """They are kept during the plan's hours, which contain NOW; more run if there is work."""
    plan = replace(PLAN, min_workers=2, min_workers_hours="Wed 03:00-04:00")
    plans = {MODEL: plan}
    mill.run(scale_all(mill.deployment, plans, {}, NOW - 3600))
    assert launcher.requested == []
    mill.run(scale_all(mill.deployment, plans, {}, NOW))
    assert len(launcher.workers) == 2
    mill.run(scale_all(mill.deployment, plans, {MODEL: [WORK]}, NOW + 1))
    assert len(launcher.workers) == 3


def test_who_died_is_replaced_under_a_new_number(mill: Cloud, launcher: ListLauncher) -> None:
    """A number is used once, so that a name that AWS remembers is never requested again."""
    look(mill)
    launcher.run(NOW)
    del launcher.workers[1]
    look(mill, LAUNCH_SECONDS)
    assert len(launcher.workers) == 3
    assert launcher.requested == [NOW, NOW + 1, NOW + 2, NOW + LAUNCH_SECONDS]


def test_two_who_look_at_once_start_no_doubles(mill: Cloud, launcher: ListLauncher) -> None:
    """Both saw an empty list: the second to write sees what the first has written."""
    first = scale(mill.deployment, PLAN, [WORK], NOW)
    call = next(first)
    while call.method != "put_item":  # it has read everything
        call = first.send(getattr(mill.aws.clients[call.service], call.method)(**call.arguments))
    look(mill)
    mill.run(resumed(first, call))
    assert len(launcher.workers) == 3


def resumed(operation: Operation[T], call: Call) -> Operation[T]:
    """Continue an operation that has made this call."""
    while True:
        try:
            response = yield call
        except AwsError as exc:
            call = operation.throw(exc)
        else:
            try:
                call = operation.send(response)
            except StopIteration as stopped:
                result: T = stopped.value
                return result


def test_a_lost_answer_starts_no_double(mill: Cloud, launcher: ListLauncher) -> None:
    """The worker may run: it counts until it is listed, and no other start is tried before."""
    launcher.num_lost = 1
    look(mill)
    assert len(launcher.workers) == 1
    assert "the answer was lost" in (state_of(mill).refusal or "")
    launcher.run(NOW + 30)
    look(mill, LAUNCH_SECONDS)
    assert len(launcher.workers) == 3
    assert state_of(mill).refusal is None


def test_what_has_no_machine_is_tried_again_later_and_later(
    mill: Cloud, launcher: ListLauncher
) -> None:
    """The reason is remembered until a worker runs; those that were started stay."""
    launcher.capacity = 1
    tried, last = [], 0
    for after in range(0, 2400, 60):
        look(mill, after)
        if len(launcher.requested) > last:
            tried.append(after)
            last = len(launcher.requested)
    assert tried == [0, 60, 180, 420, 900, 1800]
    assert state_of(mill).refusal == "no machine"
    launcher.capacity = 3
    look(mill, 2700)
    assert len(launcher.workers) == 3
    launcher.run(NOW + 2710)
    look(mill, 2700 + LAUNCH_SECONDS)
    assert state_of(mill) == FleetState(last_number=state_of(mill).last_number)


def test_a_worker_that_runs_ends_the_pause(mill: Cloud, launcher: ListLauncher) -> None:
    """A running worker shows that machines are available: the others are requested at once."""
    launcher.capacity = 0
    look(mill)
    look(mill, 60)
    launcher.capacity = 3
    launcher.workers = [Worker("late", "r:1", WorkerStatus.RUNNING, NOW + 70)]
    look(mill, 90)
    assert len(launcher.workers) == 3
    assert state_of(mill).refusal is None


@pytest.mark.parametrize(("braked", "num_started"), [("r:1", 0), ("r:0", 3)])
def test_an_open_breaker_prevents_starts_until_another_release(
    mill: Cloud, launcher: ListLauncher, braked: str, num_started: int
) -> None:
    """A release in a crash loop is not started; its fix is."""
    breaker = CircuitBreaker(NOW, braked, "crash_loop", "It dies.", "Mend it.")
    mill.run(mill.deployment.fleets.change(MODEL, lambda _: FleetState(breaker=breaker)))
    look(mill)
    assert len(launcher.workers) == num_started
    assert (state_of(mill).breaker is None) is (num_started > 0)


@pytest.mark.parametrize(
    ("code", "num_reports"), [("crash_loop", 1), ("start_refused", 1), ("stopped", 0)]
)
def test_work_under_an_open_breaker_is_reported(
    mill: Cloud, capsys: pytest.CaptureFixture[str], code: str, num_reports: int
) -> None:
    """Every run of the reaper reports it, for the alarm; a stop by a person raises no alarm."""
    breaker = CircuitBreaker(NOW, PLAN.release, code, "It dies.", "Mend it.")
    mill.run(mill.deployment.fleets.change(MODEL, lambda _: FleetState(breaker=breaker)))
    capsys.readouterr()
    look(mill)
    reports = [line for line in lines_in(capsys.readouterr().out) if "FleetBraked" in line.figures]
    assert [line.dimensions["model"] for line in reports] == [MODEL] * num_reports


@pytest.mark.parametrize(
    ("refusal", "code", "starts_in_an_hour"),
    [
        (StartRefused("RunTask: AccessDeniedException"), "start_refused", 4),
        (NoCapacity("RESOURCE:GPU"), "start_refused", 4),
        (NoCapacity("NO ACTIVE INSTANCES"), "no_capacity", 7),
        (NotStarted("ECS started no task: SOMETHING NEW"), "not_started", 60),
    ],
)
def test_a_failed_start_is_handled_by_its_cause(
    mill: Cloud, launcher: ListLauncher, refusal: NotStarted, code: str, starts_in_an_hour: int
) -> None:
    """A wrong configuration opens the breaker, a shortage delays starts, others do neither."""
    launcher.refusal = refusal
    for minute in range(60):
        look(mill, 60 * minute)
        waiting = describe_waiting(state_of(mill), NOW + 60 * minute)
        assert waiting is not None
        assert waiting.code == code
        assert str(refusal) in waiting.message
    assert len(launcher.requested) == starts_in_an_hour
    launcher.refusal = None
    mill.run(mill.deployment.fleets.change(MODEL, lifted))
    look(mill, 3600)
    launcher.run(NOW + 3660)
    look(mill, 3720)
    assert len(launcher.workers) >= 3
    assert describe_waiting(state_of(mill), NOW + 3720) is None


def test_a_release_takes_the_place_of_the_one_before(mill: Cloud, launcher: ListLauncher) -> None:
    """One by one, never with less than were wanted while there is room for one more."""
    look(mill)
    launcher.run(NOW)
    new, least, most = replace(PLAN, release="r:2"), 3, 0
    for minute in range(1, 40):
        look(mill, 60 * minute, new)
        alive = [each for each in launcher.workers if each.status is not WorkerStatus.STOPPING]
        least, most = min(least, len(alive)), max(most, len(launcher.workers))
        launcher.workers = alive
        launcher.run(NOW + 60 * minute)
    assert [worker.release for worker in launcher.workers] == ["r:2"] * 3
    assert (least, most) == (3, 4)


def test_one_models_misfortune_is_not_the_others(mill: Cloud, launcher: ListLauncher) -> None:
    """An invalid plan is reported, and the next model is handled."""
    launcher.workers = [Worker("w", "r:1", WorkerStatus.RUNNING, None)]
    broken = FleetPlan("a", "processes", "r:1", max_workers=None)  # type: ignore[arg-type]
    plans = {"a": broken, MODEL: PLAN}
    mill.run(scale_all(mill.deployment, plans, {"a": [WORK], MODEL: [WORK], "z": [WORK]}, NOW))
    assert len(launcher.workers) == 3


def test_workers_of_the_first_batch_start_first(
    mill: Cloud, launcher: ListLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are scaled in the order of their batches; those without work come last."""
    assert not launcher.workers
    models: list[str] = []

    def note(_: Deployment, plan: FleetPlan, *__: object, **___: object) -> Operation[None]:
        models.append(plan.model)
        yield from ()

    monkeypatch.setattr(ensuring, "scale", note)
    plans = {model: replace(PLAN, model=model, min_workers=1) for model in ("a", "b", "c")}
    works = {"b": [replace(WORK, priority=1)], "c": [WORK]}
    mill.run(scale_all(mill.deployment, plans, works, NOW))
    assert models == ["c", "b", "a"]


# Through the table and the parameters, with processes


@pytest.fixture
def local(ministack: Emulator) -> Cloud:
    """Return a deployment whose plans are parameters."""
    path = f"/{time.time_ns()}/fleets"
    cloud = Cloud.on(ministack, shard_lines="1", fleets=path)
    cloud.aws.clients["ssm"].put_parameter(
        Name=f"{path}/demo", Value=plan_text(PLAN), Type="String"
    )
    return cloud


def rung_for(cloud: Cloud, num_lines: int = 1) -> str:
    """Return the id of a batch whose shards, one a line, have been rung for."""
    batch = cloud.create(lines_of(num_lines), f"input/{time.time_ns()}.jsonl")
    advance(cloud.aws, cloud.deployment, batch.id, plenty)
    return batch.id


def process_ids(cloud: Cloud) -> list[str]:
    """Return the IDs of the processes that are wanted."""
    return [worker.id for worker in cloud.run(list_workers(cloud.deployment, PLAN))]


def test_shards_that_are_rung_for_start_a_worker(local: Cloud) -> None:
    """One, as no rate is known; the second batch finds it, and so does the reaper."""
    rung_for(local, num_lines=3)
    assert len(process_ids(local)) == 1
    rung_for(local)
    reap(local.aws, local.deployment, int(time.time()))
    assert len(process_ids(local)) == 1


def test_the_reaper_starts_what_was_lost(local: Cloud) -> None:
    """A worker that died is replaced while a batch is open, and not when all are done."""
    rung_for(local)
    [first] = process_ids(local)
    local.run(local.deployment.processes.forget(MODEL, first))
    reap(local.aws, local.deployment, int(time.time()) + LAUNCH_SECONDS)
    [second] = process_ids(local)
    assert second != first


def test_many_drops_look_at_a_fleet_once(
    local: Cloud, launcher: ListLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One check in ten seconds counts for all processes; plans are read again after a minute."""
    calls: Counter[str] = Counter()

    def list_workers(_: FleetPlan) -> Operation[list[Worker]]:
        calls["list"] += 1
        yield from ()
        return []

    monkeypatch.setattr(launcher, "list_workers", list_workers)
    local.aws.clients["ssm"].meta.events.register(
        "before-call", lambda **_: calls.update(["plans"])
    )
    other = local.having()
    for seconds in (0, 3, 9, 10, 59, 60):
        for cloud in (local, other):
            cloud.run(scale_for_batch(cloud.deployment, WORK, NOW + seconds))
    assert calls == {"list": 3, "plans": 4}


def test_no_worker_is_kept_ready_once_a_budget_is_spent(local: Cloud) -> None:
    """It would wait for lines that no worker runs before tomorrow; one that waits has to end."""
    path, now = local.deployment.settings.fleets, int(time.time())
    local.aws.clients["ssm"].put_parameter(
        Name=f"{path}/demo",
        Value=plan_text(replace(PLAN, min_workers=1)),
        Type="String",
        Overwrite=True,
    )

    def stays(at: int) -> bool:
        keep = local.deployment.fleets.keep_ready(MODEL, 1, "ready", now=at, until=at + 600)
        return bool(local.run(keep))

    assert stays(now)
    cloud = local.having(gpu_hours_per_day=1)
    local.run(local.deployment.usage.add_gpu_seconds(EVERYBODY, 3600, now))
    reap(cloud.aws, cloud.deployment, now)
    assert process_ids(local) == []
    assert not stays(now)
    # The places of its hours are free again when the day, or the reason, has ended.
    assert stays(min(now + 181, now - now % DAY_SECONDS + DAY_SECONDS))
    reap(local.aws, local.deployment, now)
    assert len(process_ids(local)) == 1


def test_an_abandoned_shard_starts_no_worker(local: Cloud) -> None:
    """Finalize closes it: a worker would find nothing to do."""
    batch_id = rung_for(local)
    [first] = process_ids(local)
    local.run(local.deployment.processes.forget(MODEL, first))
    for number in range(local.deployment.settings.max_attempts):
        local.run(
            local.deployment.table.claim(
                batch_id, 0, owner=str(number), now=time.time(), lease_seconds=-1
            )
        )
    reap(local.aws, local.deployment, int(time.time()) + LAUNCH_SECONDS)
    assert process_ids(local) == []


def test_a_dead_doorbell_leaves_workers_to_the_reaper(local: Cloud) -> None:
    """It looks every minute, and sees what all batches want."""
    batch_id = rung_for(local)
    [first] = process_ids(local)
    local.run(local.deployment.processes.forget(MODEL, first))
    message = json.dumps(shard_message(batch_id, 0))
    local.run(handle_dead_letter(local.deployment, message, int(time.time())))
    assert process_ids(local) == []


def test_plans_that_cannot_be_read_hold_nothing_up(local: Cloud) -> None:
    """Shards are rung for and batches are looked at as ever."""
    path = local.deployment.settings.fleets
    local.aws.clients["ssm"].put_parameter(
        Name=f"{path}/demo", Value="no plan", Type="String", Overwrite=True
    )
    batch_id = rung_for(local, num_lines=3)
    assert local.batch(batch_id).shards_rung == 3
    reap(local.aws, local.deployment, int(time.time()))
    assert local.rung_shards() == [0, 1, 2]
    assert process_ids(local) == []


def test_workers_of_a_release_are_stopped_on_request(local: Cloud) -> None:
    """Their ends are not awaited; those that already stop are not stopped again."""
    processes = local.deployment.processes
    rung_for(local)
    assert local.run(stop_workers(local.deployment, PLAN, "another")) == []
    assert len(local.run(stop_workers(local.deployment, PLAN))) == 1
    assert local.run(stop_workers(local.deployment, PLAN)) == []
    assert [each.state for each in local.run(processes.list_processes(MODEL))] == ["stopping"]
