"""Layer of the Lambda that reads and writes tables: pyarrow without unneeded parts.

It is built once per version of pyarrow and reused from `out/bundles`, as a reproducible
archive.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from infra.archive import zip_folder
from infra.pip_target import BUNDLES, ROOT, Processor, install, locked

_FOLDER: Final = Path("python")
# Remote file systems, Flight, and files for compiling against it: half of the package.
_LEFT_OUT: Final = (
    *("*flight*", "*_s3*", "*gcs*", "*azure*", "*hdfs*", "*orc*", "*cuda*", "*jvm*", "*gandiva*"),
    *("include", "tests", "src", "*.pyx", "*.pxd", "*.pxi", "*.h", "*.cc"),
)


def build_tables_layer(processor: Processor, python: str, bundles: Path = BUNDLES) -> Path:
    """Return the archive for a processor and a Python; raises CalledProcessError if pip fails."""
    archive = bundles / f"tables-{processor}-{_digest(processor, python)}.zip"
    if archive.exists():
        return archive
    bundles.mkdir(parents=True, exist_ok=True)
    with locked(bundles), TemporaryDirectory(prefix="growing-", dir=bundles) as place:
        if not archive.exists():
            folder, growing = Path(place) / "content", Path(place) / archive.name
            install(folder / _FOLDER, processor, python, ["pyarrow"], "--no-deps")
            zip_folder(folder, growing, leaves_out=_is_left_out, compresslevel=1)
            growing.rename(archive)
    return archive


def _is_left_out(path: Path) -> bool:
    return any(Path(part).match(each) for part in path.parts[1:] for each in _LEFT_OUT)


def _digest(processor: Processor, python: str) -> str:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = next(line for line in pins if line.startswith("pyarrow=="))
    known = f"{processor} {python} {pinned} {_LEFT_OUT}"
    return sha256(known.encode()).hexdigest()[:16]
