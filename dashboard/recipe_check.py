"""Check of a table by the prompt or questions in the form."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tidemill.batch.file.lines import RawLine
from tidemill.batch.table.errors import RecipeError
from tidemill.batch.table.questions import check_free_columns
from tidemill.batch.table.recipe import Recipe, parse_recipe
from tidemill.batch.table.request_template import RequestTemplate

from .checked_file import CheckOptions, FileCheck
from .line_check import check_lines, in_words_of_form

_MAX_RENDERED: Final = 200
RENDER_SECONDS: Final = 2.0
"""Limit for the rows of a table; a slow template may need a fifth of a second for each."""


def check_recipe(
    check: FileCheck,
    options: CheckOptions,
    cells: Mapping[str, Sequence[Any]],
    num_rows: int,
    *,
    is_whole: bool,
) -> FileCheck:
    """Return the check of a table's rows, rendered by its recipe."""
    try:
        recipe, template = compiled_recipe(options, [*cells])
    except RecipeError as exc:
        return replace(check, errors=(recipe_sentence(exc),), num_errors=1)
    num_rendered = min(num_rows, _MAX_RENDERED)
    read = {name: cells[name][:num_rendered] for name in template.columns}
    rendered = in_time(template.lines(read, num_rendered, 1))
    raw = [RawLine(number, line.rstrip(b"\n")) for number, line in enumerate(rendered, 1)]
    is_all = is_whole and len(raw) == num_rows
    checked = check_lines(check, raw, options, is_whole=is_all)
    return replace(checked, endpoint=recipe.url, endpoints=(recipe.url,))


def compiled_recipe(options: CheckOptions, names: Sequence[str]) -> tuple[Recipe, RequestTemplate]:
    """Return the recipe in the form and its template for a table; raises RecipeError."""
    recipe = parse_recipe(options.recipe or {}, may_escalate=True)
    template = RequestTemplate(recipe, names)
    check_free_columns(recipe.questions, names if recipe.keep is None else recipe.keep)
    return recipe, template


def in_time(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines until they have taken too long, at least one."""
    until = time.monotonic() + RENDER_SECONDS
    for line in lines:
        yield line
        if time.monotonic() > until:
            return


def recipe_sentence(error: RecipeError) -> str:
    """Return the error of a recipe as a sentence about the form."""
    text = in_words_of_form(str(error))
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('?') else '.'}"
