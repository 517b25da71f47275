"""`tidemill erase`: permanently erases an ended batch with its input and its results."""

from __future__ import annotations

import argparse

from tidemill.offline.console.errors import Refused
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import log

from ..api.server import add_server_flags, server_of
from ..batches.outcome import print_json


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `erase` to the command line."""
    parser = commands.add_parser(
        "erase",
        is_destructive=True,
        help="permanently erase an ended batch with its input and its results",
        description="Permanently erase an ended batch: its input, results, rows and options. "
        "The deployment must allow it (erase_batches).",
        allow_abbrev=False,
    )
    parser.add_argument("id", metavar="ID", help="give the full ID of the batch")
    parser.add_argument("--yes", action="store_true", help="confirm the erasure")
    add_server_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Erase the batch and return the exit status."""
    if not arguments.yes:
        raise Refused("this permanently erases the batch's input and results: confirm with --yes")
    from ..api.client import Client

    with StopSignals(), Client(server_of(arguments.base_url)) as client:
        batch = client.erase(arguments.id)
    if arguments.json:
        print_json(batch.fields)
    is_gone = batch.extension.get("erased_at") is not None
    log(f"{batch.id} is {'erased' if is_gone else 'being erased, which takes minutes'}")
    return 0
