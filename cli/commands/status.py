"""`tidemill status`: one batch in detail, or the newest in a table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cli.api.server import add_server_flags, server_of
from cli.batches.named import ID_HELP
from cli.batches.outcome import EXIT_STATUSES, exit_status_of, print_json, tell_end
from cli.errors import Refused
from cli.signals import StopSignals
from cli.sizes import positive_int
from cli.terminal import put

if TYPE_CHECKING:
    from cli.api.client import Client
    from cli.api.objects import Batch

_LIMIT = 20


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status` to the command line."""
    parser = commands.add_parser(
        "status",
        help="how batches are",
        description="Shows one batch in detail, or the newest batches in a table.",
        epilog=EXIT_STATUSES + "  without --watch, 0 says only that it could be shown",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "id", metavar="ID", nargs="?", help=f"{ID_HELP}; the newest ones without it"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--limit", type=positive_int, metavar="N", help=f"how many batches ({_LIMIT})"
    )
    which.add_argument("--all", action="store_true", help="all batches")
    parser.add_argument(
        "--watch", action="store_true", help="go on until the batch has ended, or until Ctrl-C"
    )
    add_server_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Show what was asked for and return the exit status."""
    if arguments.id is not None and (arguments.limit or arguments.all):
        raise Refused("--limit and --all are for the table of batches: leave the id away")
    if arguments.id is None and arguments.watch and arguments.json:
        raise Refused("--watch prints JSON of one batch only: give its id")
    from cli.api.client import Client

    with StopSignals(), Client(server_of(arguments.base_url)) as client:
        if arguments.id is None:
            return _show_many(client, arguments)
        return _show_one(client, arguments)


def _show_one(client: Client, arguments: argparse.Namespace) -> int:
    from cli.batches.failures import first_failures
    from cli.batches.follow import batch_shown, follow
    from cli.batches.named import find_batch
    from cli.batches.table import details, named

    batch = find_batch(client, arguments.id)
    if not arguments.watch:
        if arguments.json:
            print_json(batch.fields)
        else:
            [(_, file)] = named(client, [batch])
            put("\n".join(details(batch, file, first_failures(client, batch))))
        return 0
    with batch_shown() as show:

        def tell(seen: Batch) -> None:
            show(seen)
            if arguments.json:
                print_json(seen.fields)

        batch = follow(client, batch, tell)
    tell_end(batch)
    return exit_status_of(batch)


def _show_many(client: Client, arguments: argparse.Namespace) -> int:
    from cli.batches.table import named, print_table, watch_table

    limit = None if arguments.all else arguments.limit or _LIMIT
    if arguments.watch:
        watch_table(lambda: named(client, list(client.batches(limit))))
    if arguments.json:
        for batch in client.batches(limit):
            print_json(batch.fields)
    else:
        print_table(named(client, list(client.batches(limit))))
    return 0
