"""Processor kinds as text, another for one that may round otherwise."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
_GPUS: Final = Path("/proc/driver/nvidia/gpus")
_TELLING: Final = ("model name", "flags", "CPU part", "Features", "Model:")


def cpu_lines() -> list[str]:
    """Return lines about the CPU's kind."""
    return [platform.machine(), *_telling_lines([_CPUINFO])]


def gpu_lines() -> list[str]:
    """Return lines about the kinds of GPUs here, without any library of theirs."""
    return [*_telling_lines(_GPUS.glob("*/information"))]


def _telling_lines(paths: Iterable[Path]) -> Iterator[str]:
    lines = set[str]()
    for path in paths:
        if path.exists():
            lines.update(path.read_text(encoding="utf-8", errors="replace").splitlines())
    yield from sorted(line for line in lines if line.startswith(_TELLING))
