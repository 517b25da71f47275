"""Destination of the table that a deployment wrote from a batch's rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath

from tidemill.offline.console.errors import Refused
from tidemill.offline.files.table_options import FORMATS_BY_SUFFIX, check_rows_names

from ..api.objects import Batch
from ..transfer.download import check_target
from .wait import Targets

_ROWS_SUFFIX = ".jsonl"


def with_table(batch: Batch, targets: Targets, output: str | None, errors: str | None) -> Targets:
    """Return the targets, with one for the table if the batch has one.

    The table is written next to the rows. If `output` is the name of a table, only the table is
    fetched. Raises Refused for another format than the table's, or if the batch has only rows.
    """
    suffix = None if batch.table_url is None else PurePosixPath(batch.table_url).suffix
    if output is not None and is_table_name(output):
        _check_format(batch, output, suffix)
        return replace(targets, output=None, errors=errors, table=output)
    check_rows_names(output, errors)
    if suffix is None or output is not None or targets.output is None:
        return targets
    table = targets.output.removesuffix(_ROWS_SUFFIX) + suffix
    check_target(table, force=targets.force)
    return replace(targets, table=table)


def format_of_rows(name: str) -> str | None:
    """Return the format of a table of rows by its name; None for other names."""
    found = FORMATS_BY_SUFFIX.get(PurePosixPath(name).suffix.lower())
    return found if found in {"csv", "parquet"} else None


def is_table_name(name: str) -> bool:
    """Return whether a file name is a table's; `.jsonl` files contain rows."""
    suffix = PurePosixPath(name).suffix.lower()
    return suffix in FORMATS_BY_SUFFIX and suffix != _ROWS_SUFFIX


def check_table_of_rows(batch: Batch, name: str, errors: str | None) -> None:
    """Raise Refused for a table that the rows of a batch without one cannot be written to."""
    if format_of_rows(name) is None:
        raise Refused(
            f"{batch.id} has no table, only rows: pass -o a .jsonl, .csv or .parquet file name"
        )
    if errors is not None:
        raise Refused("a table contains the errors of failed rows: remove -e")


def _check_format(batch: Batch, output: str, suffix: str | None) -> None:
    if suffix is None:
        check_table_of_rows(batch, output, None)
        return
    named = PurePosixPath(output).suffix.lower()
    if FORMATS_BY_SUFFIX[named] != FORMATS_BY_SUFFIX.get(suffix):
        raise Refused(
            f"the table of {batch.id} is a {suffix} file, not {named}: pass -o a {suffix} file name"
        )
