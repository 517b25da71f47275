"""Requests of a batch's input as JSONL: decoded, rendered from a table, or selected by a retry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

from tidemill.batch.file.formats import FileFormat, as_lines, stream_of
from tidemill.batch.file.lines import read_lines
from tidemill.batch.model import Batch, Source
from tidemill.batch.retry import NothingToRetry, RetryLines

from ..aws.objects.stream import CHUNK_BYTES, ObjectStream
from ..aws.sync import Aws
from ..deployment import Deployment
from ..errors import NotThere
from .row_sources import open_rows, row_sources


def requests_of(
    aws: Aws, deployment: Deployment, batch: Batch, recipe: str | None = None
) -> Iterator[bytes]:
    """Yield the requests of a batch as JSONL, in pieces that may be empty.

    A table is rendered by `recipe`, or else by the batch's own one. Raises NotThere, ObjectChanged,
    FormatError, TableError, RecipeError, and NothingToRetry.
    """
    conversion = batch.conversion
    recipe = recipe or (None if conversion is None else conversion.recipe)
    if batch.retry is None:
        form = FileFormat() if conversion is None else conversion.form
        yield from _decoded(aws, batch.input, form, recipe)
        return
    old = retried_batch(aws, deployment, batch)
    second = old.escalation if batch.escalation is None else None
    selection = RetryLines(batch.retry, old, second)
    is_empty = True
    with ExitStack() as stack:
        files = open_rows(aws, stack, aws.run(row_sources(deployment, old, selection.kinds)))
        lines = read_lines(stream_of(requests_of(aws, deployment, old, recipe)))
        for piece in selection.select(lines, files):
            is_empty = is_empty and not piece
            yield piece
    if is_empty:
        raise NothingToRetry(selection.counts.reason)


def retried_batch(aws: Aws, deployment: Deployment, batch: Batch) -> Batch:
    """Return the batch whose requests a batch retries; raises NotThere once it was erased."""
    assert batch.retry is not None
    old = aws.run(deployment.table.get_batch(batch.retry.of))
    if old is None or old.erasing_at is not None:
        raise NotThere(f"batch {batch.retry.of}")
    return old


def _decoded(aws: Aws, source: Source, form: FileFormat, recipe: str | None) -> Iterator[bytes]:
    if recipe is not None:
        # Imported late: libraries for tables load slowly, and only the intake Lambda has them.
        from .table_lines import table_lines

        yield from table_lines(aws, source, recipe)
        return
    with closing(ObjectStream(aws, source)) as stream:
        yield from as_lines(form, iter(lambda: stream.read(CHUNK_BYTES), b""))
