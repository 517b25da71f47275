"""Rows and tables of batches that have ended, fetched to the files that flags name."""

from __future__ import annotations

import argparse

from tidemill.offline.files.table_options import check_rows_names

from ..api.client import Client
from ..api.objects import Batch
from ..transfer.download import check_target
from .fetched_table import check_table_of_rows, format_of_rows, is_table_name, with_table
from .outcome import log_end, print_json
from .wait import Targets, fetch_and_report, targets_of


def targets_before_end(batch: Batch, arguments: argparse.Namespace) -> Targets:
    """Return the targets of a batch that may still run; raises Refused for unsuitable names."""
    name: str | None = arguments.output_file
    if name is None or not is_table_name(name):
        check_rows_names(name, arguments.error_file)
        return targets_of(arguments, _names_for(batch))
    if not batch.is_table and batch.table_url is None:
        check_table_of_rows(batch, name, arguments.error_file)
    for each in (name, arguments.error_file):
        check_target(each, force=arguments.force)
    return Targets(None, arguments.error_file, arguments.force, name)


def fetch_ended(client: Client, batch: Batch, arguments: argparse.Namespace) -> None:
    """Fetch the rows of a batch that has ended, or its table."""
    name, errors = arguments.output_file, arguments.error_file
    if name is not None and batch.table_url is None and format_of_rows(name) is not None:
        _write_table(client, batch, arguments)
        return
    targets = with_table(batch, targets_of(arguments, _names_for(batch)), name, errors)
    fetch_and_report(client, batch, targets, as_json=arguments.json)


def _names_for(batch: Batch) -> tuple[str, str]:
    return f"{batch.id}.output.jsonl", f"{batch.id}.errors.jsonl"


def _write_table(client: Client, batch: Batch, arguments: argparse.Namespace) -> None:
    """Write the rows of a batch without a table as one."""
    from .row_table import write_table_of_rows  # late: it needs pyarrow

    name: str = arguments.output_file
    check_table_of_rows(batch, name, arguments.error_file)
    check_target(name, force=arguments.force)
    write_table_of_rows(client, batch, name)
    if arguments.json:
        print_json({**batch.fields, "saved": {"table": name}})
    log_end(batch)
