"""`tidemill join`: joins the rows of shards."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from tidemill.offline.arguments.argument_types import positive_int
from tidemill.offline.arguments.parser import add_tmp_dir_flag
from tidemill.offline.console.errors import unexpected_in_words
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import amount, log

_DESCRIPTION = """\
Join the rows of `tidemill run --shard I/N -o OUTPUT` in OUTPUT: OUTPUT.1-of-N first, then
OUTPUT.2-of-N, and so on. Nothing is written unless all shards have finished, that is, have
written OUTPUT.I-of-N.done. With -i, the rows are compared with the lines of the input instead.
"""
_EPILOG = """\
examples:
  tidemill join rows.jsonl
  tidemill join rows.jsonl -i requests.jsonl        (does not need .done files)
  tidemill join rows.jsonl -e errors.jsonl --remove

exit status:
  0  OUTPUT has a row for every line
  1  rows that do not match the lines, or a failure while joining
  2  missing or unfinished shards, different settings, or invalid paths; nothing was written
     6  an unexpected failure; join the shards again
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `join` to the command line."""
    parser = commands.add_parser(
        "join",
        help="join the rows of shards",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("output_file", metavar="OUTPUT", help="give the -o of the runs, without .I-of-N")
    add("-e", "--error-file", metavar="FILE", help="give the -e of the runs, without .I-of-N")
    add(
        "-i",
        "--input-file",
        metavar="FILE",
        help="compare each line of the input with its row: a path, - or an http(s) URL",
    )
    add(
        "-n",
        "--num-shards",
        type=positive_int,
        metavar="N",
        help="set the number of shards (default: taken from their names)",
    )
    add("--force", action="store_true", help="overwrite an existing OUTPUT")
    add("--remove", action="store_true", help="remove the shards after writing OUTPUT")
    add(
        "--allow-other-settings",
        action="store_true",
        help="join shards that were run with different settings (default: reject them)",
    )
    add_tmp_dir_flag(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Join the shards and return the exit status."""
    with unexpected_in_words("the join failed: join the shards again"):
        return _join(arguments)


def _join(arguments: argparse.Namespace) -> int:
    # Imported late: JSON libraries would slow down `--help`.
    from tidemill.batch.file.lines import MAX_LINE_BYTES
    from tidemill.offline.files.input_file import InputFile
    from tidemill.offline.files.shard_join import check_outputs, join_shards
    from tidemill.offline.files.source import open_source

    output, errors = arguments.output_file, arguments.error_file
    check_outputs(output, errors, input_file=arguments.input_file, force=arguments.force)
    with StopSignals(), ExitStack() as stack:
        requests, tmp_dir = None, arguments.output_tmp_dir
        if arguments.input_file is not None:
            source = stack.enter_context(open_source(arguments.input_file, tmp_dir=tmp_dir))
            requests = InputFile.from_source(source, MAX_LINE_BYTES).unpack(tmp_dir, stack)
        joined = join_shards(
            Path(output),
            None if errors is None else Path(errors),
            count=arguments.num_shards,
            requests=requests,
            force=arguments.force,
            remove=arguments.remove,
            allow_other_settings=arguments.allow_other_settings,
        )
    rows, shards = amount(joined.num_rows, "row"), amount(joined.num_shards, "shard")
    failed = f" ({joined.num_errors:,} failed)" if joined.num_errors else ""
    log(f"joined {rows}{failed} of {shards} in {output}" + (f" and {errors}" if errors else ""))
    return 0
