"""Options of a table: its recipe, and where its results go."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..arguments.dataset_id import DatasetId, dataset_of
from ..arguments.recipe_flags import path_beside_table, recipe_of
from ..console.errors import Refused
from ..extras import require_extras
from .paths import is_path

if TYPE_CHECKING:
    from tidemill.batch.table.recipe import Recipe, TableFormat

FORMATS_BY_SUFFIX: Final = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".arrow": "arrow",
    ".arrows": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}


_HIDDEN = (".", "_")


@dataclass(frozen=True, slots=True)
class TableOptions:
    """A table's recipe, its keys, and where its results go: a path, and the format there.

    `dataset` is what the table is of the hub, if it is from there.
    """

    recipe: Recipe
    recipe_keys: Mapping[str, Any]
    output: Path
    output_format: TableFormat
    dataset: DatasetId | None = None


def table_options(
    arguments: argparse.Namespace, file: str, output_file: str | None, *, is_written: bool = True
) -> TableOptions | None:
    """Return the options of a table; None where nothing gives a recipe for the file.

    Raises Refused for a recipe that cannot work, or an output that is no file if one `is_written`;
    CliError where an extra is missing.
    """
    dataset = dataset_of(arguments, file)
    found = recipe_of(arguments, file)
    if found is None:
        if dataset is not None:
            raise Refused(f"{file} is a table: say by --prompt, or --recipe FILE, what to ask")
        return None
    recipe, keys = found
    _require_reader(file, dataset)
    by_name = None if output_file is None else format_of(output_file)
    form: Any = (
        arguments.output_format or by_name or recipe.output or _input_format(file) or "parquet"
    )
    has_name = dataset is not None or is_path(file)
    if is_written and not (has_name if output_file is None else is_path(output_file)):
        raise Refused("a table is written to a file: name one with -o")
    if output_file is None:
        output_file = str(path_beside_table(file, f".output.{form}"))
    return TableOptions(recipe, keys, Path(output_file), form, dataset)


def _require_reader(file: str, dataset: DatasetId | None) -> None:
    """Raise CliError when an extra is missing that reads a table of this kind."""
    if dataset is not None:
        require_extras("a dataset of Hugging Face", "tables", "datasets")
    elif (kind := lake_of(Path(file))) is not None:
        require_extras(f"a table of {kind}", "tables", kind.lower())
    else:
        require_extras("a table", "tables")


def format_of(name: str) -> Any:
    """Return the format that a file's name tells, or that of the first file in a folder."""
    path = Path(name)
    if lake_of(path) is not None:
        return "parquet"
    if path.is_dir():
        return next((format_of(each.name) for each in table_files(path)), None)
    return FORMATS_BY_SUFFIX.get(Path(path.name.removesuffix(".gz")).suffix.lower())


def _input_format(name: str) -> Any:
    """Return the output format for an input by its name; for a JSON array that is JSON lines."""
    is_array = Path(name.removesuffix(".gz")).suffix.lower() == ".json"
    return "jsonl" if is_array else format_of(name)


def lake_of(folder: Path) -> Literal["Delta", "Iceberg"] | None:
    """Return the format of a folder that is one table by its log; None for other paths."""
    if (folder / "_delta_log").is_dir():
        return "Delta"
    is_iceberg = next((folder / "metadata").glob("*.metadata.json"), None) is not None
    return "Iceberg" if is_iceberg else None


def table_files(folder: Path) -> Iterator[Path]:
    """Yield the tables in a folder by name, but for hidden ones."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_hidden = any(part.startswith(_HIDDEN) for part in parts)
        if not is_hidden and path.is_file() and format_of(path.name) is not None:
            yield path
