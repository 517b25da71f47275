"""Schemas of what the chart renders: Kubernetes' own, and few words on other people's resources."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from tests.container.chart.rendering import Manifest, tool

TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}


def _closed(required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object that has no other properties."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def _resource(api_version: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"}
    return _closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind=TEXT,
        metadata=metadata,
        spec=spec,
    )


_TRIGGER = _closed(
    "type metadata authenticationRef",
    type={"const": "aws-sqs-queue"},
    # KEDA reads texts alone.
    metadata=_closed(
        "queueURL awsRegion queueLength",
        queueURL=TEXT,
        awsRegion=TEXT,
        queueLength={"type": "string", "pattern": "^[1-9][0-9]*$"},
        scaleOnInFlight={"enum": ["true", "false"]},
    ),
    authenticationRef=_closed("name", name=TEXT),
)
# Source: the custom resource definitions of KEDA 2 and of Prometheus' operator, as far as the chart
# makes use of them.
OTHERS = {
    "ScaledJob": _resource(
        "keda.sh/v1alpha1",
        _closed(
            "jobTargetRef triggers",
            jobTargetRef={"$ref": "#/$defs/io.k8s.api.batch.v1.JobSpec"},
            pollingInterval=COUNT,
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            successfulJobsHistoryLimit=COUNT,
            failedJobsHistoryLimit=COUNT,
            rollout=_closed(
                "",
                strategy={"enum": ["default", "gradual"]},
                propagationPolicy={"enum": ["background", "foreground"]},
            ),
            scalingStrategy=_closed("", strategy={"enum": ["default", "accurate", "eager"]}),
            triggers={"type": "array", "minItems": 1, "items": _TRIGGER},
        ),
    ),
    "TriggerAuthentication": _resource(
        "keda.sh/v1alpha1",
        _closed("podIdentity", podIdentity=_closed("provider", provider={"const": "aws"})),
    ),
    "PodMonitor": _resource(
        "monitoring.coreos.com/v1",
        _closed(
            "selector podMetricsEndpoints",
            selector={"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.LabelSelector"},
            podMetricsEndpoints={
                "type": "array",
                "items": _closed(
                    "port path",
                    port=TEXT,
                    path=TEXT,
                    authorization=_closed(
                        "credentials",
                        credentials={"$ref": "#/$defs/io.k8s.api.core.v1.SecretKeySelector"},
                    ),
                ),
            },
        ),
    ),
}


@cache
def _definitions(version: str) -> dict[str, Any]:
    definitions: dict[str, Any] = json.loads(tool(f"kubernetes-{version}.json").read_bytes())
    return dict(definitions["$defs"])


@cache
def _validator(version: str, api_version: str, kind: str) -> Draft202012Validator:
    definitions = _definitions(version)
    if kind in OTHERS:
        return Draft202012Validator({**OTHERS[kind], "$defs": definitions})
    group, _, name = api_version.rpartition("/")
    [schema] = (
        key
        for key, schema in definitions.items()
        if key.endswith(f".{group.split('.')[0] or 'core'}.{name}.{kind}")
        and kind in schema["properties"]["kind"]["enum"]
    )
    return Draft202012Validator({"$ref": f"#/$defs/{schema}", "$defs": definitions})


def complaints(manifest: Manifest, version: str) -> list[str]:
    """Return what a version of Kubernetes would say against a manifest, with the places."""
    validator = _validator(version, manifest["apiVersion"], manifest["kind"])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]
