"""A local Ray cluster of three nodes, without GPUs and without a dashboard."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[4]


def use_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ray's processes find this checkout, and neither send nor keep anything at home."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture(scope="module")
def local_ray() -> Iterator[Any]:
    """Start a Ray of one node, for an engine and a task or two."""
    import ray

    with pytest.MonkeyPatch.context() as monkeypatch:
        use_checkout(monkeypatch)
        ray.init(address="local", num_cpus=4, log_to_driver=False, include_dashboard=False)
        yield ray
        ray.shutdown()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a head and two nodes, each with a CPU for a task and one for an engine."""
    import ray
    from ray.cluster_utils import Cluster

    use_checkout(monkeypatch)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2)
        ray.init(address=cluster.address, log_to_driver=False)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
