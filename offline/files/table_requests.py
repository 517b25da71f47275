"""Requests of a table: its rows, rendered as the lines of an input file."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from tidemill.batch.file.formats import FileFormat
from tidemill.batch.table.errors import RecipeError, TableError
from tidemill.batch.table.reader import ParquetTable, rendered
from tidemill.batch.table.recipe import Recipe, TableFormat
from tidemill.batch.table.table_check import checked_template

from ..arguments.dataset_id import DatasetId
from ..console.errors import BadInput
from ..console.terminal import amount, log, size_words
from .constant_prompt import warn_of_constant_prompt
from .dataset_table import open_dataset
from .http_transfer import RETRY_DELAYS_SECONDS
from .input_file import InputFile
from .source import Source, temporary_file
from .table_input import TableInput

_SECONDS_PER_WORD = 5.0


def open_requests(
    name: str,
    recipe: Recipe,
    output_format: TableFormat | None,
    *,
    tmp_dir: Path | None,
    max_line_bytes: int,
    delays: tuple[float, ...] = RETRY_DELAYS_SECONDS,
    dataset: DatasetId | None = None,
    stack: ExitStack,
) -> InputFile:
    """Open a table, and return an input with the requests of its rows; raises BadInput.

    Images and recordings may be files in the folder of a local table.
    `output_format` is the format of the result table; None if none is written.
    """
    table = open_table_input(
        name, recipe, tmp_dir=tmp_dir, delays=delays, dataset=dataset, stack=stack
    )
    folder = None if dataset is not None else media_folder_of(name)
    return _render(table, output_format, tmp_dir, max_line_bytes, stack, media_folder=folder)


def open_table_input(
    name: str,
    recipe: Recipe,
    *,
    tmp_dir: Path | None,
    delays: tuple[float, ...] = RETRY_DELAYS_SECONDS,
    dataset: DatasetId | None,
    stack: ExitStack,
) -> TableInput:
    """Open a table, or a dataset of the hub; raises BadInput."""
    if dataset is None:
        return TableInput.open(name, recipe, tmp_dir=tmp_dir, delays=delays, stack=stack)
    return TableInput.of_tables(name, recipe, [open_dataset(name, dataset)])


def _render(
    table: TableInput,
    output_format: TableFormat | None,
    tmp_dir: Path | None,
    max_line_bytes: int,
    stack: ExitStack,
    *,
    media_folder: Path | None,
) -> InputFile:
    """Return an input with the requests of the rows, in a temporary file.

    Raises BadInput if the recipe does not match the table, or the disk is full.
    """
    try:
        template = checked_template(table.recipe, table.schema, output_format, table.batches)
    except RecipeError as exc:
        if str(exc).startswith("--"):
            raise BadInput(str(exc)) from exc
        raise BadInput(f"{table.name} cannot be run with its recipe: {exc}") from exc
    warn_of_constant_prompt(template, table.recipe, table.schema.names, table.name)
    is_constant = not template.has_prompt_column
    copy = temporary_file(stack, tmp_dir)
    folder = str(tmp_dir or tempfile.gettempdir())
    num_rows, next_word = 0, time.monotonic() + _SECONDS_PER_WORD
    try:
        for count, lines in rendered(template, table.batches(template.columns)):
            copy.writelines(
                lines if media_folder is None else lines_with_media(lines, media_folder)
            )
            num_rows += count
            if num_rows == count:
                _check_room(table, copy.tell() / max(1, count), folder)
            if time.monotonic() >= next_word:
                log(f"rendering {table.name}: {amount(num_rows, 'row')}")
                next_word = time.monotonic() + _SECONDS_PER_WORD
        copy.flush()
    except TableError as exc:
        raise BadInput(f"{table.name} cannot be run. {exc}") from exc
    except OSError as exc:
        raise BadInput(
            f"the requests of {table.name} cannot be written to {folder} ({exc.strerror}): "
            "pass --output-tmp-dir to use another folder"
        ) from exc
    created = max(source.created for source in table.sources)
    files = tuple(file for source in table.sources for file in source.files)
    form = FileFormat(is_table=True)
    source = Source(copy, table.name, created, files, form)
    return InputFile(
        source, form, max_line_bytes, unpacked=copy, table=table, has_constant_prompt=is_constant
    )


def media_folder_of(name: str) -> Path | None:
    """Return the folder of a local table, which may be a folder itself; None for any other."""
    path = Path(name)
    if path.is_dir():
        return path
    return path.parent if path.is_file() else None


def lines_with_media(lines: Iterable[bytes], folder: Path) -> Iterator[bytes]:
    """Yield the lines of a table in a folder, with the images, PDFs and recordings in its files."""
    for line in lines:
        if b'_url"' in line or b'"images"' in line or b'"file_data"' in line:
            from .local_media import with_local_media  # late: few tables have media

            yield with_local_media(line, folder)
        else:
            yield line


def _check_room(table: TableInput, bytes_per_row: float, folder: str) -> None:
    """Raise BadInput if the disk is too small for the number of rows in the Parquet footers."""
    num_rows = sum(each.num_rows for each in table.tables if isinstance(each, ParquetTable))
    needed, free = int(num_rows * bytes_per_row), shutil.disk_usage(folder).free
    if needed > free:
        raise BadInput(
            f"the requests of {table.name}, {amount(num_rows, 'row')}, take about "
            f"{size_words(needed)}, but {folder} has only {size_words(free)} free: "
            "pass --output-tmp-dir to use another folder"
        )
