"""`tidemill diff`: compares two outputs of rows, files or tables."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from tidemill.offline.arguments.argument_types import positive_int
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
  0  the files were compared; with --exit-code: and nothing differs
  1  a bad input; with --exit-code: or something differs
  2  arguments or paths that cannot work
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `diff` to the command line."""
    parser = commands.add_parser(
        "diff",
        help="compare two outputs of rows, or two tables of results",
        description="Compares the rows of two outputs by custom_id, in any order: which are\n"
        "there, whether answers are identical, how long they are, how they end, what failed.\n"
        "An output may also be a table of results.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "a",
        metavar="A",
        help="a path, - or an http(s) URL of rows, of ours or of OpenAI's; or a table",
    )
    add("b", metavar="B", help="the same")
    add(
        "-n",
        "--num-shown",
        type=positive_int,
        default=5,
        metavar="N",
        help="rows that differ, and custom_ids of one kind, to show (default: 5)",
    )
    add(
        "--id",
        metavar="COLUMN",
        help="column of custom ids of tables (default: custom_id, id, else the row's number)",
    )
    add("--json", action="store_true", help="print one JSON object")
    add("--exit-code", action="store_true", help="end with 1 if something differs")
    add(
        "--output-tmp-dir",
        type=Path,
        metavar="FOLDER",
        help="where rows that are compressed or no file lie meanwhile (default: the system's)",
    )
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Print the comparison and return the exit status."""
    from tidemill.offline.console.progress_bar import byte_progress
    from tidemill.offline.rows.comparison import compare
    from tidemill.offline.rows.report import json_of, lines_of
    from tidemill.offline.rows.table_outputs import open_outputs

    if arguments.a == arguments.b == STANDARD_STREAM:
        raise Refused("standard input can be one of the two files only")
    for name in (arguments.a, arguments.b):
        check_input_path(name)
    opened = partial(open_outputs, id_column=arguments.id, tmp_dir=arguments.output_tmp_dir)
    with (
        StopSignals(),
        opened(arguments.a) as a,
        opened(arguments.b) as b,
        byte_progress("comparing", a.num_bytes + b.num_bytes) as show,
    ):
        found = compare(a, b, arguments.num_shown, show)
    print_output(json_of(found) if arguments.json else "\n".join(lines_of(found)))
    return int(arguments.exit_code and not found.is_same)
