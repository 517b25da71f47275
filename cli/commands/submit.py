"""`tidemill submit`: uploads a file and creates a batch of it."""

from __future__ import annotations

import argparse
import os

from ..api.server import BASE_URL, add_server_flags, server_of
from ..batches.batch_flags import add_input_flags, file_of, options_of
from ..batches.outcome import EXIT_STATUSES
from ..console.signals import StopSignals

_DESCRIPTION = """\
Checks a file as the server will, uploads it and makes a batch of it. The batch's id is printed on
standard output, alone. Plain `submit` ends there, as --create-only does, and says how to go on;
with --wait it stays until the batch has ended and fetches its rows.
"""
_EPILOG = f"""\
An upload that was cut off, by the network or by a kill, goes on where it was when the same command
is given again. While it waits, Ctrl-C ends the command and not the batch.

{EXIT_STATUSES}"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `submit` to the command line."""
    parser = commands.add_parser(
        "submit",
        help="make a batch of a file, and wait for it if asked",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_input_flags(parser)
    how_far = parser.add_mutually_exclusive_group()
    how_far.add_argument(
        "--wait", action="store_true", help="stay until the batch has ended, then fetch its rows"
    )
    how_far.add_argument(
        "--create-only", action="store_true", help="make the batch and end, as without --wait"
    )
    how_far.add_argument(
        "--dry-run",
        action="store_true",
        help="look at the file only, and say what is in it; needs no server, and asks it for its "
        "models if one is named",
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="what the batch is for (default: the first line's url)"
    )
    add_server_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Submit the file and return the exit status."""
    file, fields = file_of(arguments), options_of(arguments)
    from ..batches.submission import dry_run, submit
    from ..batches.wait import targets_if_waited
    from ..files.source import open_source

    targets = targets_if_waited(arguments, file)
    server = None
    if not arguments.dry_run or arguments.base_url or os.environ.get(BASE_URL):
        server = server_of(arguments.base_url)
    with StopSignals(), open_source(file, tmp_dir=arguments.output_tmp_dir) as source:
        if arguments.dry_run:
            return dry_run(server, source, fields, as_json=arguments.json)
        assert server is not None
        endpoint = arguments.endpoint
        return submit(server, source, endpoint, fields, targets, as_json=arguments.json)
