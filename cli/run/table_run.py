"""Table run: rows of results lie in a file beside the output until all of them make a table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from ..console.errors import Refused
from ..console.terminal import log
from ..files.paths import check_paths
from ..files.table_input import TableInput
from ..files.table_output import write_table
from .run_options import RunOptions

ROWS_SUFFIX: Final = ".rows.jsonl"


def with_rows_file(options: RunOptions) -> RunOptions | None:
    """Return the options of the run of a table's rows; None where the output is complete.

    Raises Refused for an output that cannot work, or is there already.
    """
    assert options.table is not None
    target = options.table.output
    rows = rows_path(target)
    check_paths(options.input_file, str(target), options.error_file, is_table=True)
    if options.error_file is not None:
        raise Refused("a table has no error file: failed rows say why in its column `error`")
    if not options.resume:
        if target.exists() and not options.force:
            raise Refused(f"{target} is there already: name another file, or --force replaces it")
    elif target.exists() and not rows.exists():
        log(f"{target} is complete: nothing to run")
        return None
    return replace(options, output_file=str(rows))


def finish_table(options: RunOptions, table: TableInput, *, has_failed: bool) -> None:
    """Write the table, and remove the rows that it was made of unless some can be tried again."""
    assert options.table is not None
    rows = Path(options.output_file)
    write_table(table, rows, options.table.output, options.table.output_format)
    if has_failed:
        log(f"the rows are kept in {rows}: --resume --retry-failed runs the failed ones again")
    else:
        rows.unlink()


def rows_path(target: Path) -> Path:
    """Return the path of the rows of an output."""
    return target.with_name(target.name + ROWS_SUFFIX)
