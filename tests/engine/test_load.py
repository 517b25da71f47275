"""The engine's information about the loaded model."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

from tidemill.engine.load import _version


def test_an_installed_engine_reports_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the package's version."""
    monkeypatch.setattr(metadata, "version", {"tidemill": "1.2.3"}.__getitem__)
    assert _version() == "1.2.3"


def test_a_source_tree_reports_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an installed package, a report must not name a version that may be another's."""

    def refuse(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", refuse)
    assert re.fullmatch("source-[0-9a-f]{12}", _version())
    assert _version() == _version()
