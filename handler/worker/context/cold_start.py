"""Cold start: the duration of a worker's start by steps, emitted once, with its first row."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.request import urlopen

from ...observability import Metric

_METADATA: Final = "ECS_CONTAINER_METADATA_URI_V4"
_METADATA_SECONDS: Final = 2.0
_METRICS: Final = {
    "image_seconds": Metric.COLD_START_IMAGE_SECONDS,
    "weights_seconds": Metric.COLD_START_WEIGHTS_SECONDS,
    "ready_seconds": Metric.COLD_START_READY_SECONDS,
    "row_seconds": Metric.COLD_START_ROW_SECONDS,
}


class ColdStart:
    """Steps by name, in seconds: a duration, or the time of a milestone since process start.

    `age_seconds` is the age of this process; the clock is monotonic.
    """

    def __init__(
        self, age_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._began = clock() - age_seconds
        self.steps: dict[str, float] = {}

    def note(self, **steps: float) -> None:
        """Record durations of steps."""
        self.steps.update(steps)

    def reach(self, step: str) -> bool:
        """Record that a milestone is reached; return whether it is for the first time."""
        is_first = f"{step}_seconds" not in self.steps
        if is_first:
            self.steps[f"{step}_seconds"] = round(self._clock() - self._began, 3)
        return is_first

    def figures(self) -> dict[Metric, float]:
        """Return the steps that have a metric."""
        return {metric: self.steps[step] for step, metric in _METRICS.items() if step in self.steps}


def process_age(proc: Path = Path("/proc")) -> tuple[float, float]:
    """Return the seconds since this process and its machine started; 0 if unknown."""
    try:
        uptime = float((proc / "uptime").read_text(encoding="ascii").split()[0])
        fields = (proc / "self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except (OSError, ValueError, IndexError):
        return 0.0, 0.0
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, uptime - began), uptime


def read_task(environment: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the ECS metadata of this process's task; empty outside of ECS."""
    url = environment.get(_METADATA)
    if not url:
        return {}
    with suppress(OSError, ValueError):
        with urlopen(f"{url}/task", timeout=_METADATA_SECONDS) as answer:  # noqa: S310 - ECS's own
            found = json.load(answer)
        return found if isinstance(found, dict) else {}
    return {}


def task_steps(task: Mapping[str, Any], began: float) -> dict[str, float]:
    """Return the seconds of the image pull, and from its end to the start of the process.

    `began` is the Unix time of the process's start.
    """
    try:
        pulled, started = (
            datetime.fromisoformat(task[name]).timestamp()
            for name in ("PullStoppedAt", "PullStartedAt")
        )
    except (KeyError, TypeError, ValueError):
        return {}
    return {
        "image_seconds": round(pulled - started, 3),
        "container_seconds": round(max(0.0, began - pulled), 3),
    }
