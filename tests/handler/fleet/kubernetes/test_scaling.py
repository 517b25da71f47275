"""Jobs come with work and go without it, over a deployment and a cluster that answer by HTTP."""

from __future__ import annotations

import pytest

from tests.emulators import MODEL
from tests.handler.fleet.kubernetes.cluster import Refusal
from tests.handler.fleet.kubernetes.rig import NUM_LINES, Rig
from tidemill.batch.fleet import START_REFUSED, FleetState, WorkerRate
from tidemill.batch.progress_counts import Progress
from tidemill.batch.states import Status
from tidemill.handler.control.reaper import reap
from tidemill.handler.fleet.circuit_breaker import (
    CRASH_LOOP,
    CRASHES_TO_TRIP,
    close_breaker,
    describe_waiting,
)
from tidemill.handler.fleet.demand import open_work
from tidemill.handler.fleet.kubernetes.job import COUNTED_LABEL
from tidemill.handler.fleet.scale import LAUNCH_SECONDS, scale_for_batch
from tidemill.handler.fleet.waiting_reason import get_waiting_reason


def test_from_none_to_three_and_back_to_none(rig: Rig) -> None:
    """Three Jobs for a batch, not a fourth however often is looked, none once all is done."""
    rig.step()
    assert rig.cluster.jobs == {}
    batch = rig.open()
    rig.step(15)
    assert len(rig.alive) == 3
    rig.cluster.run_pods()
    rig.step(15)
    rig.step(LAUNCH_SECONDS)
    assert len(rig.cluster.jobs) == 3
    rig.cloud.run(rig.cloud.deployment.table.move_batch(batch.id, Status.FINALIZING, rig.at))
    for job in rig.alive:
        rig.cluster.exit(job)
    rig.step(15)
    assert rig.alive == []
    rig.cluster.remove_ended()
    rig.step(15)
    assert rig.cluster.jobs == {}
    assert (rig.state.ends, rig.state.launches) == ((), ())


