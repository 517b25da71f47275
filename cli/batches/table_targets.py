"""Targets of a table's rows, which are fetched before the table is made of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from tidemill.offline.console.errors import Refused
from tidemill.offline.files.table_options import TableOptions

ROWS_SUFFIX: Final = ".rows.jsonl"
ERRORS_SUFFIX: Final = ".errors.jsonl"


def fetched_files(output: Path) -> tuple[str, str]:
    """Return where good and other rows of a table lie until it is made."""
    return f"{output}{ROWS_SUFFIX}", f"{output}{ERRORS_SUFFIX}"


def name_fetched_rows(arguments: argparse.Namespace, table: TableOptions) -> None:
    """Name the files of rows that the table is made of; raises Refused where it is there."""
    if not arguments.wait:
        if arguments.output_file:
            raise Refused("-o is for the table that --wait makes: give it too")
        return
    if arguments.error_file:
        raise Refused("a table has no error file: failed rows say why in its column `error`")
    if table.output.exists() and not arguments.force:
        raise Refused(f"{table.output} is there already: name another file, or give --force")
    arguments.output_file, arguments.error_file = fetched_files(table.output)
