"""`tidemill check`: what a file holds, and what is wrong with it, before anything runs."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.offline.arguments.dataset_id import add_dataset_flags
from tidemill.offline.arguments.recipe_flags import add_recipe_flags, has_recipe
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import print_output
from tidemill.offline.files.table_options import table_options

from ..batches.batch_flags import file_of

if TYPE_CHECKING:
    from tidemill.offline.files.source import Source

_EPILOG = """\
examples:
  tidemill check requests.jsonl
  tidemill check reviews.parquet --prompt 'Label this review: {{ text }}'
  tidemill check requests.output.jsonl

exit status:
  0  it can be run; of an output, every row is ok and no answer was cut off
  1  it cannot, or only in part: what is wrong is said, with lines or rows
  2  arguments or paths that cannot work
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `check` to the command line."""
    parser = commands.add_parser(
        "check",
        help="check a batch file, a table and its recipe, or an output",
        description="Reads a file of requests as a deployment would, or makes requests of a table, "
        "compiles each\nschema, regex and grammar once, and says what is wrong. Of a table the "
        "first three requests are\nprinted. Of an output it counts the rows that are ok, truncated "
        "and failed. No model is loaded,\nand no server is asked.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="a path, - or an http(s) URL; of a table a folder, too")
    add(
        "--on-invalid-line",
        choices=("fail", "skip"),
        default="fail",
        help="as of `run` and `submit` (default: fail)",
    )
    add("--strict-parameters", action="store_true", help="refuse unknown parameters")
    add("--json", action="store_true", help="print one JSON object")
    add("--output-tmp-dir", type=Path, metavar="FOLDER", help="for temporary files")
    add_recipe_flags(parser)
    add_dataset_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Check the file and return the exit status."""
    file = file_of(arguments, is_table=has_recipe(arguments, arguments.file))
    # Late imports: JSON libraries would slow down `--help`.
    from ..batches.opened_input import open_batch_input, print_first_requests
    from ..batches.submission import dry_run

    table = table_options(arguments, file, None, is_written=False)
    fields = {
        "on_invalid_line": arguments.on_invalid_line,
        "strict_parameters": arguments.strict_parameters,
    }
    with StopSignals(), open_batch_input(file, table, arguments.output_tmp_dir) as (source, rows):
        if table is None and (status := _check_output(source, arguments)) is not None:
            return status
        report = dry_run(None, source, fields, as_json=arguments.json, is_for_run=True)
        if rows is not None and not arguments.json:
            print_first_requests(rows)
        return int(report.failing.count > 0)


def _check_output(source: Source, arguments: argparse.Namespace) -> int | None:
    """Print the counts of an output and return the exit status; None for another file."""
    from tidemill.offline.rows.output_check import check_output, output_rows

    from ..batches.outcome import print_json

    with output_rows(source, arguments.output_tmp_dir) as rows:
        if rows is None:
            return None
        report = check_output(rows)
    if arguments.json:
        print_json(report.fields())
    else:
        print_output("\n".join(report.sentences()))
    return 0 if report.is_good else 1
