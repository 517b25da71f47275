"""Constant prompt: the warning that a recipe renders the same prompt for every row."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from tidemill.batch.column_spelling import expression_of
from tidemill.batch.table.recipe import Recipe
from tidemill.batch.table.request_template import RequestTemplate

from ..console.terminal import log

_SINGLE_BRACES: Final = re.compile(r"(?<!\{)\{\s*([^{}]+?)\s*\}(?!\})")
_MAX_NAMED: Final = 5


def warn_of_constant_prompt(
    template: RequestTemplate, recipe: Recipe, names: Sequence[str], table: str
) -> None:
    """Warn about a recipe that uses no column; suggest double braces for single ones."""
    if template.has_prompt_column:
        return
    texts = json.dumps(dict(recipe.fields), ensure_ascii=False, default=str)
    found = next((name for name in _SINGLE_BRACES.findall(texts) if name in names), None)
    column = next((name for name in names if name != recipe.id), names[0])
    named = ", ".join(names[:_MAX_NAMED]) + (", …" if len(names) > _MAX_NAMED else "")
    hint = f"insert a column with {expression_of(column)}"
    if found is not None:
        hint = f"write {expression_of(found)} instead of {{{found}}}"
    log(
        f"warning: the prompt uses no column of {table}, so all rows get the same request: {hint} "
        f"(columns: {named})"
    )
