"""`tidemill check`: check a file for errors, and print its contents, before anything runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tidemill.offline.arguments.dataset_id import add_dataset_flags
from tidemill.offline.arguments.parser import add_tmp_dir_flag
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
  0  the file can be run; for an output: every row succeeded and no answer was truncated
  1  the file cannot be run, or only in part; the errors are printed with their lines or rows
  2  invalid arguments or paths
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `check` to the command line."""
    parser = commands.add_parser(
        "check",
        help="check a batch file, a table and its recipe, or an output",
        description="Check a file of requests as a deployment would, or a table and its recipe,\n"
        "and print any errors. Each schema, regex and grammar is compiled once. For a table, the\n"
        "first three requests are printed. For an output, the successful, truncated and failed\n"
        "rows are counted. No model is loaded, and no server is contacted.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "file",
        metavar="FILE",
        help="check a path, - or an http(s) URL; a table may also be a folder",
    )
    add(
        "--on-invalid-line",
        choices=("fail", "skip"),
        default="fail",
        help="fail on invalid lines or skip them, as `run` and `submit` do (default: fail)",
    )
    add("--strict-parameters", action="store_true", help="reject unknown parameters")
    add("--json", action="store_true", help="print one JSON object")
    add_tmp_dir_flag(parser)
    add_recipe_flags(parser)
    add_dataset_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Check the file and return the exit status."""
    file = file_of(arguments, is_table=has_recipe(arguments, arguments.file))
    # Imported late: JSON libraries would slow down `--help`.
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
        report = dry_run(
            None,
            source,
            fields,
            as_json=arguments.json,
            is_for_run=True,
            has_warning=rows is not None and rows.has_constant_prompt,
        )
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
