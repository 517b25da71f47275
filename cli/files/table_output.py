"""Table output: rows of results beside the kept columns of their table, as one file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import pyarrow as pa

from tidemill.batch.table.recipe import TableFormat
from tidemill.batch.table.result_columns import ResultColumns, ResultFacts
from tidemill.batch.table.writer import open_writer

from ..console.errors import OutputLost
from .table_input import TableInput

GROWING: Final = ".growing"
_MAX_BATCH_BYTES = 2**24
_BUFFER_BYTES = 2**20


def write_table(table: TableInput, rows: Path, target: Path, form: TableFormat) -> None:
    """Write the table of all rows in a file of rows; `target` is replaced once it is whole.

    Raises OutputLost where the disk takes no more.
    """
    with rows.open("rb", buffering=_BUFFER_BYTES) as file:
        columns = ResultColumns(table.recipe, table.kept, ResultFacts.of_rows(file, table.recipe))
        file.seek(0)
        growing = target.with_name(target.name + GROWING)
        try:
            with growing.open("wb", buffering=_BUFFER_BYTES) as out:
                writer = open_writer(out, columns.schema, form)
                for batch in table.batches(table.kept.names):
                    for kept_rows, results in _with_rows(batch, file):
                        kept = [kept_rows.column(name) for name in table.kept.names]
                        writer.write(columns.batch(kept, results))
                writer.close()
                out.flush()
                os.fsync(out.fileno())
            growing.replace(target)
        except OSError as exc:
            raise OutputLost(f"{target} cannot be written ({exc.strerror})") from exc
        finally:
            growing.unlink(missing_ok=True)


def _with_rows(
    batch: pa.RecordBatch, file: Iterator[bytes]
) -> Iterator[tuple[pa.RecordBatch, list[bytes]]]:
    """Yield slices of a batch with their rows, of a bounded size."""
    start = 0
    while start < batch.num_rows:
        rows, size = [], 0
        for row in islice(file, batch.num_rows - start):
            rows.append(row)
            if (size := size + len(row)) >= _MAX_BATCH_BYTES:
                break
        assert rows, "the rows are fewer than those of the table"
        yield batch.slice(start, len(rows)), rows
        start += len(rows)
