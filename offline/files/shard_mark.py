"""Mark of a finished shard: a small file next to its rows, which shows that they are complete.

A killed run leaves the first rows of its shard, which look complete. Therefore a run removes an old
mark first, and writes the new one last, when its rows are on disk.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, Self

from .durable_json import save_json
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

    `num_errors` of them are errors. `output_bytes` and `error_bytes` are the final sizes of both
    files; `error_bytes` is None without an error file. `digests` are the hashes of both files, None
    in marks from older versions. `made_with` are the settings of the rows, as in `RowSettings`.
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
        """Read a mark; raises ValueError for any other file."""
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
            raise ValueError(f"{path} is not a shard's mark") from exc

    def save(self, path: Path) -> None:
        """Write the mark atomically."""
        save_json(path, asdict(self))


def mark_finished(
    output: Path,
    errors: Path | None,
    lines: ShardLines,
    *,
    num_rows: int,
    num_errors: int,
    made_with: Sequence[Mapping[str, Any]],
) -> None:
    """Flush the rows of a complete shard to disk, then write its mark."""
    paths = [output] if errors is None else [output, errors]
    num_bytes, digests = zip(*map(_sync, paths), strict=True)
    error_bytes = None if errors is None else num_bytes[1]
    mark = ShardMark(lines, num_rows, num_errors, num_bytes[0], error_bytes, made_with, digests)
    mark.save(mark_path(output))


def new_digest() -> blake2b:
    """Return a new hash, as used for the digests in a mark."""
    return blake2b(digest_size=_DIGEST_BYTES)


def _sync(path: Path) -> tuple[int, str]:
    """Flush a file to disk and return its size and digest; a missing file has size 0."""
    digest = new_digest()
    try:
        with path.open("rb", buffering=0) as file:
            os.fsync(file.fileno())
            while data := file.read(_READ_BYTES):
                digest.update(data)
            return file.tell(), digest.hexdigest()
    except FileNotFoundError:
        return 0, digest.hexdigest()
