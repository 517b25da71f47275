"""`tidemill sample`: a random sample of the requests of a batch file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..arguments.argument_types import positive_int, seed_number
from ..console.signals import StopSignals
from ..console.terminal import amount, log
from ..files.paths import STANDARD_STREAM

_EPILOG = """\
examples:
  tidemill sample requests.jsonl -n 50 -o fifty.jsonl
  tidemill sample requests.jsonl.gz -n 50 --seed 1 | tidemill run - > rows.jsonl

exit status:
  0  the sample is written
  1  a bad input, or a failure on the way
  2  arguments or paths that cannot work
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `sample` to the command line."""
    parser = commands.add_parser(
        "sample",
        help="pick random requests of a batch file",
        description="Picks lines of a batch file at random, each as likely as any other, and\n"
        "writes them as they are, in the order of the file.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", metavar="FILE", help="a path, - or an http(s) URL")
    add(
        "-n",
        "--num-lines",
        type=positive_int,
        default=50,
        metavar="N",
        help="lines to pick; a shorter file is taken whole (default: 50)",
    )
    add(
        "--seed",
        type=seed_number,
        default=0,
        metavar="N",
        help="another seed picks other lines; the same picks the same (default: 0)",
    )
    add(
        "-o",
        "--output-file",
        default=STANDARD_STREAM,
        metavar="FILE",
        help="a path (default: -, standard output)",
    )
    add("--force", action="store_true", help="write over a file that is there")
    add(
        "--output-tmp-dir",
        type=Path,
        metavar="FOLDER",
        help="where an input that is no file lies meanwhile (default: the system's)",
    )
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Write the sample and return the exit status."""
    from ..files.new_file import check_new_file, open_new_file
    from ..files.request_lines import choose_sample, copy_lines, count_lines, detect_source
    from ..files.source import open_source

    name, output = arguments.file, arguments.output_file
    check_new_file(output, [name], force=arguments.force)
    with StopSignals(), open_source(name, tmp_dir=arguments.output_tmp_dir) as source:
        form = detect_source(source)
        num_lines = count_lines(source, form)
        places = choose_sample(num_lines, arguments.num_lines, arguments.seed)
        with open_new_file(output) as out:
            copy_lines(source, form, frozenset(places), out)
    if output != STANDARD_STREAM:
        log(f"{len(places):,} of {amount(num_lines, form.unit)} in {output}")
    return 0
