"""Deployments on emulators, for intake."""

from __future__ import annotations

import pytest

from tests.emulators import Emulator
from tests.handler.intake.rig import Cloud


@pytest.fixture
def cloud(emulator: Emulator) -> Cloud:
    """Return a separate deployment, with small shards, on each emulator in turn."""
    return Cloud.on(emulator, shard_lines="10")


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return such a deployment on one emulator, for what is not about AWS."""
    return Cloud.on(ministack, shard_lines="10")
