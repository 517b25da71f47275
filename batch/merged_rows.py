"""Row index of a batch whose rows were merged with those of a retry: one object per shard."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from .errors import BadPart
from .model import Batch, Shard
from .object_keys import shard_prefix
from .result_kinds import KINDS, ResultKind

_Count = Annotated[int, Field(ge=0)]


class RowRun(NamedTuple):
    """Neighbouring rows in a file: the first byte, and the line and the size of each."""

    start: _Count
    rows: list[tuple[_Count, _Count]]


class MergedIndex(BaseModel):
    """The rows of one shard's lines in the output file and in the error file."""

    model_config = ConfigDict(strict=True)

    format: Literal[1] = 1
    output: RowRun
    errors: RowRun


def merged_key(batch: Batch, shard: int) -> str:
    """Return the key of the index of a shard's rows in the present files of a merged batch."""
    file_id = batch.output_file_id or batch.error_file_id
    return f"{shard_prefix(batch.id, shard)}merged-{file_id}"


def merged_indexes(
    shards: Sequence[Shard], rows: Mapping[ResultKind, tuple[Sequence[int], Sequence[int]]]
) -> Iterator[tuple[int, bytes]]:
    """Yield the number and the index of each shard, from lines and sizes of all rows by kind."""
    places, starts = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0)
    followers = [shard.first_line for shard in shards[1:]]
    for shard, stop in zip(shards, [*followers, None], strict=True):
        runs: dict[str, RowRun] = {}
        for kind in KINDS:
            lines, sizes = rows[kind]
            place, end = places[kind], len(lines) if stop is None else bisect_left(lines, stop)
            own = [*zip(lines[place:end], sizes[place:end], strict=True)]
            runs[kind.segments] = RowRun(starts[kind], own)
            starts[kind] += sum(size for _, size in own)
            places[kind] = end
        yield shard.number, to_json(MergedIndex(output=runs["output"], errors=runs["errors"]))


def decode_merged_index(data: bytes) -> MergedIndex:
    """Parse an index; raises BadPart for other bytes."""
    try:
        return MergedIndex.model_validate_json(data)
    except ValidationError as exc:
        raise BadPart(f"not a valid index of rows: {exc.errors()[0]['msg']}") from exc
