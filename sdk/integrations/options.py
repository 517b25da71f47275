"""Keyword arguments of integrations, validated and split into engine options and recipe keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Final

from tidemill.batch.column_spelling import expression_of
from tidemill.batch.table.recipe_keys import RECIPE_KEYS
from tidemill.offline.console.errors import CliError
from tidemill.offline.engine.options import EngineOptions
from tidemill.offline.extras import require_extras

from ..engine import Questions, options_of
from ..errors import TidemillError

ENGINE_OPTIONS: Final = tuple(option.name for option in fields(EngineOptions))


def require(what: str, *extras: str) -> None:
    """Raise TidemillError when a module of these extras is missing."""
    try:
        require_extras(what, *extras)
    except CliError as exc:
        raise TidemillError(str(exc)) from exc


def split_options(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of an engine and the keys of a recipe; raises TidemillError."""
    for name in given:
        if name not in ENGINE_OPTIONS and name not in RECIPE_KEYS:
            near = get_close_matches(name, (*RECIPE_KEYS, *ENGINE_OPTIONS), n=1)
            hint = f": did you mean `{near[0]}`?" if near else ""
            raise TidemillError(f"`{name}` is neither a recipe key nor an engine option{hint}")
    options = {name: value for name, value in given.items() if name in ENGINE_OPTIONS}
    check_options(options)
    recipe = {name: value for name, value in given.items() if name in RECIPE_KEYS}
    return options, {name: value for name, value in recipe.items() if value is not None}


def decision_keys(column: str, questions: Questions) -> dict[str, Any]:
    """Return the keys of a recipe with questions about a column; raises TidemillError."""
    if not isinstance(column, str):
        raise TidemillError(f"`input` must be the name of a column; got a {type(column).__name__}")
    if not questions:
        raise TidemillError("`questions` is empty: add one, such as 'damaged: Is an item damaged?'")
    is_one = isinstance(questions, (str, Mapping))
    return {"input": expression_of(column), "questions": [questions] if is_one else questions}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise TidemillError for an unknown engine option or an invalid value."""
    try:
        options_of(options)
    except CliError as exc:
        raise TidemillError(str(exc)) from exc
