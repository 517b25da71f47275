"""Path of the newest Python on this machine that is newer than the running one.

`python -m tests.newest_python` prints it, or nothing. It searches PATH and pyenv's versions.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

# The newest version that the tests have passed on; newer ones may lack wheels.
NEWEST: Final = 13


def newest_python(environment: Mapping[str, str]) -> str | None:
    """Return the path of a Python that is newer than this one and not newer than 3.NEWEST."""
    for minor in range(NEWEST, sys.version_info.minor, -1):
        for path in _candidates(minor, environment):
            if _minor_of(path) == minor:
                return path
    return None


def _candidates(minor: int, environment: Mapping[str, str]) -> Iterator[str]:
    if path := shutil.which(f"python3.{minor}", path=environment.get("PATH")):
        yield path
    root = Path(environment.get("PYENV_ROOT") or Path(environment.get("HOME", "/"), ".pyenv"))
    yield from map(str, sorted(root.glob(f"versions/3.{minor}.*/bin/python")))


def _minor_of(path: str) -> int | None:
    """Return the minor version that an interpreter reports; None if it does not start.

    pyenv has shims for every installed version, which fail for versions that are not selected.
    """
    command = [path, "-c", "import sys; print(sys.version_info.minor)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return int(done.stdout) if done.returncode == 0 else None


if __name__ == "__main__":
    sys.stdout.write(newest_python(os.environ) or "")
