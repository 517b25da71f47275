"""Bytes of a batch's table, built from its input and its rows, which are read as streams."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, cast

from tidemill.batch.file.lines import read_lines
from tidemill.batch.model import Source
from tidemill.batch.result_kinds import KINDS
from tidemill.batch.table.reader import open_table, read_rows
from tidemill.batch.table.recipe import parse_recipe
from tidemill.batch.table.result_columns import ResultColumns, ResultFacts, kept_columns
from tidemill.batch.table.result_rows import finished_columns, in_order, output_batches
from tidemill.batch.table.writer import open_writer

from ..aws.objects.object_file import open_object
from ..aws.objects.stream import LineStream, ObjectStream
from ..errors import NotThere
from ..lifecycle.batch_lock import BatchLock

if TYPE_CHECKING:
    from typing_extensions import Buffer


def table_bytes(lock: BatchLock, note: Callable[[Mapping[str, Any]], object]) -> Iterator[bytes]:
    """Yield the bytes of the table; pieces may be empty.

    At the end, `note` gets the distribution of the answers to each question.

    Raises NotThere and ObjectChanged if the input or the rows are gone.
    """
    batch, aws, sink = lock.batch, lock.aws, _Sink()
    assert batch.conversion is not None
    assert batch.conversion.recipe is not None
    recipe = parse_recipe(json.loads(batch.conversion.recipe), may_escalate=True)
    recipe = replace(recipe, has_models=batch.escalation is not None)
    sources = _row_sources(lock)
    with ExitStack() as stack:

        def lines_of(source: Source) -> LineStream:
            stream = stack.enter_context(closing(ObjectStream(aws, source)))
            return LineStream(stream, look=lock.check_deadline)

        def rows() -> Sequence[Iterator[bytes]]:
            return [iter(partial(lines_of(each).readline, sys.maxsize), b"") for each in sources]

        table = open_table(stack.enter_context(open_object(aws, batch.input)))
        kept = kept_columns(recipe, table.schema)
        facts = ResultFacts.of_rows(chain.from_iterable(rows()), recipe)

        def read(columns: ResultColumns) -> Iterator[Any]:
            found = in_order(read_lines(lines_of(batch.source)), rows())
            return output_batches(columns, read_rows(table, kept.names), found)

        columns = finished_columns(recipe, kept, facts, read)
        writer = open_writer(cast("IO[bytes]", sink), columns.schema, recipe.output or table.format)
        for output in read(columns):
            writer.write(output)
            yield sink.take()
        writer.close()
        for summary in columns.summaries(is_brief=True):
            note(summary)
        yield sink.take()


def _row_sources(lock: BatchLock) -> list[Source]:
    """Return the published objects of rows, pinned."""
    batch, bucket, sources = lock.batch, lock.deployment.bucket, []
    for kind in KINDS:
        file_id = kind.field(batch, "file_id")
        file = lock.aws.run(lock.deployment.files.get_file(file_id)) if file_id else None
        if file is None:
            continue
        found = lock.aws.run(bucket.head(file.key, file.version_id))
        if found is None:
            raise NotThere(f"s3 head_object {file.key}")
        etag, num_bytes = found["ETag"], found["ContentLength"]
        sources.append(Source(bucket.name, file.key, etag, num_bytes, file.version_id))
    return sources


class _Sink(io.RawIOBase):
    """Buffers written bytes until they are taken."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer, /) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        return len(piece)

    def take(self) -> bytes:
        """Return the bytes written since the last call."""
        taken, self._pieces = b"".join(self._pieces), []
        return taken
