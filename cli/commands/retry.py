"""`tidemill retry`: reruns the lines that failed or were not run."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.offline.arguments.parser import add_tmp_dir_flag
from tidemill.offline.console.errors import ROWS_FAILED, Refused, ServerRefused
from tidemill.offline.console.signals import StopSignals
from tidemill.offline.console.terminal import amount, log
from tidemill.offline.files.paths import STANDARD_STREAM, check_input_path
from tidemill.offline.files.recorded_run import ROWS_SUFFIX, RecordedRun
from tidemill.offline.files.table_options import format_of

from ..api.server import add_server_flags, server_of
from ..batches.batch_flags import add_batch_flags, add_file_flags, options_of
from ..batches.outcome import EXIT_STATUSES, exit_status_of

_DESCRIPTION = """\
Rerun the requests that failed or were not run.

  tidemill retry ID                       creates a new batch from such requests of an ended batch,
                                          without invalid requests, which would fail again
  tidemill retry ROWS [-i FILE]           runs them on this machine, with the flags in the run card
                                          of ROWS and further flags of `tidemill run`; the new rows
                                          replace the failed ones in ROWS, which may be a table
  tidemill retry ROWS -i FILE -o FAILED   only writes the requests to FAILED, to submit or to edit
"""
_EPILOG = f"""\
The new batch has the window and the metadata of the old one, and the old ID as `retry_of`. Only
its ID is printed on standard output. ROWS must follow `retry`. FILE and the flags are read from
the run card next to ROWS; without a card, FILE is x.jsonl if ROWS is x.output.jsonl.

{EXIT_STATUSES}"""
_ROW_ENDINGS = (".jsonl", ".ndjson", ".json", ".gz")
_OUTPUT = ".output.jsonl"


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `retry` to the command line."""
    parser = commands.add_parser(
        "retry",
        usage="tidemill retry ID [--wait] [flags] | ROWS [-i FILE] [-o FAILED] [flags of run]",
        help="rerun lines that failed or were not run",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "id",
        metavar="ID|ROWS",
        help="give a batch's ID or its beginning, @last, or a file of rows",
    )
    add("-i", "--input-file", metavar="FILE", help="read the requests of ROWS from here")
    add("--wait", action="store_true", help="wait until the batch has ended, then fetch its rows")
    add(
        "--include-invalid",
        action="store_true",
        help="also retry a batch's invalid requests (status 400, 413 or 422)",
    )
    add(
        "--body",
        type=_json_object,
        metavar="JSON",
        help="change parameters of a batch's retried requests, as in "
        "--body '{\"max_tokens\": 2000}'; null removes a parameter",
    )
    add(
        "--prompt", metavar="TEMPLATE", help="ask a batch's failed rows of a table with this prompt"
    )
    add_tmp_dir_flag(parser)
    add_batch_flags(parser)
    add_file_flags(parser, ("ID.retry.output.jsonl", "ID.retry.errors.jsonl"))
    add_server_flags(parser)
    parser.set_defaults(command=command)


def expand_rows(typed: Sequence[str]) -> Sequence[str]:
    """Expand `retry ROWS` to a `run` command; other forms of `retry` are returned unchanged.

    Raises Refused if the rows do not exist, or their requests are not found.
    """
    match typed:
        case ["retry", rows, *rest] if _names_rows(rows) and not _has(
            rest, "-o", "--output-file", "-h", "--help"
        ):
            if not Path(rows).exists() and Path(rows + ROWS_SUFFIX).exists():
                raise Refused(
                    f"the run of {rows} was stopped: finish the table with the same command and "
                    "--resume, then retry failed rows"
                )
            if _has(rest, "--force"):
                raise Refused(
                    "`tidemill retry` keeps finished rows, so it does not support --force: to "
                    "start over, use `tidemill run` with --force"
                )
            check_input_path(rows)
            if rows.endswith(".gz"):
                raise Refused(f"{rows} is compressed: decompress it, or write its requests with -o")
            recorded = RecordedRun.find(rows)
            has_input = _has(rest, "-i", "--input-file")
            errors = rows.removesuffix(_OUTPUT) + ".errors.jsonl"
            if rows.endswith(_OUTPUT) and Path(errors).exists():
                words = (*recorded.flags, *rest)
                rest = [*([] if _has(words, "-e", "--error-file") else ["-e", errors]), *rest]
            if recorded.is_table and not (recorded.flags or _has(rest, "--prompt", "--recipe")):
                log(
                    f"note: there is no run card with the flags of {rows}: pass them again, such "
                    "as --prompt"
                )
            run = recorded.command(rest, None if has_input else recorded.find_input())
            log(f"running `{shlex.join(['tidemill', *run])}`")
            return run
    return typed


