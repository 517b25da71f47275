"""`tidemill sample`: takes a random sample of a batch file's requests, or of a table's rows."""

from __future__ import annotations

import argparse
from dataclasses import replace

from tidemill.offline.arguments.argument_types import positive_int, seed_number
from tidemill.offline.arguments.parser import add_tmp_dir_flag
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import amount, log
from tidemill.offline.extras import require_extras
from tidemill.offline.files.paths import STANDARD_STREAM

_EPILOG = """\
examples:
  tidemill sample requests.jsonl -n 50 -o fifty.jsonl
  tidemill sample requests.jsonl.gz -n 50 --seed 1 | tidemill run - > rows.jsonl
  tidemill sample reviews.csv -n 50 -o fifty.csv

exit status:
  0  the sample was written
  1  an invalid input, or a failure
  2  invalid arguments or paths
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sample` to the command line."""
    parser = commands.add_parser(
        "sample",
        help="pick random requests of a batch file, or random rows of a table",
        description="Pick lines of a batch file uniformly at random, and write them unchanged, in\n"
        "the order of the file. From a table (CSV, TSV, Parquet, Arrow), pick rows, and write\n"
        "a table with the same columns.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="read a path, - or an http(s) URL")
    add(
        "-n",
        "--num-lines",
        type=positive_int,
        default=50,
        metavar="N",
        help="pick N lines or rows, or all of a shorter file (default: 50)",
    )
    add(
        "--seed",
        type=seed_number,
        default=0,
        metavar="N",
        help="set the random seed; the same seed picks the same lines (default: 0)",
    )
    add(
        "-o",
        "--output-file",
        default=STANDARD_STREAM,
        metavar="FILE",
        help="write the sample here (default: -, standard output)",
    )
    add("--force", action="store_true", help="overwrite an existing file")
    add_tmp_dir_flag(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Write the sample and return the exit status."""
    from tidemill.offline.files.new_file import check_new_file, open_new_file
    from tidemill.offline.files.request_lines import (
        choose_sample,
        copy_lines,
        count_lines,
        detect_source,
        is_table,
    )
    from tidemill.offline.files.source import open_source

    name, output = arguments.file, arguments.output_file
    check_new_file(output, [name], force=arguments.force)
    with StopSignals(), open_source(name, tmp_dir=arguments.output_tmp_dir) as source:
        if is_table(source):
            require_extras("a sample of a table", "tables")
            from tidemill.offline.files.table_sample import sample_table

            num_picked, num_all = sample_table(source, arguments.num_lines, arguments.seed, output)
            unit = "row"
        else:
            form = replace(detect_source(source), vendor=None)  # copied as they are
            num_all, unit = count_lines(source, form), form.unit
            places = choose_sample(num_all, arguments.num_lines, arguments.seed)
            num_picked = len(places)
            with open_new_file(output) as out:
                copy_lines(source, form, frozenset(places), out)
    if output != STANDARD_STREAM:
        log(f"{num_picked:,} of {amount(num_all, unit)} in {output}")
    return 0
