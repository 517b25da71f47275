"""What an engine tells of the model that it has loaded."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

from tidemill.engine.load import _version


def test_an_installed_engine_tells_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of the package."""
    monkeypatch.setattr(metadata, "version", {"tidemill": "1.2.3"}.__getitem__)
    assert _version() == "1.2.3"


def test_a_tree_of_sources_tells_what_lies_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no version then, and a report must not name one that may be another's."""

    def refuse(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", refuse)
    assert re.fullmatch("source-[0-9a-f]{12}", _version())
    assert _version() == _version()
