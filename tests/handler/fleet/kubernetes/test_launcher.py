"""The launcher of Jobs against a cluster: what it lists, starts and stops; what refusals mean."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.handler.fleet.kubernetes.cluster import NAMESPACE, Cluster, Refusal
from tidemill.batch.fleet import FleetPlan, Worker, WorkerStatus
from tidemill.handler.aws.sync import Aws
from tidemill.handler.errors import AwsError
from tidemill.handler.fleet.kubernetes.api_server import KubernetesClient, NoCluster, connect
from tidemill.handler.fleet.kubernetes.launcher import KubernetesLauncher
from tidemill.handler.fleet.launcher import NoCapacity, NotStarted, StartRefused

MEANS = {"image": "tidemill:1", "namespace": NAMESPACE, "deployment": "batches"}
PLAN = FleetPlan("small", "kubernetes", "r1", means=MEANS)
LAUNCHER = KubernetesLauncher()
USER = 'User "system:serviceaccount:llm:x" cannot create resource "jobs"'


@pytest.fixture
def aws(cluster: Cluster) -> Iterator[Aws]:
    """Return a driver of operations on the cluster alone."""
    client = KubernetesClient(cluster.url, retry_delays_seconds=(0.0,))
    yield Aws(lambda _service, **_: client)
    client.close()


def start(aws: Aws, number: int = 1, plan: FleetPlan = PLAN) -> str:
    """Start a worker."""
    return aws.run(LAUNCHER.start(plan, number))


def listed(aws: Aws, plan: FleetPlan = PLAN) -> list[Worker]:
    """Return the workers of a fleet."""
    return aws.run(LAUNCHER.list_workers(plan))


def test_a_number_is_started_once(aws: Aws, cluster: Cluster) -> None:
    """The name of its Job is taken the second time."""
    assert start(aws) == start(aws)
    assert start(aws, 2) != start(aws)
    assert len(cluster.jobs) == 2


@pytest.mark.parametrize("exit_code", [0, 1])
def test_an_ended_job_does_not_count_as_started(aws: Aws, cluster: Cluster, exit_code: int) -> None:
    """The next attempt has a different name, and the ended Job stays for the circuit breaker."""
    ended = start(aws)
    cluster.run_pods()
    cluster.exit(cluster.jobs[ended], exit_code)
    second = start(aws)
    assert second == f"{ended}-2"
    assert [worker.id for worker in listed(aws)] == [second]
    assert start(aws) == second
    assert set(cluster.jobs) == {ended, second}
    cluster.run_pods()
    cluster.exit(cluster.jobs[second], exit_code)
    assert start(aws) == f"{ended}-3"


def test_a_job_that_is_being_deleted_does_not_count_as_started(aws: Aws, cluster: Cluster) -> None:
    """A retry after a stop has a worker that runs on."""
    stopped = start(aws)
    cluster.run_pods()
    [worker] = listed(aws)
    aws.run(LAUNCHER.stop(PLAN, worker))
    assert start(aws) == f"{stopped}-2"
    statuses = {worker.id: worker.status for worker in listed(aws)}
    assert statuses == {stopped: WorkerStatus.STOPPING, f"{stopped}-2": WorkerStatus.STARTING}


def test_a_lost_answer_starts_no_second_job(aws: Aws, cluster: Cluster) -> None:
    """The client repeats the create, which finds the first one's Job alive."""
    cluster.num_lost = 1
    name = start(aws)
    assert set(cluster.jobs) == {name}
    assert [method for method, _ in cluster.requests] == ["POST", "POST", "GET"]


def test_a_name_that_another_takes_is_left_to_it(aws: Aws, cluster: Cluster) -> None:
    """A Job without the fleet's labels is not a worker of it."""
    name = start(aws)
    cluster.jobs[name]["metadata"]["labels"] = {}
    assert start(aws) == f"{name}-2"


def test_a_number_whose_attempts_have_all_ended_is_an_error(aws: Aws, cluster: Cluster) -> None:
    """The fleet takes another number after its backoff."""
    for _ in range(9):
        name = start(aws)
        cluster.run_pods()
        cluster.exit(cluster.jobs[name], 1)
    with pytest.raises(NotStarted, match=f"up to {name}, have already ended"):
        start(aws)
    assert len(cluster.jobs) == 9


