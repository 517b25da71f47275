"""Every kind of deployment, made once."""

from __future__ import annotations

import pytest

from tests.infra.compute.kinds import KINDS, Compute
from tests.infra.conftest import Synth


@pytest.fixture(scope="session")
def compute(synth: Synth) -> dict[str, Compute]:
    """Return each kind of deployment."""
    return {kind: Compute(synth(overrides)) for kind, overrides in KINDS.items()}


@pytest.fixture(params=KINDS)
def any_kind(request: pytest.FixtureRequest, compute: dict[str, Compute]) -> Compute:
    """Return every kind of deployment in turn."""
    return compute[request.param]
