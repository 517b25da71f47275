"""Flags of tables: the recipe that makes requests of rows, from a file and from flags."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..console.errors import Refused
from ..console.terminal import log
from .dataset_id import DatasetId, is_dataset

if TYPE_CHECKING:
    from tidemill.batch.table.recipe import Recipe

FORMATS: Final = ("parquet", "csv", "tsv", "jsonl", "arrow")
_RECIPE_SUFFIX = ".recipe.toml"
_TEMPLATES = ("prompt", "messages")


def add_recipe_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a recipe."""
    group = parser.add_argument_group("tables: Parquet, CSV, TSV, Arrow, rows of JSON")
    add = group.add_argument
    add(
        "--recipe",
        metavar="FILE",
        help="a TOML file (default: TABLE.recipe.toml beside the table); flags go before it",
    )
    add(
        "--prompt",
        metavar="TEMPLATE",
        help="what to ask of each row, in Jinja with its columns: 'Label this: {{ text }}'",
    )
    add("--system", metavar="TEMPLATE", help="a system message for each row, likewise")
    add("--url", metavar="URL", help="what the requests are for (default: /v1/chat/completions)")
    add("--id", metavar="COLUMN", help="column of custom ids (default: the row's number)")
    add("--keep", metavar="COLUMNS", help="columns in the output, by commas (default: all)")
    add(
        "--output-format",
        choices=FORMATS,
        help="of the output (default: by the name of -o, else that of the input)",
    )


def has_recipe(arguments: argparse.Namespace, file: str) -> bool:
    """Say whether a flag or a file gives a recipe."""
    return bool(arguments.recipe or arguments.prompt or (file and _recipe_beside(file)))


def recipe_of(arguments: argparse.Namespace, file: str) -> tuple[Recipe, dict[str, Any]] | None:
    """Return the recipe for a file, and its keys; None where neither a flag nor a file gives one.

    Raises Refused for one that cannot work.
    """
    flags = _flags_of(arguments)
    path = Path(arguments.recipe) if arguments.recipe else _recipe_beside(file)
    if path is None and not flags:
        return None
    if path is None and not any(name in flags for name in _TEMPLATES):
        given = ", ".join(f"--{'output-format' if name == 'output' else name}" for name in flags)
        raise Refused(
            f"{given} is for tables, and there is no recipe: give --prompt, or "
            f"{recipe_path(file).name} beside the table"
        )
    # Late imports: only tables need these.
    from tidemill.batch.table.errors import RecipeError
    from tidemill.batch.table.recipe import load_recipe, parse_recipe

    try:
        keys: dict[str, Any] = {}
        if path is not None:
            keys = load_recipe(path.read_text(encoding="utf-8"))
            if not arguments.recipe:
                log(f"the recipe is {path}")
        if "prompt" in flags:
            for name in _TEMPLATES:
                keys.pop(name, None)
        keys |= flags
        return parse_recipe(keys), keys
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not UTF-8"
        raise Refused(f"the recipe {path} cannot be read: {reason}") from exc
    except RecipeError as exc:
        raise Refused(f"the recipe {path or 'of the flags'} cannot work: {exc}") from exc


def path_beside_table(name: str, ending: str) -> Path:
    """Return the path beside a table that has its name with another ending.

    Of a dataset it is in the working folder.
    """
    if is_dataset(name):
        return Path(DatasetId.parse(name).name + ending)
    path = Path(name)
    if path.name in {"", ".."}:  # `.` and the like have a name in their parents alone
        path = path.resolve()
    stem = path.name if path.is_dir() else Path(path.name.removesuffix(".gz")).stem
    return path.parent / f"{stem}{ending}"


def recipe_path(file: str) -> Path:
    """Return the path of the recipe beside a table."""
    return path_beside_table(file, _RECIPE_SUFFIX)


def _recipe_beside(file: str) -> Path | None:
    if "://" in file or file == "-":
        return None
    path = recipe_path(file)
    return path if path.is_file() else None


def _flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(arguments, name) for name in ("prompt", "system", "url", "id")}
    given["output"] = arguments.output_format
    if arguments.keep is not None:
        given["keep"] = [name.strip() for name in arguments.keep.split(",") if name.strip()]
    return {name: value for name, value in given.items() if value is not None}
