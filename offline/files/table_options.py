"""Options of a table: its recipe, and the output for its results."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..arguments.calibration_flags import NAMES
from ..arguments.dataset_id import DatasetId, dataset_of
from ..arguments.recipe_flags import find_recipe_file, path_next_to_table, recipe_of
from ..console.errors import Refused
from ..extras import require_extras
from .paths import is_path
from .s3_object import is_s3

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
ECHO_OF_TABLE: Final = (
    "--echo-fields is not supported for tables: --keep copies columns to the output"
)
_UNWRITABLE: Final = {
    ".xlsx": "an Excel workbook",
    ".xlsm": "an Excel workbook",
    ".xlsb": "an Excel workbook",
    ".xls": "an Excel workbook",
    ".ods": "an OpenDocument spreadsheet",
    ".json": "one JSON document",
    ".xml": "an XML document",
    ".html": "an HTML document",
    ".orc": "an ORC table",
    ".avro": "an Avro file",
    ".sqlite": "a database",
    ".db": "a database",
}
_COMPRESSED: Final = frozenset({".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".7z"})
_HIDDEN = (".", "_")


@dataclass(frozen=True, slots=True)
class TableOptions:
    """A table's recipe, its keys, and the path and format of its results.

    `dataset` is the ID of a table from the Hugging Face hub, and `recipe_file` the file that
    flags may override.
    """

    recipe: Recipe
    recipe_keys: Mapping[str, Any]
    output: Path
    output_format: TableFormat
    dataset: DatasetId | None = None
    recipe_file: Path | None = None

    def batch_keys(self) -> dict[str, Any]:
        """Return the recipe's keys for a deployment, with the format of the results.

        They contain the calibration that they name. Raises Refused for a recipe that deployments do
        not support.
        """
        plan = self.recipe.calibration
        if plan is not None and plan.gold_file is not None:
            raise Refused(
                "--gold FILE is not supported for batches: name a column of the table, or "
                "calibrate the fetched table with `tidemill calibrate`"
            )
        keys = {**self.recipe_keys, "output": self.output_format}
        if plan is not None and plan.saved is not None:
            keys["calibration"] = plan.saved.as_json()
        return keys

    def print_recipe(self) -> str:
        """Return these keys as a document for a drop; raises Refused for a long one, too."""
        from tidemill.batch.table.drop_recipe import MAX_BYTES
        from tidemill.batch.table.recipe import print_recipe

        keys = self.batch_keys()
        if (size := len((text := print_recipe(keys)).encode())) > MAX_BYTES:
            raise Refused(
                f"the recipe has {size:,} bytes, but at most {MAX_BYTES:,} are supported for "
                "batches: shorten it, or use a calibration of `platt` or `batch`"
            )
        return text


def table_options(
    arguments: argparse.Namespace,
    file: str,
    output_file: str | None,
    *,
    is_written: bool = True,
    more_extras: Sequence[str] = (),
) -> TableOptions | None:
    """Return the options of a table; None if there is no recipe for the file.

        `more_extras` are the command's extras in addition to the table's. Raises Refused for an
    invalid recipe, or if a table `is_written` and the output is not a file; CliError for
    missing extras.
    """
    dataset = dataset_of(arguments, file)
    found = recipe_of(arguments, file)
    if found is None:
        if dataset is not None:
            raise Refused(
                f"{file} is a table, which requires a recipe: pass --prompt or --recipe FILE"
            )
        return None
    recipe, keys = found
    _require_reader(file, dataset, more_extras)
    recipe_file = find_recipe_file(arguments, file)
    if not keys.keys().isdisjoint(NAMES):
        from .calibration_file import calibrated  # late: few tables are calibrated

        recipe = calibrated(recipe, keys, Path() if recipe_file is None else recipe_file.parent)
    if output_file is not None and is_written:
        check_table_name(output_file, arguments.output_format)
    by_name = None if output_file is None else format_of(output_file)
    form: Any = (
        arguments.output_format or by_name or recipe.output or _input_format(file) or "parquet"
    )
    has_name = dataset is not None or is_path(file)
    if is_written and not (has_name if output_file is None else is_path(output_file)):
        raise Refused("a table requires an output file: pass -o")
    if output_file is None:
        output_file = str(path_next_to_table(file, f".output.{form}"))
    return TableOptions(recipe, keys, Path(output_file), form, dataset, recipe_file)


def _require_reader(file: str, dataset: DatasetId | None, more: Sequence[str]) -> None:
    """Raise CliError if `more` extras, or those for reading this kind of table, are missing."""
    if dataset is not None:
        require_extras("a Hugging Face dataset", "tables", "datasets", *more)
    elif (kind := lake_of(Path(file))) is not None:
        require_extras(f"reading {kind} tables", "tables", kind.lower(), *more)
    else:
        require_extras("a table", "tables", *more)


def check_table_name(name: str, requested: str | None = None) -> None:
    """Raise Refused for a table's output that is a directory, or has an unsupported suffix.

    The suffix determines the format, unless a flag has `requested` one.
    """
    if is_path(name) and Path(name).is_dir():
        raise Refused(f"the output {name} is a directory: give the path of a file in it")
    _refuse_compressed(name)
    unwritable = _UNWRITABLE.get(_suffix(name))
    if unwritable is not None and requested is None:
        raise Refused(
            f"the output {name} has the name of {unwritable}, which cannot be written: use "
            ".csv, .tsv, .parquet, .arrow or .jsonl (one JSON object per row)"
        )


def check_rows_names(*names: str | None, input_file: str = "") -> None:
    """Raise Refused for an output of JSONL rows with the suffix of another format.

    An input with the suffix of a table is not checked here: its error is the missing recipe.
    """
    if format_of(input_file) not in {None, "jsonl"}:
        return
    for name in filter(None, names):
        _refuse_compressed(name)
        suffix = _suffix(name)
        is_jsonl = FORMATS_BY_SUFFIX.get(suffix, "jsonl") == "jsonl"
        if not is_jsonl or (suffix in _UNWRITABLE and suffix != ".json"):
            raise Refused(
                f"the output {name} would contain JSONL rows, but has another suffix: use "
                f"{name.removesuffix(Path(name).suffix)}.jsonl"
            )


def _refuse_compressed(name: str) -> None:
    suffix = _suffix(name)
    if suffix in _COMPRESSED:
        plain = name.removesuffix(Path(name).suffix)
        raise Refused(
            f"the output {name} has the suffix of a compressed file, but outputs are not "
            f"compressed: use {plain}"
        )


def _suffix(name: str) -> str:
    return Path(name).suffix.lower() if is_path(name) or is_s3(name) else ""


def format_of(name: str) -> Any:
    """Return the format of a file by its suffix, or of the first table in a folder."""
    path = Path(name)
    if lake_of(path) is not None:
        return "parquet"
    if path.is_dir():
        return next((format_of(each.name) for each in table_files(path)), None)
    return FORMATS_BY_SUFFIX.get(Path(path.name.removesuffix(".gz")).suffix.lower())


def _input_format(name: str) -> Any:
    """Return the output format for an input by its suffix; JSON lines for a JSON array."""
    is_array = Path(name.removesuffix(".gz")).suffix.lower() == ".json"
    return "jsonl" if is_array else format_of(name)


def lake_of(folder: Path) -> Literal["Delta", "Iceberg"] | None:
    """Return the format of a folder with a table's log; None for other paths."""
    if (folder / "_delta_log").is_dir():
        return "Delta"
    is_iceberg = next((folder / "metadata").glob("*.metadata.json"), None) is not None
    return "Iceberg" if is_iceberg else None


def table_files(folder: Path) -> Iterator[Path]:
    """Yield the tables in a folder by name, except hidden ones."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        is_hidden = any(part.startswith(_HIDDEN) for part in parts)
        if not is_hidden and path.is_file() and format_of(path.name) is not None:
            yield path
