"""Files for a table's fetched rows, from which the table is then written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from tidemill.offline.console.errors import Refused
from tidemill.offline.files.table_options import ECHO_OF_TABLE, TableOptions

ROWS_SUFFIX: Final = ".rows.jsonl"
ERRORS_SUFFIX: Final = ".errors.jsonl"


def fetched_files(output: Path) -> tuple[str, str]:
    """Return the files that store a table's successful and failed rows until it is written."""
    return f"{output}{ROWS_SUFFIX}", f"{output}{ERRORS_SUFFIX}"


def name_fetched_rows(arguments: argparse.Namespace, table: TableOptions) -> None:
    """Set the files for a table's rows; raises Refused if the table exists."""
    if arguments.echo_fields:
        raise Refused(ECHO_OF_TABLE)
    if not arguments.wait:
        if arguments.output_file:
            raise Refused("-o requires --wait, which writes the table")
        return
    if arguments.error_file:
        raise Refused(
            "-e is not supported for tables: the column `error` contains the error of a failed row"
        )
    if table.output.exists() and not arguments.force:
        raise Refused(f"{table.output} already exists: choose another file, or pass --force")
    arguments.output_file, arguments.error_file = fetched_files(table.output)
