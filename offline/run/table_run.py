"""Table run: rows of results lie in a file beside the output until all of them make a table."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from ..console.errors import Refused
from ..console.terminal import log
from ..files.paths import check_paths
from ..files.recorded_run import ROWS_SUFFIX
from ..files.table_input import TableInput
from ..files.table_output import write_table
from .run_options import RunOptions


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
        return None
    if options.shard is not None:
        rows = Path(options.shard.path(str(rows)))
    return replace(options, output_file=str(rows))


def finish_table(options: RunOptions, table: TableInput, *, has_failed: bool) -> None:
    """Write the table, and remove the rows that it was made of unless some can be tried again.

    Those of a shard stay: the table is made of all of them, once they are joined.
    """
    assert options.table is not None
    rows = Path(options.output_file)
    if options.shard is not None:
        whole = rows_path(options.table.output)
        log(
            f"the shard's rows are in {rows}: `tidemill join {whole}` joins those of all shards, "
            "then this command with --resume and no --shard makes the table"
        )
        return
    write_table(table, rows, options.table.output, options.table.output_format)
    if has_failed:
        again = shlex.join(["tidemill", "retry", str(options.table.output)])
        way = "--resume --retry-failed" if options.no_card else f"`{again}`"
        log(f"{way} runs the failed rows again, with the finished ones in {rows}")
    else:
        rows.unlink()


def rows_path(target: Path) -> Path:
    """Return the path of the rows of an output."""
    return target.with_name(target.name + ROWS_SUFFIX)
