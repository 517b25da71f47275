"""`python -m tidemill.cli.scratch worker …`: `tidemill worker …` with its caches on the best disk.

A training job of SageMaker has a disk below /opt/ml, the machine's NVMe where it has some. /tmp is
scratch of a size that AWS does not say, and nor does it say where the image's user may write. So
the folder with most room is taken, of those that can be written to; none of them is uploaded.
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
    """Return a folder below the place with most room that can be written to, or None."""
    found = [folder for place in places if (folder := _make_folder(Path(place)))]
    return max(found, key=lambda folder: shutil.disk_usage(folder).free, default=None)


def scratch_variables(folder: Path) -> Mapping[str, str]:
    """Return the variables that lead all that a worker writes into one folder."""
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
    """Become `tidemill` with these arguments; exit with 1 where nothing can be written."""
    folder = find_scratch(PLACES)
    if folder is None:
        sys.exit(f"No folder can be written to: {', '.join(PLACES)}.")
    free = shutil.disk_usage(folder).free
    found = {"message": "scratch", "folder": str(folder), "free_gigabytes": round(free / 1e9)}
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()  # nothing of this process is left by what comes
    environment = {**os.environ, **scratch_variables(folder)}
    command = ["tidemill", *arguments]
    os.execvpe("tidemill", command, environment)  # noqa: S606, S607 - ours, on the image's PATH


if __name__ == "__main__":
    main(sys.argv[1:])
