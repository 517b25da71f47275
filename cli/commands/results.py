"""`tidemill results`: downloads or prints the rows of a batch."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tidemill.offline.console.errors import CliError, Refused, Stopped
from tidemill.offline.console.signals import StopSignals

from ..api.server import add_server_flags, server_of
from ..batches.batch_flags import add_file_flags
from ..batches.lookup import ID_HELP
from ..batches.outcome import EXIT_STATUSES, exit_status_of, log_end

if TYPE_CHECKING:
    from ..api.client import Client
    from ..api.objects import Batch


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `results` to the command line."""
    parser = commands.add_parser(
        "results",
        help="fetch the rows of a batch",
        description="Fetch the rows of a batch that has ended, and the table of results if "
        "its input was a table. For a batch of requests, `-o x.csv` or `-o x.parquet` writes its "
        "rows as a table. `-o -` prints the rows. --follow prints rows as they finish, roughly "
        "in order; `line` contains the line number.",
        epilog=EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("id", metavar="ID", help=ID_HELP)
    parser.add_argument(
        "--follow", action="store_true", help="print rows as they finish, until the batch has ended"
    )
    add_file_flags(parser, ("ID.output.jsonl", "ID.errors.jsonl"))
    add_server_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Fetch or print the rows and return the exit status."""
    if arguments.follow and (arguments.output_file or arguments.error_file):
        raise Refused("--follow prints rows on standard output: remove -o and -e")
    from ..api.client import Client
    from ..batches.ended_batch import fetch_ended
    from ..batches.lookup import find_batch

    with StopSignals(), Client(server_of(arguments.base_url)) as client:
        batch = find_batch(client, arguments.id)
        if arguments.follow:
            return _follow(client, batch)
        if not batch.has_ended:
            raise CliError(
                f"{batch.id} is {batch.status} and has no files yet: wait for them with "
                f"`tidemill resume {batch.id}`, or print rows as they finish with "
                f"`tidemill results {batch.id} --follow`"
            )
        fetch_ended(client, batch, arguments)
        return exit_status_of(batch)


def _follow(client: Client, batch: Batch) -> int:
    from tidemill.offline.console.error_summary import ErrorSummary

    from ..batches.failures import log_failures
    from ..batches.rows import print_rows

    failures = ErrorSummary()
    try:
        batch = print_rows(client, batch, failures)
    except Stopped as exc:
        raise Stopped(exc.signum, f"the batch {batch.id} continues") from exc
    log_end(batch)
    log_failures(failures)
    return exit_status_of(batch)
