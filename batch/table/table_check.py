"""Table check: finds all problems of a recipe with a table before any request is rendered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import pyarrow as pa
from pyarrow import types

from .cells import TypeProblem, children_of, problem_of
from .errors import RecipeError
from .recipe import Recipe, TableFormat
from .request_template import RequestTemplate
from .result_columns import ALL_COLUMNS, ResultColumns, kept_columns
from .stored_types import as_stored, storage_problem, stored_type

_MAX_TYPE_CHARS: Final = 80

ReadColumns = Callable[[Sequence[str]], Iterable[pa.RecordBatch]]
"""A function that returns the batches of some columns of a table, from its first row on."""


def checked_template(
    recipe: Recipe, schema: pa.Schema, form: TableFormat | None, read: ReadColumns | None = None
) -> RequestTemplate:
    """Return the template of a recipe for a table whose results are written in a format.

    The format is None if the results are not a file. Raises RecipeError for unsupported names and
    types and, if the columns can be read, unsupported times.
    """
    template = RequestTemplate(recipe, schema.names)
    kept = kept_columns(recipe, schema)
    ResultColumns(recipe, kept, ALL_COLUMNS)
    check_cells(template, schema)
    if recipe.calibration is not None:
        from .table_calibration import check_gold  # late: few recipes have one

        check_gold(recipe, kept.names, template.columns, schema, read)
    if form is not None:
        for field in kept:
            _refuse(field.name, field.type, storage_problem(field.type, form))
    if form == "parquet" and read is not None:
        _check_seconds(kept, read)
    return template


def check_cells(template: RequestTemplate, schema: pa.Schema) -> None:
    """Raise RecipeError for a column in the template whose cells have no value."""
    for name in template.columns:
        kind = schema.field(name).type
        _refuse(name, kind, problem_of(kind))


def _refuse(name: str, kind: pa.DataType, problem: TypeProblem | None) -> None:
    if problem is not None:
        verb = "is" if problem.kind == kind else "contains"
        shown = str(problem.kind)
        if len(shown) > _MAX_TYPE_CHARS:
            shown = f"{shown[: _MAX_TYPE_CHARS - 1]}…"
        raise RecipeError(f"column `{name}` {verb} {shown}, {problem.reason}")


def _check_seconds(kept: pa.Schema, read: ReadColumns) -> None:
    """Raise RecipeError for a time in seconds with too many milliseconds for Parquet."""
    fields = [field for field in kept if _has_seconds(field.type)]
    if not fields:
        return
    number = 1
    for batch in read([field.name for field in fields]):
        for field, column in zip(fields, batch.columns, strict=True):
            try:
                as_stored(column, stored_type(field.type, "parquet"))
            except pa.ArrowInvalid as exc:
                raise RecipeError(
                    f"column `{field.name}` has a time at row {number:,} or after it that Parquet "
                    "does not support: use `arrow` or `jsonl` as the output format, or remove "
                    "the column from `keep`"
                ) from exc
        number += batch.num_rows


def _has_seconds(kind: pa.DataType) -> bool:
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _has_seconds(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _has_seconds(kind.storage_type)
    if types.is_nested(kind):
        return any(map(_has_seconds, children_of(kind)))
    return bool(types.is_timestamp(kind) and kind.unit == "s")
