"""`tidemill cache`: list and remove the results that `tidemill run --reuse` stores in a folder."""

from __future__ import annotations

import argparse
import time
from datetime import UTC, datetime

from tidemill.offline.arguments.argument_types import (
    local_or_s3_folder,
    positive_number,
)
from tidemill.offline.console.tables import columns
from tidemill.offline.console.terminal import amount, log, print_output, size_words

_DAY_SECONDS = 24 * 3600
_HEADS = ("RESULTS", "SIZE", "USED", "MODEL")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `cache` to the command line."""
    parser = commands.add_parser(
        "cache",
        help="list and remove the results stored by run --reuse",
        description="List and remove the results that `tidemill run --reuse FOLDER` stores.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list the results by model", allow_abbrev=False)
    listing.set_defaults(command=command_list)
    stats = actions.add_parser("stats", help="count all results", allow_abbrev=False)
    stats.set_defaults(command=command_stats)
    remove = actions.add_parser(
        "remove", is_destructive=True, help="remove all results, or some", allow_abbrev=False
    )
    remove.add_argument(
        "--model", help="remove only the results of this model, as `cache list` prints it"
    )
    remove.add_argument(
        "--older-than",
        type=positive_number,
        metavar="N",
        help="remove only results that have not been used for N days",
    )
    remove.set_defaults(command=command_remove)
    for action in (listing, stats, remove):
        action.add_argument(
            "folder",
            type=local_or_s3_folder,
            metavar="FOLDER",
            help="give the folder of --reuse",
        )


def command_list(arguments: argparse.Namespace) -> int:
    """Print a table of the results by model on standard output."""
    from tidemill.offline.run.result_folders import result_folder

    found = result_folder(arguments.folder).totals()
    rows = [
        (
            f"{total.num_results:,}",
            size_words(total.num_bytes),
            datetime.fromtimestamp(total.used, UTC).date().isoformat(),
            total.model,
        )
        for total in found
    ]
    if rows:
        print_output("\n".join(columns([_HEADS, *rows])))
    else:
        log(f"{arguments.folder} does not contain results")
    return 0


def command_stats(arguments: argparse.Namespace) -> int:
    """Print the number and the size of all results."""
    from tidemill.offline.run.result_folders import result_folder

    folder = result_folder(arguments.folder)
    found = folder.totals()
    num_results = sum(total.num_results for total in found)
    print_output(
        f"{amount(num_results, 'result')} of {amount(len(found), 'model')}, "
        f"{size_words(sum(total.num_bytes for total in found))} of replies, "
        f"{size_words(folder.num_bytes())} in {arguments.folder}"
    )
    return 0


def command_remove(arguments: argparse.Namespace) -> int:
    """Remove results and log their number."""
    from tidemill.offline.run.result_folders import result_folder

    days = arguments.older_than
    before = None if days is None else int(time.time() - days * _DAY_SECONDS)
    num_removed = result_folder(arguments.folder).remove(arguments.model, before)
    log(f"{amount(num_removed, 'result')} removed")
    return 0
