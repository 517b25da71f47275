"""Tables in Python programs: an engine answers their rows, and results are added as columns."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidemill.batch.table.errors import RecipeError, TableError
from tidemill.batch.table.reader import check_names, rendered
from tidemill.batch.table.recipe import Recipe, parse_recipe
from tidemill.batch.table.request_template import RequestTemplate
from tidemill.batch.table.result_columns import ResultColumns, ResultFacts
from tidemill.batch.table.result_rows import finished_columns, output_batches
from tidemill.batch.table.table_check import ReadColumns, checked_template
from tidemill.engine_process.frames import Row
from tidemill.offline.console.errors import CliError
from tidemill.offline.files.constant_prompt import warn_of_constant_prompt
from tidemill.offline.files.dataset_table import arrow_table_of
from tidemill.offline.files.table_input import TableInput
from tidemill.offline.files.table_requests import lines_with_media, media_folder_of

from .engine_process import EngineProcess
from .errors import TidemillError
from .in_flight import answers_to
from .progress import Progress, progress_of

_BATCH_ROWS = 1024


def answer_table(
    process: EngineProcess, table: Any, recipe: Mapping[str, Any], *, progress: bool
) -> pa.Table:
    """Return a table with columns of results; see `Engine.answer_table`."""
    given = _arrow_table(table)
    parsed, template, keep = compile_recipe(
        recipe, given.schema, lambda names: given.select(list(names)).to_batches()
    )
    warn_of_constant_prompt(template, parsed, given.schema.names, "the table")
    # With all columns, because a batch without columns has no number of rows.
    input_batches = given.to_batches(max_chunksize=_BATCH_ROWS)
    lines: Iterator[bytes] = (
        line for _, some in rendered(template, input_batches) for line in some
    )
    if (folder := _media_folder(table)) is not None:
        lines = lines_with_media(lines, folder)
    limit = process.max_inflight()
    with progress_of("rows", given.num_rows, is_wanted=progress) as shown:
        try:
            rows = list(_rows(process, lines, limit, shown))
        except TableError as exc:
            raise TidemillError(str(exc)) from exc
    if len(rows) != given.num_rows:
        raise TidemillError(f"the engine answered only {len(rows)} of {given.num_rows} rows")

    def read(columns: ResultColumns) -> Iterator[pa.RecordBatch]:
        return output_batches(columns, input_batches, iter(rows))

    labels_spans = process.info().labels_spans
    facts = ResultFacts.of_rows(rows, parsed, labels_spans=labels_spans)
    columns = finished_columns(parsed, given.select(keep).schema, facts, read)
    return pa.Table.from_batches(read(columns), columns.schema)


def compile_recipe(
    recipe: Mapping[str, Any], schema: pa.Schema, read: ReadColumns | None = None
) -> tuple[Recipe, RequestTemplate, list[str]]:
    """Return the parsed recipe, its template for a table with this schema, and the kept columns.

    Raises TidemillError for an invalid recipe and, if columns can be read, invalid gold answers.
    """
    try:
        check_names(schema.names)
        parsed = parse_recipe(with_calibration(recipe))
        template = checked_template(parsed, schema, None, read)
    except TableError as exc:
        raise TidemillError(str(exc)) from exc
    except RecipeError as exc:
        raise TidemillError(f"the recipe is not valid: {exc}") from exc
    return parsed, template, list(schema.names if parsed.keep is None else parsed.keep)


def with_calibration(recipe: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """Return a recipe with the content of the calibration file in `folder` that it names.

    Raises TidemillError for an unsuitable file.
    """
    if not isinstance(recipe.get("calibration"), str):
        return {**recipe}
    from tidemill.offline.files.calibration_file import saved_calibration  # late: few have one

    try:
        saved = saved_calibration(recipe, folder)
    except CliError as exc:
        raise TidemillError(str(exc)) from exc
    return {**recipe, "calibration": None if saved is None else saved.as_json()}


def _arrow_table(table: Any) -> pa.Table:
    """Return an Arrow table from a table, a path, or anything else that Arrow can read.

    A `datasets.Dataset` stays in its files. Raises TidemillError for other objects.
    """
    if isinstance(table, pa.Table):
        return table
    if isinstance(table, (str, os.PathLike)):
        return _read_table(os.fspath(table))
    if datasets := sys.modules.get("datasets"):
        if isinstance(table, datasets.Dataset):
            return arrow_table_of(table)
        if isinstance(table, datasets.DatasetDict):
            raise TidemillError(f"the dataset has splits ({', '.join(table)}): pass one of them")
    try:
        if isinstance(table, list) and all(isinstance(row, Mapping) for row in table):
            return pa.Table.from_pylist(table)
        return pa.table(_as_frame(table))
    except (pa.ArrowException, TypeError, ValueError) as exc:
        reason = str(exc).split("\n", 1)[0].rstrip(".")
        raise TidemillError(
            f"Arrow cannot read the table: {reason}. Pass a data frame, a list of dicts, a "
            'dict of columns such as {"text": texts}, or the path of a table'
        ) from exc


def _media_folder(table: Any) -> Path | None:
    """Return the folder of a table in a file, or the folder that is one; None for any other."""
    return media_folder_of(os.fspath(table)) if isinstance(table, (str, os.PathLike)) else None


def _read_table(name: str) -> pa.Table:
    """Return a table in a file or a folder."""
    try:
        with ExitStack() as stack:
            found = TableInput.open(name, Recipe(), tmp_dir=None, delays=(), stack=stack)
            return pa.Table.from_batches(found.batches(found.schema.names), found.schema)
    except CliError as exc:
        raise TidemillError(str(exc)) from exc


def _as_frame(table: Any) -> Any:
    """Return a Series of pandas or polars, or a LazyFrame, as a data frame."""
    kind = f"{type(table).__module__.partition('.')[0]}.{type(table).__name__}"
    if kind == "polars.LazyFrame":
        return table.collect()
    if kind not in {"pandas.Series", "polars.Series"}:
        return table
    if not table.name:
        raise TidemillError("the Series has no name for its column: pass `series.to_frame('text')`")
    return table.to_frame()


def _rows(
    process: EngineProcess, lines: Iterator[bytes], limit: int, shown: Progress
) -> Iterator[bytes]:
    """Yield the row of each line; raises EngineDied."""
    sent = (
        process.send_line(number, line.removesuffix(b"\n")) for number, line in enumerate(lines, 1)
    )
    for _, row in answers_to(sent, limit, in_order=True):
        assert isinstance(row, Row)
        shown.add(is_failed=not row.is_success)
        yield row.row
