"""Results of `bench.gpu.gpu`: one folder, one JSON line per task, valid at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The result of a part, in addition to those of its tasks.
WHOLE = "(part)"

Records = dict[str, dict[str, Any]]


class Results:
    """Records of tasks by part and name; several processes may append to them at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "results.jsonl"

    def open(self) -> None:
        """Create the folder, and end an incomplete line."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
            self._write(b"\n")

    def append(self, part: str, task: str, numbers: Mapping[str, Any]) -> None:
        """Append a record; it survives a later crash."""
        line = json.dumps({"part": part, "task": task, **numbers})
        self._write(line.encode() + b"\n")

    def read(self) -> dict[str, Records]:
        """Return the latest record of each task, and of parts as `WHOLE`; skip incomplete lines."""
        parts: dict[str, Records] = {}
        if not self._path.exists():
            return parts
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue
            parts.setdefault(record.pop("part"), {})[record.pop("task")] = record
        return parts

    def _write(self, text: bytes) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, text)
            os.fsync(file)
        finally:
            os.close(file)


def is_done(record: Mapping[str, Any] | None) -> bool:
    """Return whether a task need not be repeated."""
    return record is not None and "error" not in record


def is_complete(part: Records) -> bool:
    """Return whether a part has ended and none of its tasks failed."""
    return part.get(WHOLE, {}).get("status") == "done" and all(map(is_done, part.values()))
