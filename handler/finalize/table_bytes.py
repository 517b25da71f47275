"""Bytes of a batch's table, built from its input and its rows, which are read as streams."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import chain
from typing import IO, TYPE_CHECKING, Any, cast

from tidemill.batch.file.formats import stream_of
from tidemill.batch.file.lines import RawLine, read_lines
from tidemill.batch.model import Batch, Source
from tidemill.batch.table.reader import open_table, read_rows
from tidemill.batch.table.recipe import parse_recipe
from tidemill.batch.table.result_columns import ResultColumns, ResultFacts, kept_columns
from tidemill.batch.table.result_rows import finished_columns, in_order, output_batches
from tidemill.batch.table.writer import open_writer

from ..aws.objects.object_file import open_object
from ..aws.objects.stream import LineStream, ObjectStream
from ..aws.sync import Aws
from ..deployment import Deployment
from ..inputs.request_lines import requests_of
from ..inputs.row_sources import open_rows

if TYPE_CHECKING:
    from typing_extensions import Buffer


def table_bytes(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    sources: Sequence[Source],
    *,
    note: Callable[[Mapping[str, Any]], object],
    look: Callable[[], None],
) -> Iterator[bytes]:
    """Yield the bytes of a batch's table with the rows in `sources`; pieces may be empty.

    At the end, `note` gets the distribution of the answers to each question. `look` is called
    often; its exceptions propagate.

    Raises NotThere and ObjectChanged if the input or the rows are gone.
    """
    sink = _Sink()
    assert batch.conversion is not None
    assert batch.conversion.recipe is not None
    recipe = parse_recipe(json.loads(batch.conversion.recipe), may_escalate=True)
    if batch.escalation is not None:
        recipe = replace(recipe.uncalibrated, has_models=True)
    with ExitStack() as stack:

        def lines() -> Iterator[RawLine]:
            if batch.is_terminal:  # the work of a retried batch is deleted
                return read_lines(stream_of(requests_of(aws, deployment, batch)))
            stream = stack.enter_context(closing(ObjectStream(aws, batch.source)))
            return read_lines(LineStream(stream, look=look))

        def rows() -> list[Iterator[bytes]]:
            return open_rows(aws, stack, sources, look)

        table = open_table(stack.enter_context(open_object(aws, batch.input)))
        kept = kept_columns(recipe, table.schema)
        facts = ResultFacts.of_rows(
            chain.from_iterable(rows()), recipe, labels_spans=batch.engine.labels_spans
        )

        def read(columns: ResultColumns) -> Iterator[Any]:
            found = in_order(lines(), rows())
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
