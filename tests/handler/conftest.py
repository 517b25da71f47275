"""Deployments on emulators."""

from __future__ import annotations

import pytest

from tests.emulators import Emulator
from tests.handler.finalize.rig import Cloud
from tests.handler.intake.rig import Cloud as FileCloud


@pytest.fixture
def cloud(emulator: Emulator) -> Cloud:
    """Return a deployment with batches, on each emulator in turn."""
    return Cloud.on(emulator)


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return a deployment on the emulator that enforces most, for what is not about AWS."""
    return Cloud.on(ministack)


@pytest.fixture
def files(emulator: Emulator) -> FileCloud:
    """Return a deployment into which files are put, on each emulator in turn."""
    return FileCloud.on(emulator, shard_lines="10")