def test_without_a_launcher_a_batch_waits(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """No Lambda fails, starts anything or ends a batch for want of plans and workers."""
    batch = rig.open()
    work = open_work(batch, Progress(), num_shards=NUM_LINES)
    rig.cloud.run(scale_for_batch(rig.cloud.deployment, work, rig.at))
    reap(rig.cloud.aws, rig.cloud.deployment, rig.at + 60)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert rig.cloud.batch(batch.id).status is Status.IN_PROGRESS
    assert rig.cloud.run(get_waiting_reason(rig.cloud.deployment, batch, rig.at)) is None
    assert rig.state == FleetState()


def test_work_that_is_left_gets_a_worker_in_place_of_one_that_was_killed(rig: Rig) -> None:
    """One crash is not a crash loop."""
    rig.open()
    rig.step()
    rig.cluster.run_pods()
    rig.cluster.exit(rig.alive[0], 137, "OOMKilled")
    rig.step(15)
    assert len(rig.alive) == 3
    [end] = rig.state.ends
    assert end.reason == "it was killed (exit status 137): OOMKilled"
    assert rig.state.breaker is None


@pytest.mark.long
def test_a_disruption_is_not_a_failure(rig: Rig) -> None:
    """Kubernetes itself replaces the pod, and its Job goes on."""
    rig.open()
    rig.step()
    rig.cluster.run_pods()
    before = list(rig.cluster.jobs)
    for job in rig.alive:
        rig.cluster.disrupt(job)
    rig.step(15)
    assert list(rig.cluster.jobs) == before
    assert len(rig.alive) == 3
    assert rig.state.ends == ()


def test_a_crash_loop_opens_the_breaker_once(rig: Rig) -> None:
    """It shows the log's last error; after a person closes it, old ends do not open it again."""
    batch = rig.open()
    rig.step()
    rig.cluster.run_pods()
    for job in rig.alive:
        rig.cluster.exit(job, 1, log='{"level": "ERROR", "message": "no kernel image"}')
    rig.step(15)
    breaker = rig.state.breaker
    assert breaker is not None
    assert breaker.code == CRASH_LOOP
    assert "no kernel image" in breaker.reason
    waiting = rig.cloud.run(get_waiting_reason(rig.cloud.deployment, batch, rig.at))
    assert waiting is not None
    assert waiting.code == CRASH_LOOP
    rig.step(15)
    assert rig.alive == []
    deployment = rig.cloud.deployment
    rig.cloud.run(deployment.fleets.change(MODEL, close_breaker))
    rig.step(15)
    assert rig.state.breaker is None
    assert len(rig.alive) == 3
    counted = [COUNTED_LABEL in job["metadata"]["labels"] for job in rig.cluster.jobs.values()]
    assert counted == [True] * 3 + [False] * 3


@pytest.mark.long
def test_a_loop_that_gets_rows_done_is_none(rig: Rig) -> None:
    """Rows became durable between two of its crashes."""
    rig.open()
    for _ in range(CRASHES_TO_TRIP):
        rig.step(15)
        rig.cluster.run_pods()
        rate = WorkerRate(rows_at=rig.at + 1)
        rig.cloud.run(rig.cloud.deployment.fleets.put_rate(MODEL, rate))
        rig.cluster.exit(rig.alive[0], 1)
    assert rig.state.breaker is None


def test_another_image_replaces_workers_one_by_one(rig: Rig) -> None:
    """The new one loads first; an old one then gets SIGTERM, and counts until it has ended."""
    rig.open()
    rig.write(max_workers=4)
    rig.step()
    rig.cluster.run_pods()
    old = {job["metadata"]["name"] for job in rig.alive}
    rig.write(image="tidemill:2", max_workers=4)
    replaced: set[str] = set()
    while replaced != old:
        num_alive = len(rig.alive)
        rig.step(300)
        assert 3 <= len(rig.alive) <= 4
        stopping = [job for job in rig.alive if "deletionTimestamp" in job["metadata"]]
        assert len(stopping) <= 1
        assert stopping or len(rig.alive) > num_alive, "nothing has moved"
        rig.cluster.run_pods()
        for job in stopping:
            replaced.add(job["metadata"]["name"])
            rig.cluster.exit(job)
    rig.step(300)
    images = [job["spec"]["template"]["spec"]["containers"][0]["image"] for job in rig.alive]
    assert set(images) == {"tidemill:2"}


def test_a_used_up_quota_is_a_shortage_that_passes(rig: Rig) -> None:
    """Workers within the quota start, others are tried again, and users see the reason."""
    rig.open()
    rig.cluster.quota = 1
    rig.step()
    assert len(rig.alive) == 1
    waiting = describe_waiting(rig.state, rig.at)
    assert waiting is not None
    assert (waiting.code, "exceeded quota" in waiting.message) == ("no_capacity", True)
    rig.cluster.quota = 10
    rig.step(15)
    assert len(rig.alive) == 1
    rig.step(60)
    assert len(rig.alive) == 3


def test_a_denied_start_stops_the_fleet_and_says_why(rig: Rig) -> None:
    """Starts are retried now and then until the cluster allows Jobs again."""
    rig.open()
    user = 'User "system:serviceaccount:llm:x" cannot create resource "jobs" in API group "batch"'
    rig.cluster.refusal = Refusal(403, "Forbidden", f"jobs.batch is forbidden: {user}")
    rig.step()
    breaker = rig.state.breaker
    assert breaker is not None
    assert breaker.code == START_REFUSED
    assert breaker.reason.startswith("Kubernetes refuses to start workers: ")
    assert "Role" in breaker.advice
    rig.cluster.refusal = None
    rig.step(60)
    assert rig.alive == []
    rig.step(15 * 60)
    assert rig.state.breaker is None
    assert len(rig.alive) == 3


@pytest.mark.long
def test_two_launchers_start_no_doubles(rig: Rig) -> None:
    """Each number is reserved by one of them; a number's Job is made once."""
    rig.open()
    twin = Rig(rig.cloud, rig.cluster, rig.file, rig.at)
    for _ in range(2):
        rig.step(5)
        twin.step(5)
    twin.client.close()
    assert len(rig.cluster.jobs) == 3


@pytest.mark.long
def test_a_lost_answer_starts_no_double(rig: Rig) -> None:
    """A retry finds the Job of its number; one that was not answered at all counts until listed."""
    rig.cluster.num_lost = 3
    rig.open()
    rig.step()
    assert len(rig.cluster.jobs) == 1
    rig.step(LAUNCH_SECONDS)
    assert len(rig.cluster.jobs) == 3


@pytest.mark.long
def test_pods_that_no_node_has_room_for_hold_further_starts_back(rig: Rig) -> None:
    """Clusters that add nodes get some time first; the scheduler's message is shown."""
    rig.open()
    rig.write(max_workers=1)
    rig.step()
    rig.cluster.leave_unscheduled("0/4 nodes are available: 4 Insufficient nvidia.com/gpu.")
    rig.write(max_workers=3)
    rig.step(150)
    waiting = describe_waiting(rig.state, rig.at)
    assert waiting is not None
    assert "Insufficient nvidia.com/gpu" in waiting.message
    assert len(rig.alive) == 1
    rig.at += 1
    rig.cluster.run_pods()
    rig.step()
    assert describe_waiting(rig.state, rig.at) is None
    assert len(rig.alive) == 3


@pytest.mark.long
def test_what_kueue_has_not_admitted_waits(rig: Rig) -> None:
    """Suspended Jobs count as starting; once they are admitted they run."""
    rig.write(queue_name="gpus")
    rig.open()
    rig.step()
    rig.step(15)
    assert len(rig.alive) == 3
    assert rig.cluster.pods == {}
    rig.step(150)
    assert "Kueue" in (rig.state.refusal or "")
    rig.at += 1
    rig.cluster.admit()
    rig.cluster.run_pods()
    rig.step()
    assert rig.state.refusal is None
    assert len(rig.alive) == 3


def test_a_missing_image_opens_the_breaker(rig: Rig) -> None:
    """Kubernetes would pull for ever: such Jobs are deleted, and count as crashes."""
    rig.open()
    rig.step()
    rig.cluster.break_image("ImagePullBackOff", 'Back-off pulling image "tidemill:1"')
    rig.step(15)
    breaker = rig.state.breaker
    assert breaker is not None
    assert 'Back-off pulling image "tidemill:1"' in breaker.reason
    assert "Check that the image exists" in breaker.advice
    assert rig.cluster.jobs == {}
