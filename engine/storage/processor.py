"""Processor kinds as text, which differs for processors that may round differently."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

_CPUINFO: Final = Path("/proc/cpuinfo")
_GPUS: Final = Path("/proc/driver/nvidia/gpus")
_RELEVANT: Final = ("model name", "flags", "CPU part", "Features", "Model:")


def cpu_lines() -> list[str]:
    """Return lines about the CPU's kind."""
    return [platform.machine(), *_relevant_lines([_CPUINFO])]


def gpu_lines() -> list[str]:
    """Return lines about the kinds of local GPUs, without using their libraries."""
    return [*_relevant_lines(_GPUS.glob("*/information"))]


def _relevant_lines(paths: Iterable[Path]) -> Iterator[str]:
    lines = set[str]()
    for path in paths:
        if path.exists():
            lines.update(path.read_text(encoding="utf-8", errors="replace").splitlines())
    yield from sorted(line for line in lines if line.startswith(_RELEVANT))
