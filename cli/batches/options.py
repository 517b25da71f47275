"""What a person may ask of a batch: the same flags for a submission and for a drop."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.errors import Refused

if TYPE_CHECKING:
    from handler.errors import InvalidOption

WINDOW, ON_INVALID_LINE = "completion_window", "on_invalid_line"
NAMES = (WINDOW, ON_INVALID_LINE, "output_url", "error_url", "webhook_url")
"""What the API calls them; an upload to the bucket has dashes in their place."""


def _add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of a batch; what is not given is left to the server."""
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
    add("--output-url", metavar="URL", help="an https url that the good rows are PUT to as well")
    add("--error-url", metavar="URL", help="the same for the other rows")
    add("--webhook-url", metavar="URL", help="an https url that is told of the batch's end")


def add_input_flags(parser: argparse.ArgumentParser) -> None:
    """Add the file, where it and its rows lie on this machine, and the options of its batch."""
    parser.add_argument("file", metavar="FILE", help="a path, - or an http(s) URL")
    parser.add_argument(
        "--output-tmp-dir",
        type=Path,
        metavar="FOLDER",
        help="where an input that is no file lies meanwhile (default: the system's)",
    )
    _add_batch_flags(parser)
    add_file_flags(parser, ("FILE.output.jsonl beside it", "FILE.errors.jsonl beside it"))


def add_file_flags(parser: argparse.ArgumentParser, names: tuple[str, str]) -> None:
    """Add where results go; `names` says where unless told."""
    group = parser.add_argument_group("results")
    group.add_argument(
        "-o", "--output-file", metavar="FILE", help=f"for the good rows ({names[0]})"
    )
    group.add_argument(
        "-e", "--error-file", metavar="FILE", help=f"for the other rows ({names[1]})"
    )
    group.add_argument("--force", action="store_true", help="write over files that are there")


def file_of(arguments: argparse.Namespace) -> str:
    """Return the input that was named; raises Refused for what can be none."""
    name: str = arguments.file
    if not name:
        raise Refused("the name of the file is empty: name a file")
    if Path(name).is_dir():
        raise Refused(f"{name} is a directory: name a file")
    return name


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that were asked for, as a request names them; raises Refused."""
    from handler.batch.request import options_of_request
    from handler.errors import InvalidOption

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
