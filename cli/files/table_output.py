"""Table output: rows of results beside the kept columns of their table, as one file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tidemill.batch.table.recipe import TableFormat
from tidemill.batch.table.result_columns import ResultColumns, ResultFacts
from tidemill.batch.table.result_rows import output_batches
from tidemill.batch.table.writer import open_writer

from ..console.errors import OutputLost
from .table_input import TableInput

GROWING: Final = ".growing"
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
                for batch in output_batches(columns, table.batches(table.kept.names), file):
                    writer.write(batch)
                writer.close()
                out.flush()
                os.fsync(out.fileno())
            growing.replace(target)
        except OSError as exc:
            raise OutputLost(f"{target} cannot be written ({exc.strerror})") from exc
        finally:
            growing.unlink(missing_ok=True)