def command(arguments: argparse.Namespace) -> int:
    """Create the batch or write the requests, and return the exit status."""
    if _names_rows(arguments.id):
        return _write_failed(arguments)
    if arguments.input_file is not None:
        raise Refused("-i is not supported for a batch, whose input is on the server: remove it")
    given = options_of(arguments)
    from ..api.client import Client
    from ..batches import retry
    from ..batches.lookup import find_batch
    from ..batches.submission import report_created, submit
    from ..batches.wait import targets_if_waited, wait_and_fetch

    server = server_of(arguments.base_url)
    with StopSignals(), Client(server) as client:
        batch = find_batch(client, arguments.id)
        targets = targets_if_waited(arguments, f"{batch.id}.retry.jsonl")
        retry.check_can_retry(batch)
        edits = {name: getattr(arguments, name) for name in ("include_invalid", "body", "prompt")}
        try:
            made = retry.create_on_server(client, batch, given, edits)
        except ServerRefused as exc:
            if exc.error_code != "nothing_to_retry":
                raise
            log(f"{batch.id} has no requests to retry: {exc}")
            return ROWS_FAILED if batch.failed else 0
        if made is not None:
            report_created(made, targets, as_json=arguments.json)
            if targets is not None:
                ended = wait_and_fetch(client, made, targets, as_json=arguments.json)
                return exit_status_of(ended)
            log(f"wait for it and fetch its rows with `tidemill resume {made.id}`")
            return 0
        tmp_dir = arguments.output_tmp_dir
        opened = retry.open_failed_requests(
            client, batch, tmp_dir, include_invalid=arguments.include_invalid
        )
        with opened as requests:
            if requests is None:
                log(f"{batch.id} has no requests to retry")
                return ROWS_FAILED if batch.failed else 0
            ended = submit(
                server,
                requests,
                batch.fields["endpoint"],
                retry.fields_of_retry(batch, given),
                targets,
                as_json=arguments.json,
                filename=retry.filename_of_retry(client, batch),
            )
    return 0 if targets is None else exit_status_of(ended)


def _write_failed(arguments: argparse.Namespace) -> int:
    """Write the requests that did not succeed."""
    from tidemill.offline.files.new_file import check_new_file, open_new_file
    from tidemill.offline.files.request_lines import copy_requests
    from tidemill.offline.files.row_file import open_rows
    from tidemill.offline.files.row_index import RowIndex
    from tidemill.offline.files.source import open_source

    if arguments.body is not None or arguments.prompt is not None:
        raise Refused("--body and --prompt need a batch's ID: edit the written requests instead")
    rows_name, output, tmp_dir = arguments.id, arguments.output_file, arguments.output_tmp_dir
    if output is None:
        raise Refused(f"ROWS must come first: `tidemill retry {rows_name} -i FILE`")
    check_input_path(rows_name)
    recorded = RecordedRun.find(rows_name)
    if recorded.is_table:
        raise Refused(
            f"-o is not supported for rows of a table, such as {rows_name}: rerun its failed rows "
            f"with `tidemill retry {rows_name}`"
        )
    name = arguments.input_file or recorded.find_input()
    check_new_file(output, [rows_name, name], force=arguments.force)
    with StopSignals(), open_rows(rows_name, tmp_dir=tmp_dir) as rows:
        index = RowIndex.from_rows(rows)

        def is_wanted(custom_id: str) -> bool:
            place = index.pop_id(custom_id)
            return place is None or rows.read(place).body is None

        with open_source(name, tmp_dir=tmp_dir) as source, open_new_file(output) as out:
            copied = copy_requests(source, out, is_wanted)
    if copied.num_malformed:
        log(f"note: omitted {amount(copied.num_malformed, 'malformed line')} of {name}")
    where = "" if output == STANDARD_STREAM else f": {output}"
    log(f"{copied.num_copied:,} of {amount(copied.num_lines, 'request')} did not succeed{where}")
    return 0


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"is not valid JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be a JSON object, such as {"max_tokens": 2000}')
    return value


def _names_rows(name: str) -> bool:
    """Return whether this is a file of rows or a table, not a batch."""
    is_named = name.lower().endswith(_ROW_ENDINGS) or format_of(name) is not None
    return os.sep in name or is_named or Path(name).is_file()


def _has(words: Sequence[str], *flags: str) -> bool:
    """Return whether one of the flags is among the words, with or without a joined value."""
    return any(
        word == flag or word.startswith(f"{flag}=" if flag.startswith("--") else flag)
        for word in words
        for flag in flags
        if not (word.startswith("--") and not flag.startswith("--"))
    )
