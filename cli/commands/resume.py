"""`tidemill resume`: wait for a batch that was made before, and fetch its rows."""

from __future__ import annotations

import argparse

from cli.api.server import add_server_flags, server_of
from cli.batches.named import ID_HELP
from cli.batches.options import add_file_flags
from cli.batches.outcome import EXIT_STATUSES
from cli.signals import StopSignals


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `resume` to the command line."""
    parser = commands.add_parser(
        "resume",
        help="wait for a batch and fetch its rows",
        description="Waits until a batch has ended and fetches its rows, as `submit --wait` does. "
        "A download that was cut off goes on where it was.",
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
    from cli.api.client import Client
    from cli.batches.named import find_batch
    from cli.batches.wait import bring_home, targets_of

    server = server_of(arguments.base_url)
    with StopSignals(), Client(server) as client:
        batch = find_batch(client, arguments.id)
        targets = targets_of(arguments, (f"{batch.id}.output.jsonl", f"{batch.id}.errors.jsonl"))
        return bring_home(client, batch, targets, as_json=arguments.json)