def test_a_worker_starts_runs_stops_and_is_gone(aws: Aws, cluster: Cluster) -> None:
    """A Job that was deleted is listed until its pod has ended: its GPU is not free before."""
    name = start(aws)
    [worker] = listed(aws)
    assert (worker.id, worker.release, worker.status) == (name, "r1", WorkerStatus.STARTING)
    cluster.run_pods()
    [worker] = listed(aws)
    assert worker.status is WorkerStatus.RUNNING
    aws.run(LAUNCHER.stop(PLAN, worker))
    [worker] = listed(aws)
    assert worker.status is WorkerStatus.STOPPING
    aws.run(LAUNCHER.stop(PLAN, worker))
    cluster.exit(cluster.jobs[name])
    assert listed(aws) == []
    aws.run(LAUNCHER.stop(PLAN, worker))


def test_fleets_do_not_list_each_other(aws: Aws) -> None:
    """Jobs of another model, or of another deployment in the same namespace, are not listed."""
    start(aws)
    others = (
        FleetPlan("other", "kubernetes", "r1", means=MEANS),
        FleetPlan("small", "kubernetes", "r1", means=MEANS | {"deployment": "other"}),
    )
    for other in others:
        assert listed(aws, other) == []
        start(aws, plan=other)
        assert len(listed(aws, other)) == 1
    assert len(listed(aws)) == 1


def test_pages_are_followed(aws: Aws, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet may be larger than a page."""
    monkeypatch.setattr("tidemill.handler.fleet.kubernetes.launcher._PAGE", 2)
    names = {start(aws, number) for number in range(5)}
    assert {worker.id for worker in listed(aws)} == names


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (Refusal(403, "Forbidden", "jobs is forbidden: exceeded quota: gpus, used: 4"), NoCapacity),
        (Refusal(403, "Forbidden", f"jobs.batch is forbidden: {USER}"), StartRefused),
        (
            Refusal(403, "Forbidden", "pods is forbidden: failed quota: q: must specify cpu"),
            StartRefused,
        ),
        (Refusal(422, "Invalid", "Job.batch is invalid: spec.template"), StartRefused),
        (Refusal(404, "NotFound", 'namespaces "llm" not found'), StartRefused),
        (Refusal(400, "", 'admission webhook "kyverno" denied the request: no tag'), StartRefused),
        (Refusal(500, "InternalError", "failed calling webhook: no endpoints available"), AwsError),
        (Refusal(429, "TooManyRequests", "the server has received too many requests"), AwsError),
        (Refusal(401, "Unauthorized", "Unauthorized"), AwsError),
    ],
    ids=["quota", "rights", "limits", "invalid", "namespace", "webhook", "500", "429", "401"],
)
def test_a_refused_start_is_classified_by_its_remedy(
    aws: Aws, cluster: Cluster, refusal: Refusal, error: type[Exception]
) -> None:
    """A shortage passes, a wrong configuration does not, other errors may have started a Job."""
    cluster.refusal = refusal
    with pytest.raises((NotStarted, AwsError)) as caught:
        start(aws)
    assert type(caught.value) is error
    assert str(refusal) in str(caught.value)


def test_a_token_that_rotates_is_read_again(cluster: Cluster, tmp_path: Path) -> None:
    """The kubelet writes a new one every hour; without a valid one the server's reply is raised."""
    token = tmp_path / "token"
    client = KubernetesClient(cluster.url, token_file=token)
    aws = Aws(lambda _service, **_: client)
    for number in range(2):
        cluster.token = f"token-{number}"
        token.write_text(f"token-{number}\n", encoding="utf-8")
        start(aws, number)
    cluster.token = "another"
    with pytest.raises(AwsError, match="Unauthorized"):
        listed(aws)
    token.unlink()
    with pytest.raises(AwsError, match="token cannot be read: No such file"):
        listed(aws)
    client.close()


def test_a_server_that_is_not_there_is_named() -> None:
    """The error follows a few tries."""
    client = KubernetesClient("http://127.0.0.1:9", retry_delays_seconds=(0.0,))
    with pytest.raises(AwsError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        listed(Aws(lambda _service, **_: client))
    client.close()


def test_outside_of_a_cluster_a_server_must_be_named() -> None:
    """The error gives the flag; the pod's token is required, too."""
    with pytest.raises(NoCluster, match="--api-server http://127"):
        connect({})
    with pytest.raises(NoCluster, match="serviceAccountName"):
        connect({"KUBERNETES_SERVICE_HOST": "::1", "KUBERNETES_SERVICE_PORT": "443"})
