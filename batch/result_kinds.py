"""The two results of a batch, output and errors: which fields, objects and segments are whose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from .model import Batch, Shard
from .object_keys import result_file_id, segment_key


class SealedSegment(NamedTuple):
    """One object of rows that stay as they are."""

    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ResultKind:
    """`name` begins the names of a batch's fields, `segments` the keys of its segments."""

    name: Literal["output", "error"]
    segments: Literal["output", "errors"]

    def key_of(self, batch: Batch) -> str:
        """Return the key of the object that the batch's rows of this kind become."""
        key: str = getattr(batch.outputs, f"{self.name}_key")
        return key

    def url_of(self, batch: Batch) -> str | None:
        """Return where the client wants the object to be put, if anywhere."""
        url: str | None = getattr(batch.options, f"{self.name}_url")
        return url

    def file_id_of(self, batch: Batch) -> str:
        """Return the id under which clients find the object."""
        return result_file_id(batch.id, self.name)

    def field(self, batch: Batch, name: str) -> Any:
        """Return the field of the batch that has this name behind the kind's own."""
        return getattr(batch, f"{self.name}_{name}")

    def fields(self, **values: object) -> dict[str, object]:
        """Return changes to such fields."""
        return {f"{self.name}_{name}": value for name, value in values.items()}

    def sizes_of(self, shard: Shard) -> tuple[int, ...]:
        """Return the bytes of each segment of this kind that the shard has."""
        return shard.output_sizes if self.name == "output" else shard.error_sizes

    def segments_of(self, shard: Shard) -> list[SealedSegment]:
        """Return the shard's segments of this kind in the order of lines."""
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
