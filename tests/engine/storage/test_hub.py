"""A model's files are in its folder or in the hub's cache."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest

from tidemill.engine.storage.hub import find_file, find_folder, snapshot_commit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[3]


@pytest.fixture(name="hub")
def fixture_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, offline, with a config of `org/name`; the snapshot's folder."""
    repository = tmp_path / "hub/models--org--name"
    snapshot = repository / "snapshots" / COMMIT
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return snapshot


def test_a_folders_files_are_in_it(tmp_path: Path) -> None:
    """A folder is never a file, whatever its name."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other.json").mkdir()
    assert find_file(str(tmp_path), "config.json") == tmp_path / "config.json"
    assert find_file(str(tmp_path), "other.json") is None
    assert find_file(str(tmp_path), "none.json") is None
    assert find_folder(str(tmp_path)) == tmp_path


def test_a_hub_ids_files_are_in_its_snapshot(hub: Path) -> None:
    """A missing file is None."""
    assert find_file("org/name", "config.json") == hub / "config.json"
    assert find_file("org/name", "generation_config.json") is None
    assert find_folder("org/name") == hub


@pytest.mark.parametrize("name", ["org/other", "no folder of this name", "a/b/c", "", "x" * 5000])
@pytest.mark.usefixtures("hub")
def test_an_invalid_model_name_has_no_folder(name: str) -> None:
    """The code that reads the model reports the error."""
    assert find_folder(name) is None


@pytest.mark.usefixtures("hub")
def test_transformers_reports_what_the_hub_refuses() -> None:
    """Its messages are the ones that people find in searches."""
    with pytest.raises((OSError, ValueError), match="a/b/c"):
        find_file("a/b/c", "config.json")


def test_files_are_found_without_transformers(hub: Path) -> None:
    """Importing it takes longer than everything else at startup."""
    script = (
        "import sys; from tidemill.engine.storage.hub import find_file, find_folder\n"
        "assert find_file('org/name', 'none.json') is None\n"
        "print(find_folder('org/name'), 'transformers' in sys.modules)"
    )
    environment = {"HF_HUB_CACHE": str(hub.parents[2]), "HF_HUB_OFFLINE": "1"}
    completed = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert completed.stdout.split() == [str(hub), "False"]


@pytest.mark.parametrize(
    ("folder", "revision"),
    [
        (f"models--org--name/snapshots/{COMMIT}", COMMIT),
        ("models--org--name/snapshots/main", None),
        (f"models/{COMMIT}", None),
    ],
)
def test_the_revision_is_that_of_the_snapshot(folder: str, revision: str | None) -> None:
    """The layout of the hub's cache gives the revision; any other folder has none."""
    assert snapshot_commit(Path(folder)) == revision
