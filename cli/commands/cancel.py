"""`tidemill cancel`: end a batch; the rows that are finished are kept."""

from __future__ import annotations

import argparse

from cli.api.server import add_server_flags, server_of
from cli.batches.named import ID_HELP
from cli.batches.outcome import EXIT_STATUSES, exit_status_of, print_json, tell_end
from cli.errors import Stopped
from cli.signals import StopSignals
from cli.terminal import say


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `cancel` to the command line."""
    parser = commands.add_parser(
        "cancel",
        help="cancel a batch",
        description="Cancels a batch. The rows that are finished by then are kept: "
        "`tidemill results ID` fetches them.",
        epilog=EXIT_STATUSES + "  with --wait, a batch that ends as cancelled is a 0 here",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("id", metavar="ID", help=ID_HELP)
    parser.add_argument("--wait", action="store_true", help="wait until it has ended")
    add_server_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Ask for the cancellation and return the exit status."""
    from cli.api.client import Client
    from cli.batches.follow import batch_shown, follow
    from cli.batches.named import cancel_batch

    with StopSignals(), Client(server_of(arguments.base_url)) as client:
        batch = cancel_batch(client, arguments.id)
        if arguments.wait:
            try:
                with batch_shown() as show:
                    batch = follow(client, batch, show)
            except Stopped as exc:
                raise Stopped(exc.signum, "the batch is being cancelled all the same") from exc
    if arguments.json:
        print_json(batch.fields)
    if not batch.has_ended:
        say(f"{batch.id} is {batch.status}")
        return 0
    tell_end(batch)
    return 0 if batch.status == "cancelled" else exit_status_of(batch)
