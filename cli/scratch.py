"""`python -m tidemill.cli.scratch worker …`: runs `tidemill worker …` with caches on the best disk.

SageMaker training jobs have a disk under /opt/ml: the machine's NVMe, if it has one. AWS documents
neither the size of /tmp nor where the image's user may write. Therefore the writable folder with
the most free space is used. SageMaker uploads none of them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

PLACES: Final = ("/opt/ml/input/data", "/opt/ml", "/tmp", "/var/cache")  # noqa: S108 - only looked at
_FOLDER: Final = "tidemill"


def find_scratch(places: Iterable[str]) -> Path | None:
    """Return a writable folder in the place with the most free space, or None."""
    found = [folder for place in places if (folder := _make_folder(Path(place)))]
    return max(found, key=lambda folder: shutil.disk_usage(folder).free, default=None)


def scratch_variables(folder: Path) -> Mapping[str, str]:
    """Return the variables that direct all files of a worker to one folder."""
    return {
        "HOME": str(folder),
        "NUMBA_CACHE_DIR": str(folder / "numba"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TIDEMILL_WEIGHTS_CACHE": str(folder / "weights"),
        "TIDEMILL_HEALTH_FILE": str(folder / "health"),
    }


def _make_folder(place: Path) -> Path | None:
    folder = place / _FOLDER
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return None


def main(arguments: Sequence[str]) -> NoReturn:
    """Replace this process with `tidemill`; exit with 1 if no folder is writable."""
    folder = find_scratch(PLACES)
    if folder is None:
        sys.exit(f"None of these folders is writable: {', '.join(PLACES)}.")
    free = shutil.disk_usage(folder).free
    found = {"message": "scratch", "folder": str(folder), "free_gigabytes": round(free / 1e9)}
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()  # exec replaces this process
    environment = {**os.environ, **scratch_variables(folder)}
    command = ["tidemill", *arguments]
    os.execvpe("tidemill", command, environment)  # noqa: S606, S607 - ours, on the image's PATH


if __name__ == "__main__":
    main(sys.argv[1:])
