"""`tidemill status`: shows one batch in detail, or a table of the newest batches."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tidemill.offline.arguments.argument_types import positive_int
from tidemill.offline.console.errors import Refused
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import print_output

from ..api.server import add_server_flags, server_of
from ..batches.lookup import ID_HELP
from ..batches.outcome import EXIT_STATUSES, exit_status_of, log_end, print_json

if TYPE_CHECKING:
    from ..api.client import Client
    from ..api.objects import Batch

_LIMIT = 20


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status` to the command line."""
    parser = commands.add_parser(
        "status",
        help="show batches and their progress",
        description="Show one batch in detail, or the newest batches in a table.",
        epilog=EXIT_STATUSES + "  without --watch, 0 means only that the batch was shown",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "id", metavar="ID", nargs="?", help=f"{ID_HELP} (default: show the newest batches)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--limit", type=positive_int, metavar="N", help=f"show N batches (default: {_LIMIT})"
    )
    which.add_argument("--all", action="store_true", help="show all batches")
    parser.add_argument(
        "--watch",
        action="store_true",
        help="keep updating until the batch has ended, or until Ctrl-C",
    )
    add_server_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Show the batch or the table and return the exit status."""
    if arguments.id is not None and (arguments.limit or arguments.all):
        raise Refused("--limit and --all apply to the table of batches: remove the ID")
    if arguments.id is None and arguments.watch and arguments.json:
        raise Refused("--watch --json requires the ID of a batch")
    from ..api.client import Client

    with StopSignals(), Client(server_of(arguments.base_url)) as client:
        if arguments.id is None:
            return _show_many(client, arguments)
        return _show_one(client, arguments)


def _show_one(client: Client, arguments: argparse.Namespace) -> int:
    from ..batches.failures import first_failures
    from ..batches.follow import batch_progress, follow
    from ..batches.lookup import find_batch
    from ..batches.table import details, with_file_names

    batch = find_batch(client, arguments.id)
    if not arguments.watch:
        if arguments.json:
            print_json(batch.fields)
        else:
            [(_, file)] = with_file_names(client, [batch])
            print_output("\n".join(details(batch, file, first_failures(client, batch))))
        return 0
    with batch_progress() as show:

        def show_and_print(seen: Batch) -> None:
            show(seen)
            if arguments.json:
                print_json(seen.fields)

        batch = follow(client, batch, show_and_print)
    log_end(batch)
    return exit_status_of(batch)


def _show_many(client: Client, arguments: argparse.Namespace) -> int:
    from ..batches.table import print_table, watch_table, with_file_names

    limit = None if arguments.all else arguments.limit or _LIMIT
    if arguments.watch:
        watch_table(lambda: with_file_names(client, list(client.batches(limit))))
    if arguments.json:
        for batch in client.batches(limit):
            print_json(batch.fields)
    else:
        print_table(with_file_names(client, list(client.batches(limit))))
    return 0
