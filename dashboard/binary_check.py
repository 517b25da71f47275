"""Check of a Parquet or Arrow table, most of whose bytes are still in the browser."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from pydantic_core import to_json

from tidemill.batch.file.expected_tokens import ExpectedTokens, expected_tokens
from tidemill.batch.file.lines import RawLine
from tidemill.batch.table.arrow_cells import ArrowCells
from tidemill.batch.table.errors import NotReadHere, RecipeError, TableError
from tidemill.batch.table.parquet_cells import first_bytes, first_cells
from tidemill.batch.table.parquet_sizes import Footer, read_footer
from tidemill.batch.table.recipe import Recipe, TableFormat, parse_recipe
from tidemill.batch.table.request_template import RequestTemplate
from tidemill.protocol.validation import printable

from .checked_file import (
    TABLE_KINDS,
    BytesMissing,
    CheckOptions,
    FileCheck,
    FileStart,
    table_check,
    times,
)
from .line_check import MAX_SHOWN, check_lines
from .recipe_check import RENDER_SECONDS, compiled_recipe, in_time, recipe_sentence

_MAX_RANGE_BYTES: Final = 3 * 2**19
"""Limit for the parts of a file that a browser sends, because the body has one."""


class _Columns(NamedTuple):
    """Columns of a table, None if they are unknown, and a function of the first cells of one."""

    names: Sequence[str] | None
    first: Callable[[str], list[Any]]
    footer: Footer | None = None


def check_binary(start: FileStart, form: TableFormat, options: CheckOptions) -> FileCheck:
    """Return the check of a table by its columns and its first cells."""
    check = FileCheck(kind=TABLE_KINDS[form], needs_recipe=options.recipe is None)
    try:
        table = _arrow(start) if form == "arrow" else _parquet(start)
    except BytesMissing as exc:
        return replace(check, is_table=True, ranges=(exc.range,))
    if table.footer is not None:
        check = replace(check, num_rows=table.footer.num_rows, is_exact=True)
    check = table_check(check, table.names or ())
    if table.names is None:
        words = "Its columns are not known before the upload: check their spelling."
        check = replace(check, notes=[words])
    if options.recipe is None:
        return check
    lines: Sequence[bytes] = ()
    try:
        if table.names is None:
            recipe = parse_recipe(options.recipe, may_escalate=True)
        else:
            recipe, template = compiled_recipe(options, table.names)
            check, lines = _first_lines(check, template, table, start)
    except RecipeError as exc:
        return replace(check, errors=(recipe_sentence(exc),), num_errors=1)
    checked = _checked(check, options, recipe, lines)
    if table.footer is None:
        return replace(checked, expected=None)
    return replace(checked, expected=_expected(recipe, table.footer, template.columns))


def _parquet(start: FileStart) -> _Columns:
    """Return the columns in the footer of a Parquet table; raises TableError."""
    tail = start.tail or start.head
    if not tail.endswith(b"PAR1"):
        raise TableError("The Parquet table is truncated: it does not end with `PAR1`.")
    footer = read_footer(io.BytesIO(tail))
    if footer is None:
        return _Columns(None, lambda _: [])
    if not footer.num_rows:
        raise TableError("The table has no rows.")

    def first(column: str) -> list[Any]:
        cells = first_cells(footer, column, start.read(*first_bytes(footer, column)))
        return cells[: footer.num_rows]

    return _Columns(footer.columns(), first, footer)


def _arrow(start: FileStart) -> _Columns:
    """Return the columns in the schema of an Arrow table; raises TableError, BytesMissing."""
    cells = ArrowCells(start.read, start.num_bytes)
    return _Columns(cells.names, partial(cells.first, count=MAX_SHOWN))


def _checked(
    check: FileCheck, options: CheckOptions, recipe: Recipe, lines: Sequence[bytes]
) -> FileCheck:
    """Return the check of the first requests, or of one with the parameters of the recipe."""
    numbered = enumerate(lines or [_parameters(recipe)], 1)
    raw = [RawLine(number, each.rstrip(b"\n")) for number, each in numbered]
    checked = check_lines(check, raw, options, is_whole=True)
    requests = checked.requests if lines else ()
    return replace(checked, requests=requests, num_rows=check.num_rows, num_read=len(lines))


def _parameters(recipe: Recipe) -> bytes:
    """Return a request with the parameters of a recipe, and without a row."""
    body = {**recipe.fields, **recipe.body_params}
    return to_json({"custom_id": "1", "url": recipe.url, "body": body})


def _expected(recipe: Recipe, footer: Footer, columns: Sequence[str]) -> ExpectedTokens:
    """Return the tokens of all rows, by the sizes of the columns."""
    num_bytes = sum(
        chunk.unpacked for group in footer.chunks for chunk in group if chunk.path[0] in columns
    )
    size = len(_parameters(recipe)) + num_bytes // max(1, footer.num_rows)
    each = expected_tokens(recipe.url, {**recipe.fields, **recipe.body_params}, size)
    return times(each, footer.num_rows)


def _first_lines(
    check: FileCheck, template: RequestTemplate, table: _Columns, start: FileStart
) -> tuple[FileCheck, Sequence[bytes]]:
    """Return the requests of the first rows, or a check that says what is missing for them."""
    cells: dict[str, list[Any]] = {}
    missing: list[tuple[int, int]] = []
    until = time.monotonic() + RENDER_SECONDS
    for column in template.columns:
        if time.monotonic() > until:
            return _without_lines(check, "the columns of the prompt take too long"), ()
        try:
            cells[column] = table.first(column)
        except BytesMissing as exc:
            missing.append(exc.range)
        except NotReadHere as exc:
            return _without_lines(check, str(exc)), ()
    given = sum(map(len, start.parts.values()))
    if given + sum(end - begin for begin, end in missing) > _MAX_RANGE_BYTES:
        return _without_lines(check, "the columns of the prompt are too large"), ()
    if missing:
        return replace(check, ranges=[*dict.fromkeys(missing)]), ()
    num_rows = min([MAX_SHOWN, *map(len, cells.values())])
    read = {name: values[:num_rows] for name, values in cells.items()}
    return check, [*in_time(template.lines(read, num_rows, 1))]


def _without_lines(check: FileCheck, reason: str) -> FileCheck:
    note = f"No prompts are shown before the upload: {printable(reason, 300)}."
    return replace(check, notes=[*check.notes, note])
