"""Workers on the emulator that is nearest to AWS in what they need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulators import Emulator
from tests.handler.worker.rig import Rig


@pytest.fixture
def rig(ministack: Emulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """Return a separate deployment; started workers are killed at the end."""
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    rig = Rig.on(ministack, tmp_path)
    yield rig
    for process in rig.processes:
        process.kill()
