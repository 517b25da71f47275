"""The machine: card, driver, packages, and the optional ones that can be imported."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

from bench.gpu.parts.task import Numbers, Place, Task

PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "tokenizers", "numba")
# Packages that only a real run needs (`bench.gpu.wheels`).
OPTIONAL = ("tidemill.cli.main", "tidemill.engine.load")
NVIDIA_SMI = "name,driver_version,memory.total,clocks.max.sm,clocks.max.mem,power.limit"


def tasks(place: Place) -> Iterator[Task]:
    """Yield the card, the packages, and each import."""
    yield Task("card", partial(card, place), 1)
    yield Task("packages", packages, 1)
    for name in OPTIONAL:
        yield Task(name, partial(imported, name), 1)


def card(place: Place) -> Numbers:
    """Return the driver's description of the card, and the host's processors."""
    host = {"python": platform.python_version(), "processors": os.cpu_count()}
    if place.is_tiny:
        return {**host, "said": "none: interpreted on a CPU"}
    found = torch.cuda.get_device_properties(place.device)
    smi = ""
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={NVIDIA_SMI}", "--format=csv,noheader"]
        smi = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return {
        **host,
        "said": smi or found.name,
        "name": found.name,
        "bytes": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def packages() -> Numbers:
    """Return the versions of installed packages."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return {"versions": versions, "said": ", ".join(f"{k} {v}" for k, v in versions.items())}


def imported(name: str) -> Numbers:
    """Return whether a module can be imported."""
    try:
        module = import_module(name)
    except ImportError as exc:
        return {"said": f"not importable: {exc}"}
    return {"said": getattr(module, "__version__", "importable")}
