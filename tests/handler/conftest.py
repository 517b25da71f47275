"""Deployments on emulators, for what lies between the packages."""

from __future__ import annotations

import pytest

from tests.emulators import Emulator
from tests.handler.intake.rig import Cloud


@pytest.fixture
def files(emulator: Emulator) -> Cloud:
    """Return a deployment into which files are put, on each emulator in turn."""
    return Cloud.on(emulator, shard_lines="10")
