"""Tiny models that processes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.families import build
from tidemill.engine.parallel import leader


@pytest.fixture(autouse=True)
def fixture_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a busy machine take its time to tell of an end that does come."""
    monkeypatch.setattr(leader, "ANSWER_SECONDS", 120.0)


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a tiny Qwen3, on a machine where nothing is remembered."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    build("Qwen3Config").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    return tmp_path / "model"
