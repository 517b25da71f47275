"""Tiny models that processes share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.families import build


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a tiny Qwen3, on a machine where nothing is remembered."""
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    build("Qwen3Config").save_pretrained(tmp_path / "model")  # type: ignore[operator]
    return tmp_path / "model"
