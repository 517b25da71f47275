"""A cluster and a launcher on it, of each test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulators import Emulator
from tests.handler.fleet.kubernetes.cluster import Cluster, serving
from tests.handler.fleet.kubernetes.rig import Rig
from tests.handler.intake.rig import Cloud

# The Lambdas look for plans where there are none.
ELSEWHERE = {"shard_lines": "1", "fleets": "/tidemill/elsewhere/fleets"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Return a cluster that answers by HTTP."""
    with serving(Cluster()) as found:
        yield found


@pytest.fixture
def rig(ministack: Emulator, cluster: Cluster, tmp_path: Path) -> Iterator[Rig]:
    """Return a launcher with a plan of three workers at most, on a deployment without work."""
    made = Rig(Cloud.on(ministack, **ELSEWHERE), cluster, tmp_path / "plans.json")
    made.write()
    yield made
    made.client.close()
    assert made.denied == []
