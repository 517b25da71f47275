"""Table run: rows are stored in a file next to the output until all of them form a table."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from ..console.errors import Refused
from ..console.terminal import log
from ..files.paths import check_paths
from ..files.recorded_run import ROWS_SUFFIX
from ..files.row_settings import Settings
from ..files.table_input import TableInput
from ..files.table_output import write_table
from .run_options import RunOptions
from .run_settings import has_span_labels
from .tally import Tally


def with_rows_file(options: RunOptions) -> RunOptions | None:
    """Return the options for running a table's rows; None if the output is complete.

    Raises Refused for an output that is not valid, or already exists.
    """
    assert options.table is not None
    target = options.table.output
    rows = rows_path(target)
    check_paths(options.input_file, str(target), options.error_file, is_table=True)
    if options.error_file is not None:
        raise Refused(
            "-e is not supported for tables: the column `error` contains the error of a failed row"
        )
    if not options.resume:
        if target.exists() and not options.force:
            again = ""
            if rows.exists():
                truncated = "truncated ones, too: --retry-truncated"
                again = f"rerun its failed rows with `{_retry(target)}` ({truncated}), "
            raise Refused(
                f"{target} already exists: {again}choose another file, or pass --force to "
                "overwrite it"
            )
    elif target.exists() and not rows.exists():
        return None
    if options.shard is not None:
        rows = Path(options.shard.path(str(rows)))
    return replace(options, output_file=str(rows))


def finish_table(
    options: RunOptions, table: TableInput, tally: Tally, settings: Settings | None
) -> None:
    """Write the table, and remove the file of its rows unless some failed or were truncated.

    `settings` are those of the rows, for a calibration and the column of a token classifier.
    The rows of a shard stay: the table is written from all shards, once they are joined.
    """
    assert options.table is not None
    rows = Path(options.output_file)
    if options.shard is not None:
        whole = rows_path(options.table.output)
        log(
            f"the shard's rows are in {rows}: join all shards with `tidemill join {whole}`, then "
            "run this command with --resume and without --shard to write the table"
        )
        return
    target, form = options.table.output, options.table.output_format
    columns = write_table(table, rows, target, form, labels_spans=has_span_labels(settings))
    if columns.calibration is not None:
        from ..files.calibration_file import write_plot  # late: few runs have one

        columns.calibration = write_plot(columns.calibration, target)
    tally.questions = columns.summaries()
    plan = table.recipe.calibration
    if columns.calibration is not None and plan is not None and plan.saved is None:
        from .calibration_check import save_calibration  # late: few runs have one

        log(f"the calibration is {save_calibration(columns.calibration, settings, target)}")
    again = _retry(options.table.output)
    if tally.rows_failed:
        way = "--resume --retry-failed" if options.no_card else f"`{again}`"
        log(f"to rerun the failed rows: {way} (the finished ones are in {rows})")
    if tally.truncated:
        way = "--resume" if options.no_card else again
        log(f"to rerun the truncated rows: `{way} --retry-truncated --max-tokens N`")
    if not (tally.rows_failed or tally.truncated):
        rows.unlink()


def _retry(target: Path) -> str:
    return shlex.join(["tidemill", "retry", str(target)])


def rows_path(target: Path) -> Path:
    """Return the path of an output's rows."""
    return target.with_name(target.name + ROWS_SUFFIX)
