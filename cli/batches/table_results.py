"""Table results: fetched rows, ordered as their requests and written as a table."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tidemill.batch.table.result_rows import in_order
from tidemill.offline.console.terminal import log
from tidemill.offline.files.input_file import InputFile
from tidemill.offline.files.table_options import TableOptions
from tidemill.offline.files.table_output import write_table

from ..api.objects import Batch
from .table_targets import fetched_files


def make_table(options: TableOptions, requests: InputFile, batch: Batch) -> None:
    """Write the table of an ended batch from its fetched rows, and remove their files."""
    fetched = [path for name in fetched_files(options.output) if (path := Path(name)).exists()]
    if not fetched:
        return  # no row was produced
    rows = options.output.with_name(f"{options.output.name}.joined.jsonl")
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("rb")) for path in fetched]
            stack.enter_context(rows.open("wb")).writelines(in_order(requests.lines(), files))
        assert requests.table is not None
        write_table(
            requests.table,
            rows,
            options.output,
            options.output_format,
            labels_spans=batch.labels_spans,
        )
    finally:
        rows.unlink(missing_ok=True)
    for path in fetched:
        path.unlink()
    log(f"the table is in {options.output}")
