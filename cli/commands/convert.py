"""`tidemill convert`: writes rows in the form of their input's vendor."""

from __future__ import annotations

import argparse

from tidemill.offline.arguments.parser import add_tmp_dir_flag
from tidemill.offline.console.errors import Refused
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import amount, log
from tidemill.offline.files.paths import STANDARD_STREAM

_EPILOG = """\
examples:
  tidemill convert records.output.jsonl -i records.jsonl -o records.jsonl.out
  tidemill convert b.output.jsonl b.errors.jsonl -i anthropic.jsonl -o results.jsonl

exit status:
  0  every line of the input has its row in OUTPUT
  1  an invalid input, missing rows, or a failure; nothing was written
  2  invalid arguments or paths
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `convert` to the command line."""
    parser = commands.add_parser(
        "convert",
        help="write rows in the form of Anthropic, Bedrock or Gemini",
        description="Write rows as the batches of their input's vendor do, in the input's order.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("rows", nargs="+", metavar="ROWS", help="read rows from outputs and error files")
    add("-i", "--input-file", required=True, metavar="FILE", help="give the input of the rows")
    add(
        "-o",
        "--output-file",
        default=STANDARD_STREAM,
        metavar="FILE",
        help="write the converted rows here (default: -, standard output)",
    )
    add("--force", action="store_true", help="overwrite an existing file")
    add_tmp_dir_flag(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Write the converted rows and return the exit status."""
    # Imported late: JSON libraries would slow down `--help`.
    from tidemill.offline.files.new_file import check_new_file, open_new_file
    from tidemill.offline.files.source import open_source
    from tidemill.offline.rows.vendor_output import convert_rows

    names = [arguments.input_file, *arguments.rows]
    if names.count(STANDARD_STREAM) > 1:
        raise Refused("only one of the files can be standard input")
    output, tmp_dir = arguments.output_file, arguments.output_tmp_dir
    check_new_file(output, names, force=arguments.force)
    with (
        StopSignals(),
        open_source(arguments.input_file, tmp_dir=tmp_dir) as source,
        open_new_file(output) as out,
    ):
        num_rows = convert_rows(source, arguments.rows, out, tmp_dir)
    if output != STANDARD_STREAM:
        log(f"{amount(num_rows, 'row')} in {output}")
    return 0
