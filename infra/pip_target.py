"""Packages for Lambda: installed by pip into a folder, for Lambda's platform, without Docker."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).parent.parent
BUNDLES: Final = ROOT / "out" / "bundles"

# The functions' runtime in AWS, whichever Python builds the bundle: Amazon Linux 2023, glibc 2.34.
# python3.11 and older are Amazon Linux 2 with 2.26, and pyarrow's wheels need 2.28.
LAMBDA_PYTHON: Final = "3.13"

Processor = Literal["arm64", "x86_64"]


@contextmanager
def locked(bundles: Path) -> Iterator[None]:
    """Lock a folder against other processes and threads that build in it; waits for them."""
    place = os.open(bundles, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)  # which releases the lock


def install(
    folder: Path, processor: Processor, python: str, wanted: Sequence[str], *options: str
) -> None:
    """Install packages for a version of Python into a folder; raises CalledProcessError."""
    architecture = "aarch64" if processor == "arm64" else "x86_64"
    subprocess.run(  # noqa: S603 - our own command
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--target", str(folder), "--no-compile", "--only-binary", ":all:"),
            *("--implementation", "cp", "--python-version", python),
            # Both platform tags are tried; glibc of LAMBDA_PYTHON is newer than both.
            *("--platform", f"manylinux2014_{architecture}"),
            *("--platform", f"manylinux_2_28_{architecture}"),
            *("--constraint", str(ROOT / "constraints.txt")),
            *options,
            *wanted,
        ],
        check=True,
        stdin=subprocess.DEVNULL,
    )


def python_version() -> str:
    """Return the version of the running Python, as `3.11`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def find_python(version: str) -> str | None:
    """Return the path of a Python of a version: this one, one on the PATH, or one of pyenv's."""
    if version == python_version():
        return sys.executable
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(map(str, root.glob(f"versions/{version}.*/bin/python"))),
    ]
    return next((path for path in candidates if path and _version_of(path) == version), None)


def _version_of(path: str) -> str | None:
    """Return the version that an interpreter reports; None if it does not start.

    pyenv puts a shim for each installed version on the PATH, and those not selected fail.
    """
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run(  # noqa: S603 - an interpreter of this machine
            [path, "-c", code], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
