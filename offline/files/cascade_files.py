"""Files of a cascade, in a folder next to its output until all rows are decided.

The rows of each model are in a separate file, so that each model's run resumes as any other
run does; the output is written from both. The folder stays if rows failed, for a retry.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..console.errors import BadInput
from .durable_json import save_json
from .paths import spool_path

SUFFIX: Final = ".cascade"


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows that are escalated: those with a confidence lower than `threshold`.

    It is None if all rows are. `gold` has the fields of the `Threshold` that was found on gold
    rows, None for a given one.
    """

    threshold: float | None
    num_rows: int
    num_escalated: int
    gold: Mapping[str, Any] | None = None

    @property
    def num_rows_by_model(self) -> tuple[int, int]:
        """Return how many rows the first and the second model have."""
        return self.num_rows, self.num_escalated


@dataclass(frozen=True, slots=True)
class CascadeFiles:
    """The folder of a cascade."""

    folder: Path

    @classmethod
    def of(cls, output: Path) -> CascadeFiles:
        """Return the files of an output."""
        return cls(output.with_name(output.name + SUFFIX))

    @property
    def first(self) -> Path:
        """Return the file with the first model's rows, for all requests."""
        return self.folder / "first.jsonl"

    @property
    def requests(self) -> Path:
        """Return the file with the escalated requests."""
        return self.folder / "escalated.jsonl"

    @property
    def second(self) -> Path:
        """Return the file with the second model's rows, for the escalated requests."""
        return self.folder / "second.jsonl"

    @property
    def merged(self) -> Path:
        """Return the file with one row for each request, from which a table is written."""
        return self.folder / "merged.jsonl"

    @property
    def has_rows(self) -> bool:
        """Return whether a stopped run has finished rows, or rows failed."""
        return self.first.exists() or spool_path(self.first).exists()

    @property
    def _record(self) -> Path:
        return self.folder / "cascade.json"

    def save(self, settings: Mapping[str, Any], selection: Selection | None) -> None:
        """Write the settings and the selection atomically, and create the folder."""
        self.folder.mkdir(exist_ok=True)
        selected = None if selection is None else asdict(selection)
        save_json(self._record, {"settings": {**settings}, "selection": selected})

    def load(self) -> tuple[Mapping[str, Any], Selection | None]:
        """Return the settings, and the selection once it is made; raises BadInput."""
        try:
            found = json.loads(self._record.read_bytes())
            selected = found["selection"]
            return found["settings"], None if selected is None else Selection(**selected)
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise BadInput(
                f"{self._record} cannot be read: start over with --force without --resume"
            ) from exc

    def remove_if_empty(self) -> None:
        """Remove the folder unless it has rows."""
        if not self.has_rows:
            self.remove()

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
