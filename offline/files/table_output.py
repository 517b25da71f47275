"""Table output: results in columns next to the kept columns of their table, as one file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
from pyarrow import compute

from tidemill.batch.file.lines import FormatError
from tidemill.batch.table.errors import TableError
from tidemill.batch.table.question_counts import wording_fault
from tidemill.batch.table.reader import open_table
from tidemill.batch.table.recipe import TableFormat
from tidemill.batch.table.result_columns import PREFIX, ResultColumns, ResultFacts
from tidemill.batch.table.result_rows import finished_columns, output_batches
from tidemill.batch.table.writer import open_writer

from ..console.errors import OutputLost
from ..console.terminal import log
from .table_input import TableInput

GROWING: Final = ".growing"
_BUFFER_BYTES = 2**20


def count_failed_rows(target: Path, *, or_truncated: bool = False) -> int:
    """Return the number of failed rows of a result table: those with an error but no usage.

    Truncated rows have both. It is 0 for any other file.
    """
    try:
        with target.open("rb") as file:
            table = open_table(file)
            names = [_result_name(table.schema.names, name) for name in ("usage", "error")]
            found = [name for name in names if name is not None]
            if len(found) < len(names):
                return 0
            return sum(
                _count_failed(*batch.columns, or_truncated=or_truncated)
                for batch in table.batches(found)
            )
    except (OSError, TableError, FormatError):
        return 0


def _result_name(names: Sequence[str], name: str) -> str | None:
    """Return the column of a result, which has a prefix if a kept column has the same name."""
    return next((each for each in (PREFIX + name, name) if each in names), None)


def _count_failed(usage: pa.Array, error: pa.Array, *, or_truncated: bool) -> int:
    failed = compute.is_valid(error)
    if not or_truncated:
        failed = compute.and_(compute.is_null(usage), failed)
    return int(compute.sum(failed).as_py() or 0)


def write_table(
    table: TableInput, rows: Path, target: Path, form: TableFormat, *, labels_spans: bool = False
) -> ResultColumns:
    """Write the table of all rows in a file of rows; `target` is replaced when it is complete.

    A model that `labels_spans` is a token classifier.

    Returns its columns, with the counts of the answers and their calibration. Warns of questions
    with a wording fault, and logs the accuracy of a calibration. Raises OutputLost if the disk is
    full.
    """
    with rows.open("rb", buffering=_BUFFER_BYTES) as file:

        def read(columns: ResultColumns) -> Iterator[pa.RecordBatch]:
            file.seek(0)
            return output_batches(columns, table.batches(table.kept.names), file)

        facts = ResultFacts.of_rows(file, table.recipe, labels_spans=labels_spans)
        columns = finished_columns(table.recipe, table.kept, facts, read)
        growing = target.with_name(target.name + GROWING)
        try:
            with growing.open("wb", buffering=_BUFFER_BYTES) as out:
                writer = open_writer(out, columns.schema, form)
                for batch in read(columns):
                    writer.write(batch)
                writer.close()
                out.flush()
                os.fsync(out.fileno())
            growing.replace(target)
        except OSError as exc:
            raise OutputLost(f"{target} cannot be written ({exc.strerror})") from exc
        finally:
            growing.unlink(missing_ok=True)
    for fault in filter(None, map(wording_fault, columns.summaries())):
        log(f"warning: {fault}")
    if columns.calibration is not None:
        log("\n".join(columns.calibration.report_lines()))
    return columns
