"""Flags of a batch, shared by `submit` and `drop`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.offline.arguments.argument_types import field_names
from tidemill.offline.arguments.parser import add_tmp_dir_flag
from tidemill.offline.console.errors import Refused

if TYPE_CHECKING:
    from tidemill.batch.errors import InvalidOption

WINDOW, ON_INVALID_LINE = "completion_window", "on_invalid_line"
NAMES = (
    *(WINDOW, ON_INVALID_LINE, "strict_parameters"),
    *("output_url", "error_url", "webhook_url", "max_cost", "escalate", "escalate_below"),
    *("target_accuracy", "escalate_by", "priority", "echo_fields"),
)
"""The options' names in the API; S3 metadata has dashes instead of underscores."""


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the batch options, whose defaults the server sets."""
    group = parser.add_argument_group("the batch")
    add = group.add_argument
    add(
        "--window",
        dest=WINDOW,
        metavar="TIME",
        help="set the time limit, 30m to 14d; requests that have not run by then get an error "
        "row (default: 24h)",
    )
    add(
        "--metadata",
        type=_pair,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="add a pair to the batch's metadata; can be repeated up to 16 times",
    )
    add(
        "--on-invalid-line",
        choices=("fail", "skip"),
        default="fail",
        help="fail: reject a file with invalid lines; skip: give those an error row "
        "(default: fail)",
    )
    add(
        "--strict-parameters",
        action="store_true",
        default=None,
        help="reject a file with unknown parameters (default: ignore them, with a warning)",
    )
    add(
        "--max-cost",
        type=float,
        metavar="AMOUNT",
        help="limit the cost of its GPU time; requests that have not run by then get an error row",
    )
    add(
        "--priority",
        type=int,
        metavar="N",
        help="run before batches with a higher number, -100 to 100 (default: 0)",
    )
    add(
        "--echo-fields",
        type=field_names,
        metavar="NAMES",
        help="copy these comma-separated fields of a line, such as metadata, to its row",
    )
    add(
        "--escalate",
        metavar="MODEL",
        help="decide rows with an answer of a low confidence again with this model of the "
        "deployment",
    )
    add(
        "--escalate-below",
        type=float,
        metavar="P",
        help="escalate rows with an answer whose confidence is lower than P",
    )
    add(
        "--escalate-by",
        choices=("decision", "chat"),
        help="how that model decides: as the first one does, or by a generated answer",
    )
    add(
        "--target-accuracy",
        type=float,
        metavar="P",
        help="escalate below the threshold at which the first model's answers reach this accuracy "
        "on the rows with `gold` answers",
    )
    add("--output-url", metavar="URL", help="also PUT the successful rows to this https URL")
    add("--error-url", metavar="URL", help="also PUT the failed rows to this https URL")
    add("--webhook-url", metavar="URL", help="call this https URL when the batch ends")


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the input file, the result files and the options of the batch."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="read requests from a path, - (standard input) or an http(s) URL",
    )
    add_tmp_dir_flag(parser)
    add_batch_flags(parser)
    add_file_flags(
        parser, ("default: FILE.output.jsonl next to it", "default: FILE.errors.jsonl next to it")
    )


def add_file_flags(parser: argparse.ArgumentParser, names: tuple[str, str]) -> None:
    """Add the flags of result files; `names` describes the defaults."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "-o", "--output-file", metavar="FILE", help=f"write the successful rows here ({names[0]})"
    )
    group.add_argument(
        "-e", "--error-file", metavar="FILE", help=f"write the failed rows here ({names[1]})"
    )
    group.add_argument("--force", action="store_true", help="overwrite existing files")


def file_of(arguments: argparse.Namespace, *, is_table: bool = False) -> str:
    """Return the input file; raises Refused for an empty name, or a directory unless `is_table`."""
    name: str = arguments.file
    check_file(name, is_table=is_table)
    return name


def check_file(name: str, *, is_table: bool = False) -> None:
    """Raise Refused for an empty file name, or for a directory that is not a table."""
    if not name:
        raise Refused("the file name is empty: give the path of a file")
    if Path(name).is_dir() and not is_table:
        raise Refused(f"{name} is a directory: give the path of a file")


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
    return exc.message.replace(f"`{exc.param}`", flag_of(exc.param))


def flag_of(name: str) -> str:
    """Return the flag of an option that has a name in the API."""
    return "--window" if name == WINDOW else f"--{name.replace('_', '-')}"


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is not a KEY=VALUE pair")
    return name, value
