"""Batches on each emulator."""

from __future__ import annotations

import pytest

from tests.emulators import Emulator
from tests.handler.finalize.rig import Cloud


@pytest.fixture
def cloud(emulator: Emulator) -> Cloud:
    """Return a deployment of its own on each emulator in turn."""
    return Cloud.on(emulator)


@pytest.fixture
def mini(ministack: Emulator) -> Cloud:
    """Return a deployment on the emulator that enforces most, for what is not about AWS."""
    return Cloud.on(ministack)
