"""Job of one worker: its manifest, its name and its labels. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from tidemill.batch.fleet import FleetPlan

from ..names import digest, plain_name
from .config import KubernetesConfig

CONTAINER: Final = "worker"
FLEET_LABEL: Final = "tidemill/fleet"
RELEASE_LABEL: Final = "tidemill/release"
# Label of an ended Job whose end the circuit breaker has counted.
COUNTED_LABEL: Final = "tidemill/counted"
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
DISRUPTED: Final = "DisruptionTarget"

# Like ECS's stop timeout; a worker needs half of it.
_STOP_SECONDS: Final = 120
# Kept for `kubectl logs` of an ended worker.
_KEEP_SECONDS: Final = 3600
# As in the image: container/Dockerfile.
_USER: Final = 10001
_CACHE, _SCRATCH, _SHARED = "/var/cache/tidemill", "/tmp", "/dev/shm"  # noqa: S108 - volumes
_HEALTH_FILE: Final = f"{_SCRATCH}/tidemill-health"
_SHARED_SIZE: Final = "1Gi"


def fleet_label(plan: FleetPlan, config: KubernetesConfig) -> str:
    """Return the label value of a fleet's Jobs, unique in the namespace."""
    return f"{plain_name(plan.model).lower()}-{digest(config.deployment, 3)}"


def selector(plan: FleetPlan, config: KubernetesConfig) -> str:
    """Return the label selector of a fleet's Jobs and pods."""
    return f"{FLEET_LABEL}={fleet_label(plan, config)}"


def job_name(plan: FleetPlan, config: KubernetesConfig, number: int, attempt: int = 1) -> str:
    """Return the name of a worker's Job, which number and attempt determine."""
    name = f"tidemill-{fleet_label(plan, config)}-{number}"
    return name if attempt == 1 else f"{name}-{attempt}"


def release_of(config: KubernetesConfig) -> str:
    """Return the release of a launch configuration: a digest of everything in its pods."""
    return digest(json.dumps(_pod_spec(config), sort_keys=True), 5)


def job_manifest(plan: FleetPlan, config: KubernetesConfig, name: str) -> dict[str, Any]:
    """Return the manifest of a worker's Job.

    A pod that is lost to its node's end, a preemption or an eviction is replaced by Kubernetes and
    does not count as a failure; every other failure ends the Job. With a Kueue queue the Job is
    created suspended, and Kueue admits it.
    """
    labels = {
        "app.kubernetes.io/name": "tidemill",
        "app.kubernetes.io/component": CONTAINER,
        "app.kubernetes.io/managed-by": "tidemill-launcher",
        FLEET_LABEL: fleet_label(plan, config),
        RELEASE_LABEL: plan.release,
    }
    queue: dict[str, str] = {QUEUE_LABEL: config.queue_name} if config.queue_name else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": config.namespace,
            "labels": labels | queue,
            "annotations": {"tidemill/model": plan.model},
        },
        "spec": {
            **({"suspend": True} if config.queue_name else {}),
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": _KEEP_SECONDS,
            "podFailurePolicy": {"rules": _failure_rules()},
            "template": {"metadata": {"labels": labels}, "spec": _pod_spec(config)},
        },
    }


def _failure_rules() -> list[dict[str, Any]]:
    return [
        {"action": "Ignore", "onPodConditions": [{"type": DISRUPTED, "status": "True"}]},
        # The Job's message then has the exit code, even if its pod is gone.
        {
            "action": "FailJob",
            "onExitCodes": {"containerName": CONTAINER, "operator": "NotIn", "values": [0]},
        },
    ]


def _pod_spec(config: KubernetesConfig) -> dict[str, Any]:
    volumes: list[tuple[str, str, dict[str, str]]] = [
        ("cache", _CACHE, {}),
        ("scratch", _SCRATCH, {}),
    ]
    if config.gpus > 1:  # NCCL needs more than a container runtime's default
        volumes.append(("shared", _SHARED, {"medium": "Memory", "sizeLimit": _SHARED_SIZE}))
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _STOP_SECONDS,
        # A worker calls AWS, never the cluster.
        "automountServiceAccountToken": False,
        # A Service called tidemill-server would set TIDEMILL_SERVER_PORT.
        "enableServiceLinks": False,
        # Process 1 misses a signal in its first moment, and the image has no init.
        "shareProcessNamespace": True,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(config, {name: path for name, path, _ in volumes})],
        "volumes": [{"name": name, "emptyDir": how} for name, _, how in volumes],
    }
    if config.service_account:
        spec["serviceAccountName"] = config.service_account
    if config.node_selector:
        spec["nodeSelector"] = dict(config.node_selector)
    if config.tolerations:
        spec["tolerations"] = [each.model_dump(exclude_none=True) for each in config.tolerations]
    return spec


def _container(config: KubernetesConfig, mounts: Mapping[str, str]) -> dict[str, Any]:
    resources = _resources(config)
    return {
        "name": CONTAINER,
        "image": config.image,
        "args": list(config.args),
        "env": [
            {"name": name, "value": value}
            for name, value in sorted(
                {
                    "POWERTOOLS_SERVICE_NAME": CONTAINER,
                    "TIDEMILL_HEALTH_FILE": _HEALTH_FILE,
                    **config.environment,
                }.items()
            )
        ],
        **(
            {"envFrom": [{"secretRef": {"name": name}} for name in config.secrets]}
            if config.secrets
            else {}
        ),
        **({"resources": {"requests": resources, "limits": resources}} if resources else {}),
        "livenessProbe": {
            "exec": {"command": ["python", "-m", "tidemill.cli.health"]},
            "initialDelaySeconds": 120,
            "periodSeconds": 30,
            "timeoutSeconds": 10,
            "failureThreshold": 3,
        },
        # The status of the pod then has the last lines of a failed worker.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }


def _resources(config: KubernetesConfig) -> dict[str, str]:
    return {
        name: value
        for name, value in (
            ("cpu", config.cpu),
            ("memory", config.memory),
            ("nvidia.com/gpu", str(config.gpus) if config.gpus else None),
        )
        if value
    }
