"""`tidemill view`: rows of an output, to read them."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

from ..arguments.argument_types import nonblank_text, positive_int
from ..console.errors import Refused
from ..console.signals import StopSignals
from ..console.terminal import log, print_output
from ..files.paths import STANDARD_STREAM, check_input_path

_MAX_CHARS = 1_000
_EPILOG = """\
examples:
  tidemill view requests.output.jsonl -i requests.jsonl | less
  tidemill view rows.jsonl --errors -n 100
  tidemill view rows.jsonl --grep "cannot help"

exit status:
  0  the rows were printed, or none matches
  1  a bad input, or the reader went away
  2  arguments or paths that cannot work
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `view` to the command line."""
    parser = commands.add_parser(
        "view",
        help="print rows of an output to read them",
        description="Prints the answers of rows for people to read, each beside its request if\n"
        "the file of requests is given and the terminal is wide.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("rows", metavar="ROWS", help="a path, - or an http(s) URL of rows, of ours or of OpenAI's")
    add("-i", "--input-file", metavar="FILE", help="the requests that ROWS answers")
    add("--errors", action="store_true", help="only rows that failed")
    add(
        "--grep",
        type=nonblank_text,
        metavar="WORDS",
        help="only rows with these words in their custom_id, answer or error, in any case",
    )
    add(
        "-n",
        "--num-rows",
        type=positive_int,
        default=20,
        metavar="N",
        help="rows to print (default: 20)",
    )
    add("--full", action="store_true", help=f"print texts of more than {_MAX_CHARS:,} characters")
    add(
        "--output-tmp-dir",
        type=Path,
        metavar="FOLDER",
        help="where files that are compressed or no file lie meanwhile (default: the system's)",
    )
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Print the rows and return the exit status."""
    from ..files.row_file import open_rows
    from ..files.source import open_source
    from ..rows.view import add_requests, matching_rows, render_row

    name, requests = arguments.rows, arguments.input_file
    if name == requests == STANDARD_STREAM:
        raise Refused("standard input can be one of the two files only")
    for each in (name, requests or name):
        check_input_path(each)
    tmp_dir, max_chars = arguments.output_tmp_dir, None if arguments.full else _MAX_CHARS
    with StopSignals(), open_rows(name, tmp_dir=tmp_dir) as rows:
        found = matching_rows(
            rows, only_errors=arguments.errors, pattern=arguments.grep, max_chars=max_chars
        )
        shown = [*islice(found, arguments.num_rows)]
        is_more = next(found, None) is not None
        if requests is not None:
            with open_source(requests, tmp_dir=tmp_dir) as source:
                add_requests(shown, source, max_chars)
        for row in shown:
            print_output(render_row(row))
    if is_more:
        log("there are more rows: -n N prints more")
    elif not shown:
        log(f"no row of {name} matches")
    return 0
