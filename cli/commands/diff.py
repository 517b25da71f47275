"""`tidemill diff`: compares two outputs of rows, files or tables."""

from __future__ import annotations

import argparse
from functools import partial

from tidemill.offline.arguments.argument_types import positive_int
from tidemill.offline.arguments.parser import add_tmp_dir_flag
from tidemill.offline.console.errors import Refused
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import print_output
from tidemill.offline.files.paths import STANDARD_STREAM, check_input_path

_EPILOG = """\
examples:
  tidemill diff before.jsonl after.jsonl
  tidemill diff a.jsonl b.jsonl --exit-code > report.txt
  tidemill diff first.output.csv second.output.csv --id review_id

exit status:
  0  the files were compared; with --exit-code: and there are no differences
  1  an invalid input; with --exit-code: or there are differences
  2  invalid arguments or paths
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `diff` to the command line."""
    parser = commands.add_parser(
        "diff",
        help="compare two outputs of rows, or two tables of results",
        description="Compare the rows of two outputs by custom_id, in any order: missing rows,\n"
        "answers, their lengths, finish reasons and errors. An output may also be a table of\n"
        "results.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "a",
        metavar="A",
        help="compare a path, - or an http(s) URL of rows from Tidemill or OpenAI; or a table",
    )
    add("b", metavar="B", help="with another one")
    add(
        "-n",
        "--num-shown",
        type=positive_int,
        default=5,
        metavar="N",
        help="show up to N differing rows, and N custom_ids of each kind (default: 5)",
    )
    add(
        "--id",
        metavar="COLUMN",
        help="take tables' custom IDs from this column (default: custom_id, id, or the row number)",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--exit-code", action="store_true", help="exit with 1 if there are differences")
    add_tmp_dir_flag(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Print the comparison and return the exit status."""
    from tidemill.offline.console.progress_bar import byte_progress
    from tidemill.offline.rows.comparison import compare
    from tidemill.offline.rows.report import json_of, lines_of
    from tidemill.offline.rows.table_outputs import open_outputs

    if arguments.a == arguments.b == STANDARD_STREAM:
        raise Refused("only one of the two files can be standard input")
    for name in (arguments.a, arguments.b):
        check_input_path(name)
    opened = partial(open_outputs, id_column=arguments.id, tmp_dir=arguments.output_tmp_dir)
    with (
        StopSignals(),
        opened(arguments.a) as a,
        opened(arguments.b) as b,
        byte_progress("comparing", a.num_bytes + b.num_bytes) as show,
    ):
        comparison = compare(a, b, arguments.num_shown, show)
    print_output(json_of(comparison) if arguments.json else "\n".join(lines_of(comparison)))
    return int(arguments.exit_code and not comparison.is_same)
