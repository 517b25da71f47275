"""Mark of a finished shard: a small file beside its rows, by which a join knows them to be whole.

A killed run leaves the first rows of its shard, which look like all of them. So the last thing that
a run does is to write the mark, once its rows are on the disk; the first is to remove an old one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

from .shard import Boundary, Shard, ShardLines

SUFFIX: Final = ".done"
_DIGEST_BYTES: Final = 16
_READ_BYTES: Final = 2**20


def mark_path(output: Path) -> Path:
    """Return the path of the mark of a shard's output."""
    target = Path(os.path.realpath(output))
    return target.with_name(target.name + SUFFIX)


@dataclass(frozen=True, slots=True)
class ShardMark:
    """Mark of a shard whose lines all have a row.

    `num_errors` of them are errors. `error_bytes` is None where the run had no error file; else,
    together with `output_bytes`, what both files held at its end. `digests` are the hashes of both
    files, None in a mark of an older version. `made_with` are the settings of the rows, as
    `RowSettings` lists them.
    """

    lines: ShardLines
    num_rows: int
    num_errors: int
    output_bytes: int
    error_bytes: int | None = None
    made_with: Sequence[Mapping[str, Any]] = ()
    digests: Sequence[str] | None = None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a mark; raises ValueError for a file that is none."""
        try:
            fields = json.loads(path.read_bytes())
            lines = fields.pop("lines")
            digests = fields.pop("digests", None)
            return cls(
                ShardLines(
                    Shard(**lines["shard"]),
                    lines["num_bytes"],
                    Boundary(**lines["first"]),
                    Boundary(**lines["end"]),
                ),
                **fields,
                digests=None if digests is None else tuple(digests),
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
    paths = [output] if errors is None else [output, errors]
    num_bytes, digests = zip(*map(_sync, paths), strict=True)
    error_bytes = None if errors is None else num_bytes[1]
    mark = ShardMark(lines, num_rows, num_errors, num_bytes[0], error_bytes, made_with, digests)
    mark.save(mark_path(output))


def new_digest() -> blake2b:
    """Return the hash of a file's bytes that is in its mark."""
    return blake2b(digest_size=_DIGEST_BYTES)


def _sync(path: Path) -> tuple[int, str]:
    """Write a file to the disk and return its bytes and their digest; no bytes without a file."""
    digest = new_digest()
    try:
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            while data := file.read(_READ_BYTES):
                digest.update(data)
            return file.tell(), digest.hexdigest()
    except FileNotFoundError:
        return 0, digest.hexdigest()
