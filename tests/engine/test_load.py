"""What an engine tells of the model that it has loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.load import _revision

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("folder", "revision"),
    [
        (f"models--org--name/snapshots/{COMMIT}", COMMIT),
        ("models--org--name/snapshots/main", None),
        (f"models/{COMMIT}", None),
    ],
)
def test_the_revision_is_that_of_the_snapshot(
    tmp_path: Path, folder: str, revision: str | None
) -> None:
    """As the hub's cache lays them out; any other folder has none."""
    model = tmp_path / folder
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert _revision(str(model)) == revision
