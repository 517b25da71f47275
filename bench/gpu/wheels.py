"""Wheels for a machine with a GPU but without an index, for a real `tidemill run` there.

    python -m bench.gpu.wheels [--download FOLDER]

Prints the packages that the engine needs besides those of such a machine (`HELD`), at the versions
of constraints.txt; `--download` fetches them for Python 3.12 on Linux x86_64 and prints how large
they are. There: `pip install --no-index --no-deps --target SITE FOLDER/*.whl`, and SITE on
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
# Packages of an image for training and inference: torch, transformers, and their requirements.
HELD = frozenset(
    """
    anyio attrs certifi charset-normalizer click filelock fsspec h11 hf-xet httpcore httpx
    huggingface-hub idna jinja2 llvmlite markdown-it-py markupsafe mdurl mpmath networkx numba numpy
    packaging pillow prometheus-client pygments pyyaml regex requests rich safetensors setuptools
    shellingham sniffio sympy tokenizers torch tqdm transformers triton typer typing-extensions
    urllib3
    """.split()
)
# Packages for recordings, which no part of `bench.gpu.gpu` reads.
LEFT_OUT = frozenset({"av", "soxr"})
# A wheel's name contains the oldest glibc that it supports, and pip compares names: up to Ubuntu
# 24.04's.
GLIBCS = range(17, 40)
PLATFORMS = ("manylinux2014_x86_64", *(f"manylinux_2_{minor}_x86_64" for minor in GLIBCS))
MOST_BYTES = 40 * 2**20


def needed(package: str = "tidemill", extras: frozenset[str] = frozenset({"engine"})) -> set[str]:
    """Return the wheels to carry for a package, including its transitive requirements."""
    found: set[str] = set()
    waiting = list(required(package, extras))
    while waiting:
        name = waiting.pop()
        if name not in found | HELD | LEFT_OUT:
            found.add(name)
            waiting += required(name, frozenset())
    return found


def required(package: str, extras: frozenset[str]) -> Iterator[str]:
    """Yield a package's direct requirements on the machine."""
    for text in requires(package) or ():
        requirement = Requirement(text)
        # Python 3.12, whatever version runs this.
        surroundings = [{"extra": extra, "python_version": "3.12"} for extra in (*extras, "")]
        marker = requirement.marker
        if marker is None or any(map(marker.evaluate, surroundings)):
            yield canonicalize_name(requirement.name)


def pinned(names: Iterable[str]) -> list[str]:
    """Return each name with its version in constraints.txt."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    versions = dict(line.split("==") for line in lines if re.match(r"[\w.-]+==", line))
    return [f"{name}=={versions[name]}" for name in sorted(names)]


def download(wheels: Iterable[str], folder: Path) -> int:
    """Fetch wheels and return their bytes."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(folder), "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    subprocess.run([*command, *wheels], check=True)
    return sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))


def main() -> None:
    """Print the list, and fetch it on request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--download", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    wheels = pinned(needed())
    print("\n".join(wheels))
    if options.download is None:
        return
    size = download(wheels, options.download)
    print(f"{size / 2**20:.1f} MiB", file=sys.stderr)
    if size > MOST_BYTES:
        raise SystemExit(f"the wheels are larger than {MOST_BYTES >> 20} MiB")


if __name__ == "__main__":
    main()
