"""Bytes of a batch's table, built from its input and its rows, which are read as streams."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, cast

from tidemill.batch.file.formats import stream_of
from tidemill.batch.file.lines import RawLine, read_lines
from tidemill.batch.file.row_order import rows_of_lines
from tidemill.batch.table.reader import open_table, read_rows
from tidemill.batch.table.recipe import parse_recipe
from tidemill.batch.table.result_columns import ResultColumns, ResultFacts, kept_columns
from tidemill.batch.table.result_rows import finished_columns, in_order, output_batches
from tidemill.batch.table.writer import open_writer

from ..aws.objects.object_file import open_object
from ..aws.objects.stream import LineStream, ObjectStream
from ..inputs.request_lines import batches_with_rows, requests_of
from ..inputs.row_sources import open_rows, row_sources
from ..lifecycle.batch_lock import BatchLock

if TYPE_CHECKING:
    from typing_extensions import Buffer

_Runs = list[list[Iterator[bytes]]]


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
    with ExitStack() as stack:
        lines, rows = _lines_and_rows(lock, stack)
        table = open_table(stack.enter_context(open_object(aws, batch.input)))
        kept = kept_columns(recipe, table.schema)
        facts = ResultFacts.of_rows(chain.from_iterable(chain.from_iterable(rows())), recipe)

        def read(columns: ResultColumns) -> Iterator[Any]:
            found = in_order(lines(), *rows())
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


def merged_rows(lock: BatchLock) -> Iterator[bytes]:
    """Yield the rows of the first batch that was retried, with the retried rows in their places.

    Pieces may be empty. Raises NotThere and ObjectChanged if an input or rows are gone.
    """
    with ExitStack() as stack:
        lines, rows = _lines_and_rows(lock, stack)
        for _, row in rows_of_lines(lines(), rows()):
            yield row or b""


def _lines_and_rows(
    lock: BatchLock, stack: ExitStack
) -> tuple[Callable[[], Iterator[RawLine]], Callable[[], _Runs]]:
    """Return functions that open the lines of the whole input, and the rows of each batch."""
    aws, deployment, batch = lock.aws, lock.deployment, lock.batch
    batches = batches_with_rows(aws, deployment, batch)
    sources = [aws.run(row_sources(deployment, each)) for each in batches]

    def requests() -> Iterator[bytes]:
        recipe = None if batch.conversion is None else batch.conversion.recipe
        for piece in requests_of(aws, deployment, batches[-1], recipe):
            lock.check_deadline()
            yield piece

    def lines() -> Iterator[RawLine]:
        if batch.retry is not None:  # the lines of its own are a part of them
            return read_lines(stream_of(requests()))
        stream = stack.enter_context(closing(ObjectStream(aws, batch.source)))
        return read_lines(LineStream(stream, look=lock.check_deadline))

    def rows() -> _Runs:
        return [open_rows(aws, stack, each, lock.check_deadline) for each in sources]

    return lines, rows


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
