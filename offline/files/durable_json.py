"""Durable JSON: a small file that is whole or absent, whenever the process ends."""

from __future__ import annotations

import json
import os
from pathlib import Path


def save_json(path: Path, value: object) -> None:
    """Write a value as JSON atomically, and to disk (fsync); raises OSError."""
    growing = path.with_name(path.name + ".new")
    with growing.open("w", encoding="utf-8") as file:
        json.dump(value, file, default=str)  # a recipe of TOML may contain a date
        file.flush()
        os.fsync(file.fileno())
    growing.replace(path)
