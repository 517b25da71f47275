"""Flags of a batch, shared by `submit` and `drop`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.offline.console.errors import Refused

if TYPE_CHECKING:
    from tidemill.batch.errors import InvalidOption

WINDOW, ON_INVALID_LINE = "completion_window", "on_invalid_line"
NAMES = (
    *(WINDOW, ON_INVALID_LINE, "strict_parameters"),
    *("output_url", "error_url", "webhook_url", "max_cost"),
)
"""Names of the options in the API; in S3 metadata they have dashes."""


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of a batch; the server sets the defaults."""
    group = parser.add_argument_group("the batch")
    add = group.add_argument
    add(
        "--window",
        dest=WINDOW,
        metavar="TIME",
        help="30m to 14d: what has not run by then gets an error row (default: 24h)",
    )
    add(
        "--metadata",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="goes into the batch's metadata; can be given 16 times",
    )
    add(
        "--on-invalid-line",
        choices=("fail", "skip"),
        default="fail",
        help="refuse a file with bad lines, or give those an error row (default: fail)",
    )
    add(
        "--strict-parameters",
        action="store_true",
        default=None,
        help="refuse a file with unknown parameters (default: they have no effect, with a warning)",
    )
    add(
        "--max-cost",
        type=float,
        metavar="AMOUNT",
        help="what its GPU time may cost: what has not run by then gets an error row",
    )
    add("--output-url", metavar="URL", help="an https url that the good rows are PUT to as well")
    add("--error-url", metavar="URL", help="the same for the other rows")
    add("--webhook-url", metavar="URL", help="an https url that is called when the batch ends")


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the input file, the result files and the options of the batch."""
    parser.add_argument("file", metavar="FILE", help="a path, - or an http(s) URL")
    parser.add_argument(
        "--output-tmp-dir",
        type=Path,
        metavar="FOLDER",
        help="where an input that is no file lies meanwhile (default: the system's)",
    )
    add_batch_flags(parser)
    add_file_flags(parser, ("FILE.output.jsonl beside it", "FILE.errors.jsonl beside it"))


def add_file_flags(parser: argparse.ArgumentParser, names: tuple[str, str]) -> None:
    """Add the flags of result files; `names` describes the defaults."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "-o", "--output-file", metavar="FILE", help=f"for the good rows ({names[0]})"
    )
    group.add_argument(
        "-e", "--error-file", metavar="FILE", help=f"for the other rows ({names[1]})"
    )
    group.add_argument("--force", action="store_true", help="write over files that are there")


def file_of(arguments: argparse.Namespace, *, is_table: bool = False) -> str:
    """Return the input file; raises Refused for an empty name, or a directory but for a table."""
    name: str = arguments.file
    check_file(name, is_table=is_table)
    return name


def check_file(name: str, *, is_table: bool = False) -> None:
    """Raise Refused for an empty name of an input, or a directory that is not a table."""
    if not name:
        raise Refused("the name of the file is empty: name a file")
    if Path(name).is_dir() and not is_table:
        raise Refused(f"{name} is a directory: name a file")


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options as fields of the API request; raises Refused."""
    from tidemill.batch.batch_request import options_of_request
    from tidemill.batch.errors import InvalidOption

    fields = {name: getattr(arguments, name) for name in NAMES}
    fields = {name: value for name, value in fields.items() if value is not None}
    if fields[ON_INVALID_LINE] == "fail":
        del fields[ON_INVALID_LINE]
    if arguments.metadata:
        fields["metadata"] = dict(arguments.metadata)
    try:
        options_of_request(fields)
    except InvalidOption as exc:
        raise Refused(_naming_flag(exc)) from exc
    return fields


def _naming_flag(exc: InvalidOption) -> str:
    if exc.param is None:
        return exc.message
    flag = "--window" if exc.param == WINDOW else f"--{exc.param.replace('_', '-')}"
    return exc.message.replace(f"`{exc.param}`", flag)


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is no pair: write KEY=VALUE")
    return name, value
