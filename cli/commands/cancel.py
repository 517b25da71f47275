"""`tidemill cancel`: cancels a batch and keeps its finished rows."""

from __future__ import annotations

import argparse

from tidemill.offline.console.errors import Stopped
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import log

from ..api.server import add_server_flags, server_of
from ..batches.lookup import ID_HELP
from ..batches.outcome import EXIT_STATUSES, exit_status_of, log_end, print_json


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `cancel` to the command line."""
    parser = commands.add_parser(
        "cancel",
        is_destructive=True,
        help="cancel a batch",
        description="Cancel a batch. `tidemill results ID` fetches the rows that have finished.",
        epilog=EXIT_STATUSES + "  with --wait, the exit status of a cancelled batch is 0 here",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("id", metavar="ID", help=ID_HELP)
    parser.add_argument("--wait", action="store_true", help="wait until it has ended")
    add_server_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Cancel the batch and return the exit status."""
    from ..api.client import Client
    from ..batches.follow import batch_progress, follow
    from ..batches.lookup import cancel_batch

    with StopSignals(), Client(server_of(arguments.base_url)) as client:
        batch = cancel_batch(client, arguments.id)
        if arguments.wait:
            try:
                with batch_progress() as show:
                    batch = follow(client, batch, show)
            except Stopped as exc:
                raise Stopped(exc.signum, "the batch is still being cancelled") from exc
    if arguments.json:
        print_json(batch.fields)
    if not batch.has_ended:
        log(f"{batch.id} is {batch.status}")
        return 0
    log_end(batch)
    return 0 if batch.status == "cancelled" else exit_status_of(batch)
