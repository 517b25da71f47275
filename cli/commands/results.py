"""`tidemill results`: the rows of a batch, when it has ended or while it runs."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from cli.api.server import add_server_flags, server_of
from cli.batches.named import ID_HELP
from cli.batches.options import add_file_flags
from cli.batches.outcome import EXIT_STATUSES, exit_status_of, tell_end
from cli.errors import CliError, Refused, Stopped
from cli.signals import StopSignals

if TYPE_CHECKING:
    from cli.api.client import Client
    from cli.api.objects import Batch


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `results` to the command line."""
    parser = commands.add_parser(
        "results",
        help="fetch the rows of a batch",
        description="Fetches the rows of a batch that has ended; `-o -` prints them. With --follow "
        "it prints rows as they are finished, good and bad, each with the number of its line as "
        "`line`; they come about in the order of lines.",
        epilog=EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("id", metavar="ID", help=ID_HELP)
    parser.add_argument(
        "--follow", action="store_true", help="print rows while it runs, until it has ended"
    )
    add_file_flags(parser, ("ID.output.jsonl", "ID.errors.jsonl"))
    add_server_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Fetch or print the rows and return the exit status."""
    if arguments.follow and (arguments.output_file or arguments.error_file):
        raise Refused("--follow prints rows on standard output: leave -o and -e away")
    from cli.api.client import Client
    from cli.batches.named import find_batch
    from cli.batches.wait import fetch_and_tell, targets_of

    with StopSignals(), Client(server_of(arguments.base_url)) as client:
        batch = find_batch(client, arguments.id)
        if arguments.follow:
            return _follow(client, batch)
        if not batch.has_ended:
            raise CliError(
                f"{batch.id} is {batch.status} and has no files yet: `tidemill resume {batch.id}` "
                f"waits for them, `tidemill results {batch.id} --follow` prints rows as they come"
            )
        targets = targets_of(arguments, (f"{batch.id}.output.jsonl", f"{batch.id}.errors.jsonl"))
        return fetch_and_tell(client, batch, targets, as_json=arguments.json)


def _follow(client: Client, batch: Batch) -> int:
    from cli.batches.failures import tell_failures
    from cli.batches.rows import print_rows
    from cli.kinds import Kinds

    failures = Kinds()
    try:
        batch = print_rows(client, batch, failures)
    except Stopped as exc:
        raise Stopped(exc.signum, f"the batch {batch.id} is not ended by that") from exc
    tell_end(batch)
    tell_failures(failures)
    return exit_status_of(batch)
