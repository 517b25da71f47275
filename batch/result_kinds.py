"""The two kinds of results of a batch, output and errors: their fields, objects and segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .model import Batch, Shard
from .object_keys import result_file_id, segment_key


class SealedSegment(NamedTuple):
    """One sealed object of rows."""

    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ResultKind:
    """`name` is the prefix of the batch's fields, and `segments` of the keys of its segments."""

    name: Literal["output", "error"]
    segments: Literal["output", "errors"]

    def key_of(self, batch: Batch) -> str:
        """Return the key of the batch's result object of this kind."""
        key: str = getattr(batch.outputs, f"{self.name}_key")
        return key

    def url_of(self, batch: Batch) -> str | None:
        """Return the client's URL for the object, if any."""
        url: str | None = getattr(batch.options, f"{self.name}_url")
        return url

    def file_id_of(self, batch: Batch) -> str:
        """Return the object's file ID."""
        return result_file_id(batch.id, self.name)

    def field(self, batch: Batch, name: str) -> Any:
        """Return the field of the batch whose name is the kind's name and this suffix."""
        return getattr(batch, f"{self.name}_{name}")

    def fields(self, **values: object) -> dict[str, object]:
        """Return changes to such fields."""
        return {f"{self.name}_{name}": value for name, value in values.items()}

    def sizes_of(self, shard: Shard) -> tuple[int, ...]:
        """Return the size of each of the shard's segments of this kind."""
        return shard.output_sizes if self.name == "output" else shard.error_sizes

    def segments_of(self, shard: Shard) -> list[SealedSegment]:
        """Return the shard's segments of this kind in line order."""
        return [
            self.segment(shard.batch_id, shard.number, shard.fence, number, size)
            for number, size in enumerate(self.sizes_of(shard))
        ]

    def segment(
        self, batch_id: str, shard: int, fence: int, number: int, num_bytes: int
    ) -> SealedSegment:
        """Return the `number`th segment of this kind that was sealed under a fence."""
        return SealedSegment(segment_key(batch_id, shard, fence, self.segments, number), num_bytes)


OUTPUT = ResultKind("output", "output")
ERRORS = ResultKind("error", "errors")
KINDS = (OUTPUT, ERRORS)


def has_merged_rows(batch: Batch) -> bool:
    """Say whether the rows of a retry were merged into the results of a batch.

    Only its files contain them.
    """
    return any(kind.field(batch, "file_id") not in {None, kind.file_id_of(batch)} for kind in KINDS)
