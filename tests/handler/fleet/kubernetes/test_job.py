"""The manifest of a worker's Job: small where a plan is, whole where it says everything."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.container.chart.schemas import complaints
from tests.container.chart.unpack import VERSIONS
from tests.handler.fleet.kubernetes.rig import plan_of
from tidemill.batch.fleet import FleetPlan
from tidemill.handler.fleet.kubernetes.config import KubernetesConfig
from tidemill.handler.fleet.kubernetes.job import job_manifest, job_name, release_of

EVERYTHING: dict[str, Any] = {
    "args": ["--model", "s3://weights/big"],
    "gpus": 8,
    "cpu": "16",
    "memory": "60Gi",
    "node_selector": {"nvidia.com/gpu.product": "L4"},
    "tolerations": [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Equal", "value": "yes", "tolerationSeconds": 60},
    ],
    "service_account": "tidemill-worker",
    "queue_name": "gpu-queue",
    "environment": {"HF_HUB_OFFLINE": "1"},
    "secrets": ["aws-keys"],
}


def manifest_of(model: str = "org/Big Model", **means: Any) -> dict[str, Any]:
    """Return the manifest of the seventh worker of a fleet."""
    config = KubernetesConfig.model_validate(
        plan_of(**means)["means"] | {"namespace": "llm", "deployment": "batches"}
    )
    plan = FleetPlan(model, "kubernetes", release_of(config))
    return job_manifest(plan, config, job_name(plan, config, 1_900_000_007))


def test_a_plan_that_says_everything_is_in_the_manifest_whole() -> None:
    """GPUs, places, rights, queue and secrets."""
    job = manifest_of(**EVERYTHING)
    pod = job["spec"]["template"]["spec"]
    [worker] = pod["containers"]
    expected = {"cpu": "16", "memory": "60Gi", "nvidia.com/gpu": "8"}
    assert worker["resources"] == {"requests": expected, "limits": expected}
    assert pod["nodeSelector"] == EVERYTHING["node_selector"]
    assert pod["tolerations"] == EVERYTHING["tolerations"]
    assert pod["serviceAccountName"] == "tidemill-worker"
    assert worker["envFrom"] == [{"secretRef": {"name": "aws-keys"}}]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in worker["env"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
    assert job["spec"]["suspend"] is True
    assert {"name": "shared", "mountPath": "/dev/shm"} in worker["volumeMounts"]  # noqa: S108
    assert pod["terminationGracePeriodSeconds"] >= 60
    assert worker["livenessProbe"]["exec"]["command"] == ["python", "-m", "tidemill.cli.health"]


def test_a_small_plan_requests_no_more() -> None:
    """A CPU worker needs no GPU, no queue, no node selector, and no permissions in the cluster."""
    job = manifest_of(gpus=0)
    pod = job["spec"]["template"]["spec"]
    assert "resources" not in pod["containers"][0]
    assert "suspend" not in job["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert not {"nodeSelector", "tolerations", "serviceAccountName"} & set(pod)


@pytest.mark.parametrize("model", ["a", "Qwen/Qwen3-0.6B", "x" * 300, "模型", "-", "a..b_c"])
def test_every_model_has_names_that_kubernetes_takes(model: str) -> None:
    """A pod's name is six characters longer than its Job's, and is the value of a label."""
    job = manifest_of(model)
    name = job["metadata"]["name"]
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name)
    assert len(name) + 6 <= 63
    for value in job["metadata"]["labels"].values():
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", value)


def test_deployments_of_one_namespace_have_different_jobs() -> None:
    """Their numbers may be the same."""
    plan = FleetPlan("small", "kubernetes", "r")
    names = {
        job_name(plan, KubernetesConfig(image="i", namespace="llm", deployment=deployment), 1)
        for deployment in ("one", "two")
    }
    assert len(names) == 2


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("means", [{}, EVERYTHING], ids=["small", "everything"])
def test_the_manifest_is_valid_by_the_schema_of_kubernetes(
    means: dict[str, Any], version: str
) -> None:
    """It has no field that this version does not know."""
    manifest = manifest_of(**means)
    assert complaints(manifest, version) == []
    manifest["spec"]["template"]["spec"]["tolerationz"] = []
    assert complaints(manifest, version) != []
