"""Flags of tables: the recipe, from a file and flags, that turns rows into requests."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..console.errors import Refused
from ..console.terminal import log
from .argument_types import positive_int
from .calibration_flags import NAMES, add_calibration_flags, calibration_keys
from .dataset_id import DatasetId, is_dataset

if TYPE_CHECKING:
    from tidemill.batch.table.recipe import Recipe

# Also in `batch.table.questions`, which the help of a command does not load.
_LAYOUTS: Final = ("questions_first", "row_first")
FORMATS: Final = ("parquet", "csv", "tsv", "jsonl", "arrow")
_RECIPE_SUFFIX = ".recipe.toml"
_REQUESTS = ("prompt", "ask", "labels")
"""Flags that need no recipe file."""

# Fields of a request's body by the key of a recipe that has their meaning.
_FIELDS = {
    "confidence": "confidence",
    "permutations": "debias",
    "question_layout": "question_layout",
}


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a recipe."""
    group = parser.add_argument_group("tables: Parquet, CSV, TSV, Arrow, rows of JSON")
    add = group.add_argument
    add(
        "--recipe",
        metavar="FILE",
        help="read this TOML file, which flags override (default: TABLE.recipe.toml next to the "
        "table)",
    )
    add(
        "--prompt",
        metavar="TEMPLATE",
        help="render the prompt of each row from its columns, in Jinja: 'Label this: {{ text }}'",
    )
    add("--system", metavar="TEMPLATE", help="render a system message for each row, also in Jinja")
    add(
        "--ask",
        action="append",
        metavar="QUESTION",
        help="ask a question about each row (repeatable): 'damaged: Is an item damaged?', "
        "'team = billing|shipping: Which team?' or 'tone = calm<angry: How upset?'",
    )
    add(
        "--labels",
        metavar="LABELS",
        help="choose one of these comma-separated labels for each row; --prompt may explain them",
    )
    add(
        "--question-layout",
        choices=_LAYOUTS,
        help=f"set the order of the row and the questions in the prompt (default: {_LAYOUTS[0]})",
    )
    add(
        "--permutations",
        type=positive_int,
        metavar="N",
        help="read each question in N orders of its options, and take the mean (default: 1)",
    )
    add_calibration_flags(group)
    add(
        "--url",
        metavar="URL",
        help="set the requests' endpoint (default: /v1/chat/completions; with questions, "
        "/v1/decisions)",
    )
    add("--id", metavar="COLUMN", help="take custom IDs from this column (default: the row number)")
    add(
        "--keep",
        metavar="COLUMNS",
        help="copy these comma-separated columns to the output (default: all)",
    )
    add(
        "--confidence",
        action="store_const",
        const=True,
        help="add columns with the confidence of each field, of a schema, regex, choice or grammar",
    )
    add(
        "--output-format",
        choices=FORMATS,
        help="set the output's format (default: from the name of -o, or the input's format)",
    )


def has_recipe(arguments: argparse.Namespace, file: str) -> bool:
    """Return whether there is a recipe, from flags or a file."""
    has_flag = any(getattr(arguments, name) for name in _REQUESTS)
    return bool(arguments.recipe or has_flag or (file and _recipe_next_to(file)))


def only_calibrates(arguments: argparse.Namespace, file: str) -> bool:
    """Return whether flags calibrate the answers of a file without a recipe."""
    flags = _flags_of(arguments)
    return bool(flags) and flags.keys() <= {*NAMES} and find_recipe_file(arguments, file) is None


def find_recipe_file(arguments: argparse.Namespace, file: str) -> Path | None:
    """Return the recipe file of a table, from a flag or next to the table; None without one."""
    return Path(arguments.recipe) if arguments.recipe else _recipe_next_to(file)


def recipe_of(arguments: argparse.Namespace, file: str) -> tuple[Recipe, dict[str, Any]] | None:
    """Return the recipe for a file, and its keys; None without flags and recipe file.

    The recipe is not calibrated yet, because that may need files. Raises Refused for an invalid
    recipe.
    """
    flags = _flags_of(arguments)
    path = find_recipe_file(arguments, file)
    if path is None and not flags:
        return None
    if path is None and not any(name in flags for name in _REQUESTS):
        given = ", ".join(map(_flag_of, flags))
        fields = " and ".join(f"`{_FIELDS[name]}`" for name in flags if name in _FIELDS)
        raise Refused(
            f"{given} requires a recipe: pass --prompt or --ask, or create "
            f"{recipe_path(file).name} next to the table"
            + (f". Requests in a file have {fields} in their body instead" if fields else "")
        )
    # Imported late: only tables need these.
    from tidemill.batch.table.errors import RecipeError
    from tidemill.batch.table.recipe import load_recipe, overridden, parse_recipe
    from tidemill.batch.table.recipe_keys import CALIBRATION

    try:
        keys: dict[str, Any] = {}
        if path is not None:
            keys = load_recipe(path.read_text(encoding="utf-8"))
            if not arguments.recipe:
                log(f"using the recipe {path}")
        keys = overridden(keys, flags)
        plain = {name: value for name, value in keys.items() if name not in CALIBRATION}
        recipe = parse_recipe(plain, may_escalate=True)
        return replace(recipe, flags=frozenset(flags)), keys
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise Refused(f"the recipe {path} cannot be read: {reason}") from exc
    except RecipeError as exc:
        raise Refused(f"the recipe {path or 'from the flags'} is not valid: {exc}") from exc


def path_next_to_table(name: str, ending: str) -> Path:
    """Return the path next to a table with the same name and another ending.

    For a dataset, the path is in the working folder.
    """
    if is_dataset(name):
        return Path(DatasetId.parse(name).name + ending)
    path = Path(name)
    if path.name in {"", ".."}:  # `.` and `..` get their name from the resolved path
        path = path.resolve()
    stem = path.name if path.is_dir() else Path(path.name.removesuffix(".gz")).stem
    return path.parent / f"{stem}{ending}"


def recipe_path(file: str) -> Path:
    """Return the path of the recipe next to a table."""
    return path_next_to_table(file, _RECIPE_SUFFIX)


def _recipe_next_to(file: str) -> Path | None:
    if "://" in file or file == "-":
        return None
    path = recipe_path(file)
    return path if path.is_file() else None


def _flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("prompt", "system", "ask", "question_layout", "permutations", "url", "id")
    given = {name: getattr(arguments, name) for name in (*names, "confidence")}
    given["output"] = arguments.output_format
    for name in ("keep", "labels"):
        if (text := getattr(arguments, name)) is not None:
            items = [item.strip() for item in text.split(",")]
            given[name] = items if name == "labels" else [item for item in items if item]
    given |= calibration_keys(arguments)
    return {name: value for name, value in given.items() if value is not None}


def _flag_of(key: str) -> str:
    return "--output-format" if key == "output" else f"--{key.replace('_', '-')}"
