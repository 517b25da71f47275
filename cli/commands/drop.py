"""`tidemill drop`: uploads a file or a table to a deployment's bucket, which starts a batch."""

from __future__ import annotations

import argparse
from pathlib import Path

from tidemill.offline.arguments.dataset_id import is_dataset
from tidemill.offline.arguments.recipe_flags import add_recipe_flags
from tidemill.offline.console.errors import Refused
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.files.table_options import table_options

from ..batches.batch_flags import add_input_flags, file_of, options_of
from ..batches.outcome import EXIT_STATUSES
from ..batches.table_targets import name_fetched_rows
from ..deployment.resources import add_deployment_flags, require_cloud, resource_name


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `drop_file` to the command line."""
    parser = commands.add_parser(
        "drop",
        help="upload a file to the bucket, optionally waiting for its batch",
        description="Check a file as the server will, and upload it to a deployment's bucket "
        "under input/, with AWS credentials. A table's recipe is stored next to "
        "it. The file's URL is printed on standard output. With --wait, the "
        "command waits for the report under output/, and fetches the rows or the "
        "table of results.",
        epilog="The running batch of a file with the same name is cancelled.\n\n" + EXIT_STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_input_flags(parser)
    add_recipe_flags(parser)
    add_deployment_flags(parser, "bucket")
    parser.add_argument(
        "--name", help="set the object's name, which may contain slashes (default: the file's name)"
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait until the batch has ended, then fetch its rows"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print only JSON on standard output, one value per line",
    )
    parser.set_defaults(command=command, split=None, subset=None)


def command(arguments: argparse.Namespace) -> int:
    """Drop the file and return the exit status."""
    file, fields = file_of(arguments), options_of(arguments)
    if is_dataset(file):
        raise Refused(
            f"{file} is a dataset, not a file: create a batch with `tidemill submit {file}`"
        )
    require_cloud("`tidemill drop`")
    from ..batches.bucket import Drop, DroppedTable, drop_file
    from ..batches.file_check import form_in
    from ..batches.opened_input import open_batch_input
    from ..batches.wait import targets_if_waited

    table = table_options(arguments, file, arguments.output_file, is_written=arguments.wait)
    if table is not None:
        name_fetched_rows(arguments, table)
    targets = targets_if_waited(arguments, file)
    name, tmp_dir = arguments.name or _name_of(file), arguments.output_tmp_dir
    with StopSignals(), open_batch_input(file, table, tmp_dir) as (source, requests):
        form = form_in(source.file) if requests is None else requests.form
        target = Drop.from_name(resource_name(arguments, "bucket"), name, fields, form)
        dropped = None
        if table is not None and requests is not None and requests.table is not None:
            dropped = DroppedTable(requests.table.sources[0], table)
        return drop_file(target, source, targets, dropped, as_json=arguments.json)


def _name_of(file: str) -> str:
    if file == "-" or "://" in file:
        raise Refused("standard input and URLs have no file name: pass --name")
    return Path(file).name
