"""Mark of a finished shard: a small file beside its rows, by which a join knows them to be whole.

A killed run leaves the first rows of its shard, which look like all of them. So the last thing that
a run does is to write the mark, once its rows are on the disk; the first is to remove an old one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

from .shard import Boundary, Shard, ShardLines

SUFFIX: Final = ".done"


def mark_path(output: Path) -> Path:
    """Return the path of the mark of a shard's output."""
    target = Path(os.path.realpath(output))
    return target.with_name(target.name + SUFFIX)


@dataclass(frozen=True, slots=True)
class ShardMark:
    """Mark of a shard whose lines all have a row.

    `num_errors` of them are errors. `error_bytes` is None where the run had no error file; else,
    together with `output_bytes`, what both files held at its end. `made_with` are the settings of
    the rows, as `RowSettings` lists them.
    """

    lines: ShardLines
    num_rows: int
    num_errors: int
    output_bytes: int
    error_bytes: int | None = None
    made_with: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a mark; raises ValueError for a file that is none."""
        try:
            fields = json.loads(path.read_bytes())
            lines = fields.pop("lines")
            return cls(
                ShardLines(
                    Shard(**lines["shard"]),
                    lines["num_bytes"],
                    Boundary(**lines["first"]),
                    Boundary(**lines["end"]),
                ),
                **fields,
            )
        except (KeyError, TypeError, AttributeError) as exc:
            raise ValueError(f"{path} is no mark of a shard") from exc

    def save(self, path: Path) -> None:
        """Write the mark, so that it is there as a whole or not at all."""
        growing = path.with_name(path.name + ".new")
        with growing.open("w", encoding="utf-8") as file:
            json.dump(asdict(self), file, default=str)
            file.flush()
            os.fsync(file.fileno())
        growing.replace(path)


def mark_finished(
    output: Path,
    errors: Path | None,
    lines: ShardLines,
    *,
    num_rows: int,
    num_errors: int,
    made_with: Sequence[Mapping[str, Any]],
) -> None:
    """Leave the mark of a shard whose rows are all written, in this order."""
    num_bytes = [0 if path is None else _sync(path) for path in (output, errors)]
    error_bytes = None if errors is None else num_bytes[1]
    mark = ShardMark(lines, num_rows, num_errors, num_bytes[0], error_bytes, made_with)
    mark.save(mark_path(output))


def _sync(path: Path) -> int:
    """Write a file to the disk and return its bytes, 0 where there is none."""
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0
