"""`tidemill calibrate`: calibrates the decisions of an output, without the model."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidemill.offline.arguments.calibration_flags import (
    add_calibration_flags,
    calibration_keys,
)
from tidemill.offline.console.errors import Refused
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import log, print_output
from tidemill.offline.extras import require_extras

_DESCRIPTION = """\
Calibrate the probabilities in the output of `tidemill run --ask`, or in rows of decision requests,
without the model. The output can be calibrated again.
"""
_EPILOG = """\
examples:
  tidemill calibrate tickets.output.csv --gold damaged=is_damaged
  tidemill calibrate tickets.output.csv --calibrate batch --prior 0.3
  tidemill calibrate new.output.csv --calibration tickets.output.calibration.json
  tidemill calibrate requests.output.jsonl --gold answers.csv

exit status:
  0  the output is calibrated
  1  an invalid output, or one without decisions
  2  invalid arguments; nothing was written
"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `calibrate` to the command line."""
    parser = commands.add_parser(
        "calibrate",
        help="calibrate the decisions of an output, without the model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "output", metavar="OUTPUT", help="give the result table, or the rows of decision requests"
    )
    parser.add_argument(
        "-o", "--output-file", metavar="FILE", help="write to this path (default: replace OUTPUT)"
    )
    parser.add_argument(
        "--id",
        metavar="COLUMN",
        help="with --gold FILE: find the rows by this column (default: the --id of the run; "
        "for rows of requests custom_id)",
    )
    add_calibration_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Calibrate the output, print the accuracy on gold rows, and return the exit status."""
    keys = calibration_keys(arguments)
    if not keys:
        raise Refused(
            "no calibration: pass --gold, --calibrate batch with --prior, or --calibration"
        )
    # Imported late: pydantic is slow to load.
    from tidemill.offline.files.calibrated_rows import is_rows_file

    source = Path(arguments.output)
    if not (source.is_file() and is_rows_file(source)):
        require_extras("a table", "tables")
    # Imported late: pyarrow is slow to load.
    from tidemill.offline.run.calibration import calibrate

    target = Path(arguments.output_file or arguments.output)
    with StopSignals():
        calibration, path = calibrate(source, target, keys, arguments.id)
    print_output("\n".join(calibration.report_lines()))
    log(f"the calibrated output is {target}" + (f", its calibration {path}" if path else ""))
    return 0
