"""Check of a Parquet or Arrow table, most of whose bytes are still in the browser."""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pydantic_core import to_json

from tidemill.batch.file.expected_tokens import expected_tokens
from tidemill.batch.file.lines import RawLine
from tidemill.batch.table.errors import RecipeError, TableError
from tidemill.batch.table.parquet_cells import NotReadHere, first_bytes, first_cells
from tidemill.batch.table.parquet_sizes import Footer, read_footer
from tidemill.batch.table.recipe import TableFormat, parse_recipe
from tidemill.batch.table.request_template import RequestTemplate
from tidemill.protocol.validation import printable

from .checked_file import TABLE_KINDS, CheckOptions, FileCheck, FileStart, table_check, times
from .line_check import MAX_SHOWN, check_lines
from .recipe_check import RENDER_SECONDS, compiled_recipe, in_time, recipe_sentence

_MAX_RANGE_BYTES: Final = 3 * 2**19
"""Limit for the parts of a file that a browser sends, because the body has one."""


def check_binary(start: FileStart, form: TableFormat, options: CheckOptions) -> FileCheck:
    """Return the check of a Parquet or Arrow table, whose cells are not read here."""
    notes = (
        ["The rows of Arrow tables are read only after the upload, so no prompts are shown."]
        if form == "arrow"
        else []
    )
    check, footer, names = FileCheck(kind=TABLE_KINDS[form]), None, None
    if form == "parquet":
        tail = start.tail or start.head
        if not tail.endswith(b"PAR1"):
            raise TableError("The Parquet table is truncated: it does not end with `PAR1`.")
        footer = read_footer(io.BytesIO(tail))
        if footer is not None:
            names = footer.columns()
            check = replace(check, num_rows=footer.num_rows, is_exact=True)
            if not footer.num_rows:
                raise TableError("The table has no rows.")
    check = table_check(check, names or ())
    if names is None:
        notes.append("Its columns are not known before the upload: check their spelling.")
    check = replace(check, notes=notes, needs_recipe=options.recipe is None)
    if options.recipe is None:
        return check
    return _check_blind(check, options, names, footer, start.parts)


def _check_blind(
    check: FileCheck,
    options: CheckOptions,
    names: Sequence[str] | None,
    footer: Footer | None,
    parts: Mapping[int, bytes],
) -> FileCheck:
    """Return the check of a recipe by a request with its parameters, and by the first rows.

    The first rows are those of a Parquet table whose first bytes of the columns are in `parts`.
    """
    columns: Sequence[str] = ()
    lines: Sequence[bytes] = ()
    try:
        if names is None:
            recipe = parse_recipe(options.recipe or {}, may_escalate=True)
        else:
            recipe, template = compiled_recipe(options, names)
            columns = template.columns
            if footer is not None:
                check, lines = _first_lines(check, template, footer, parts)
    except RecipeError as exc:
        return replace(check, errors=(recipe_sentence(exc),), num_errors=1)
    body = {**recipe.fields, **recipe.body_params}
    line = to_json({"custom_id": "1", "url": recipe.url, "body": body})
    raw = [RawLine(number, each.rstrip(b"\n")) for number, each in enumerate(lines or [line], 1)]
    checked = check_lines(check, raw, options, is_whole=True)
    expected = None
    if footer is not None:
        cells = sum(
            chunk.unpacked for group in footer.chunks for chunk in group if chunk.path[0] in columns
        )
        each = expected_tokens(body, len(line) + cells // max(1, footer.num_rows))
        expected = times(each, footer.num_rows)
    requests = checked.requests if lines else ()
    counts: dict[str, Any] = {"num_rows": check.num_rows, "num_read": len(lines)}
    return replace(checked, requests=requests, expected=expected, **counts)


def _first_lines(
    check: FileCheck, template: RequestTemplate, footer: Footer, parts: Mapping[int, bytes]
) -> tuple[FileCheck, Sequence[bytes]]:
    """Return the requests of the first rows, or a check that says what is missing for them."""
    try:
        ranges = [first_bytes(footer, column) for column in template.columns]
        if sum(end - start for start, end in ranges) > _MAX_RANGE_BYTES:
            return _without_lines(check, "the columns of the prompt are too large"), ()
        if any(start not in parts for start, _ in ranges):
            return replace(check, ranges=ranges), ()
        cells, until = {}, time.monotonic() + RENDER_SECONDS
        for column, (start, _) in zip(template.columns, ranges, strict=True):
            if time.monotonic() > until:
                return _without_lines(check, "the columns of the prompt take too long"), ()
            cells[column] = first_cells(footer, column, parts[start])
    except NotReadHere as exc:
        return _without_lines(check, str(exc)), ()
    num_rows = min([MAX_SHOWN, footer.num_rows, *map(len, cells.values())])
    read = {name: values[:num_rows] for name, values in cells.items()}
    return check, [*in_time(template.lines(read, num_rows, 1))]


def _without_lines(check: FileCheck, reason: str) -> FileCheck:
    note = f"No prompts are shown before the upload: {printable(reason, 300)}."
    return replace(check, notes=[*check.notes, note])
