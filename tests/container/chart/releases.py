"""Values that the chart is tried with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from tests.container.chart.rendering import Manifest, render

# Every option of a model that the examples lack, under names of the maximum length.
LONG: Final = "a-name-as-long-as-it-may-be-30"
EVERYTHING: Final[dict[str, Any]] = {
    "image": {"digest": f"sha256:{'0123456789abcdef' * 4}", "pullSecrets": ["registry"]},
    "environment": {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"},
    "existingSecret": "aws-keys",
    "workers": {
        "kueueQueue": "gpus",
        "serviceAccount": {"create": False, "name": "workers-of-ours"},
        "keda": {
            "existingAuthentication": "ours",
            "cache": {"volume": {"persistentVolumeClaim": {"claimName": "weights"}}},
        },
    },
    "launcher": {
        "nodeSelector": {"pool": "small"},
        "tolerations": [{"key": "pool", "operator": "Exists", "effect": "NoExecute"}],
        "serviceAccount": {"create": False},
    },
    "models": {
        "llama": {
            "gpus": 8,
            "tensorParallelSize": 2,
            "args": ["--max-model-len", "8192"],
            "workers": {"min": 2, "max": 3, "args": ["--reuse"]},
            "serve": {
                "enabled": True,
                "args": ["--max-queued-requests", "64"],
                "data": {"volume": {"persistentVolumeClaim": {"claimName": "files"}}},
                "cache": {"sizeLimit": "1Ti"},
                "apiKeys": {"existingSecret": "clients"},
                "service": {"type": "LoadBalancer", "annotations": {"a/b": "c"}},
                "metrics": {"podMonitor": True, "existingSecret": "figures", "annotations": False},
            },
        },
        LONG: {
            "name": "long",
            "cpu": 2,
            "workers": {"enabled": False},
            "serve": {
                "enabled": True,
                "replicas": 3,
                "disruptionBudget": {"maxUnavailable": "34%"},
                "metrics": {"podMonitor": True, "podMonitorLabels": {"release": "prometheus"}},
            },
        },
    },
}
LONG_RELEASE: Final = "a-release-whose-name-is-as-long-as-helm-takes-it-53-x"

# What is rendered, by a name for the test.
RELEASES: Final[dict[str, dict[str, Any]]] = {
    "launcher": {},
    "keda": {},
    "serve": {},
    "demo": {},
    "launcher and all else": {"base": "launcher", "values": EVERYTHING, "release": LONG_RELEASE},
    "keda and all else": {"base": "keda", "values": EVERYTHING, "release": LONG_RELEASE},
}


def manifests_of(name: str) -> Sequence[Manifest]:
    """Return the manifests of a release."""
    release = RELEASES[name]
    return render(
        release.get("base", name),
        values=json.dumps(release.get("values", {})),
        release=release.get("release", "mill"),
    )
