"""`tidemill resume`: waits for an existing batch and fetches its rows."""

from __future__ import annotations

import argparse

from tidemill.offline.console.signals import StopSignals

from ..api.server import add_server_flags, server_of
from ..batches.batch_flags import add_file_flags
from ..batches.lookup import ID_HELP
from ..batches.outcome import EXIT_STATUSES, exit_status_of


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `resume` to the command line."""
    parser = commands.add_parser(
        "resume",
        help="wait for a batch and fetch its rows",
        description="Wait until a batch has ended and fetch its rows, and its table if it has "
        "one; `-o x.csv` or `-o x.parquet` writes a table. An interrupted download is resumed.",
        epilog=EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("id", metavar="ID", help=ID_HELP)
    add_file_flags(parser, ("ID.output.jsonl", "ID.errors.jsonl"))
    add_server_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Wait, fetch and return the exit status."""
    from ..api.client import Client
    from ..batches.ended_batch import fetch_ended, targets_before_end
    from ..batches.lookup import find_batch
    from ..batches.wait import wait_and_fetch

    server = server_of(arguments.base_url)
    with StopSignals(), Client(server) as client:
        batch = find_batch(client, arguments.id)
        targets = targets_before_end(batch, arguments)
        batch = wait_and_fetch(
            client,
            batch,
            targets,
            as_json=arguments.json,
            fetch=lambda ended: fetch_ended(client, ended, arguments),
        )
    return exit_status_of(batch)
