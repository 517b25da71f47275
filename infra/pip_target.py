"""Packages for Lambda: installed by pip into a folder, for its system and without Docker."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).parent.parent
BUNDLES: Final = ROOT / "out" / "bundles"

Processor = Literal["arm64", "x86_64"]


@contextmanager
def locked(bundles: Path) -> Iterator[None]:
    """Wait until no other process or thread builds in a folder, and keep the others waiting."""
    place = os.open(bundles, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)  # which ends the lock


def install(folder: Path, processor: Processor, wanted: Sequence[str], *options: str) -> None:
    """Install packages for Lambda into a folder; raises CalledProcessError."""
    architecture = "aarch64" if processor == "arm64" else "x86_64"
    subprocess.run(  # noqa: S603 - our own command
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--target", str(folder), "--no-compile", "--only-binary", ":all:"),
            *("--implementation", "cp", "--python-version", python_version()),
            # Of the older tags both are tried, and Lambda's system is newer than both.
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
    """Return the version of the Python that runs this, as `3.11`."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"
