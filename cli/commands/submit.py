"""`tidemill submit`: uploads a file and creates a batch."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tidemill.offline.arguments.dataset_id import add_dataset_flags
from tidemill.offline.arguments.recipe_flags import add_recipe_flags, has_recipe
from tidemill.offline.console.errors import Refused
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.files.paths import STANDARD_STREAM
from tidemill.offline.files.table_options import TableOptions, table_options

from ..api.server import BASE_URL, add_server_flags, server_of
from ..batches.batch_flags import add_input_flags, file_of, options_of
from ..batches.outcome import EXIT_STATUSES, exit_status_of
from ..batches.table_targets import name_fetched_rows

RECIPE: Final = "recipe"
"""Option of a batch whose file is a table."""

_DESCRIPTION = """\
Check a file as the server will, upload it and create a batch. Only the batch's ID is printed on
standard output. With --wait, the command waits until the batch has ended and fetches its rows.
"""
_EPILOG = f"""\
Run the same command again to resume an upload that the network or a kill interrupted. While
waiting, Ctrl-C ends the command, not the batch.

{EXIT_STATUSES}"""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `submit` to the command line."""
    parser = commands.add_parser(
        "submit",
        help="create a batch from a file, optionally waiting for it",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_input_flags(parser)
    add_recipe_flags(parser)
    add_dataset_flags(parser)
    how_far = parser.add_mutually_exclusive_group()
    how_far.add_argument(
        "--wait", action="store_true", help="wait until the batch has ended, then fetch its rows"
    )
    how_far.add_argument(
        "--create-only", action="store_true", help="create the batch and exit (the default)"
    )
    how_far.add_argument(
        "--dry-run",
        action="store_true",
        help="only check the file and print its contents; if a server is set, its models are "
        "checked, too",
    )
    parser.add_argument(
        "--endpoint", metavar="URL", help="set the batch's endpoint (default: the first line's url)"
    )
    add_server_flags(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Submit the file and return the exit status."""
    is_table = has_recipe(arguments, arguments.file)
    file, fields = file_of(arguments, is_table=is_table), options_of(arguments)
    from ..batches.opened_input import open_batch_input, print_first_requests
    from ..batches.submission import dry_run, submit
    from ..batches.wait import Targets, targets_if_waited

    table = table_options(arguments, file, arguments.output_file, is_written=arguments.wait)
    if table is not None:
        name_fetched_rows(arguments, table)
        if table.recipe.priority is not None:
            fields.setdefault("priority", table.recipe.priority)
        table = _with_escalation(table, fields, file)
    targets = targets_if_waited(arguments, file)
    is_table_sent = table is not None and RECIPE in fields
    if table is not None and targets is not None and is_table_sent:
        targets = Targets(None, None, arguments.force, str(table.output))
    server = None
    if not arguments.dry_run or arguments.base_url or os.environ.get(BASE_URL):
        server = server_of(arguments.base_url)
    tmp_dir, as_json = arguments.output_tmp_dir, arguments.json
    opened = open_batch_input(file, table, tmp_dir, is_table_written=arguments.wait)
    with StopSignals(), opened as (source, requests):
        if arguments.dry_run:
            dry_run(server, source, fields, as_json=as_json)
            if requests is not None and not as_json:
                print_first_requests(requests)
            return 0
        assert server is not None
        endpoint, sent = arguments.endpoint, None
        if is_table_sent and requests is not None and requests.table is not None:
            [sent] = requests.table.sources
        name = None if sent is None else _name_of(file, sent.name)
        batch = submit(
            server, source, endpoint, fields, targets, as_json=as_json, filename=name, table=sent
        )
        if requests is not None and table is not None and targets is not None and sent is None:
            from ..batches.table_results import make_table

            make_table(table, requests, batch)
    return 0 if targets is None else exit_status_of(batch)


def _with_escalation(table: TableOptions, fields: dict[str, Any], file: str) -> TableOptions:
    """Add the recipe's second model to the batch's fields, and the model of each row to the table.

    With a target accuracy, the recipe is a field, too: the deployment needs the table, which
    contains the known answers. Raises Refused for a recipe that is unsuitable for two models.
    """
    from tidemill.batch.table.recipe_keys import CASCADE

    recipe = table.recipe
    if recipe.escalate is not None and "escalate" not in fields:
        given = {name: getattr(recipe, name) for name in CASCADE}
        fields |= {name: value for name, value in given.items() if value is not None}
    if "escalate" not in fields:
        return table
    from tidemill.batch.table.cascade_keys import check_cascade
    from tidemill.batch.table.errors import RecipeError

    keys, target = table.recipe_keys, fields.get("target_accuracy")
    if target is None and recipe.target_accuracy is not None:  # its gold answers are not used here
        keys = {name: value for name, value in keys.items() if name != "gold"}
    try:
        check_cascade(recipe.questions, keys, target)
    except RecipeError as exc:
        raise Refused(f"the recipe is not valid: {exc}") from exc
    if target is not None:
        if table.dataset is not None or Path(file).is_dir():
            raise Refused(
                f"--target-accuracy is supported for a table that is one file, but {file} is a "
                "dataset or a folder: pass --escalate-below P instead"
            )
        sent = table.batch_keys().items()
        own = {*CASCADE, "priority"}  # fields of the batch
        fields[RECIPE] = {name: value for name, value in sent if name not in own}
        return replace(table, recipe=replace(recipe, has_models=True))
    return replace(table, recipe=replace(recipe.uncalibrated, has_models=True))


def _name_of(file: str, shown: str) -> str:
    """Return the name of a table in the server's list; `shown` is the one without secrets."""
    return "table" if file == STANDARD_STREAM else shown.rpartition("/")[2] or "table"
