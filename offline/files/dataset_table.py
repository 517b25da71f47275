"""Hugging Face dataset as a table: memory-mapped Arrow files in the cache of `datasets`."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from tidemill.batch.table.errors import TableError
from tidemill.batch.table.reader import ScannedTable, Table

from ..arguments.dataset_id import DatasetId
from ..console.errors import BadInput
from ..console.signals import interruptible
from ..console.terminal import log
from .source import Source

_ROWS_OF_A_BATCH = 2**13
_MAX_NAMED = 20


def open_dataset(name: str, dataset_id: DatasetId) -> tuple[Source, Table]:
    """Return the rows of a dataset, which is downloaded first if it is not in the cache.

    Raises BadInput if it cannot be read, or has several splits and none is selected.
    """
    log(f"reading {name}")
    dataset = interruptible(lambda: _load(name, dataset_id))
    rows = arrow_table_of(dataset)

    def scan(columns: list[str]) -> Iterator[pa.RecordBatch]:
        yield from rows.select(columns).to_batches(max_chunksize=_ROWS_OF_A_BATCH)

    files = [Path(each["filename"]).stat() for each in dataset.cache_files]
    created = max((int(file.st_mtime) for file in files), default=0)
    try:
        table = ScannedTable("Arrow", rows.schema, scan)
    except TableError as exc:
        raise BadInput(f"{name} cannot be run: {exc}") from exc
    return Source(io.BytesIO(), name, created), table


def arrow_table_of(dataset: Any) -> pa.Table:
    """Return the rows of a `datasets.Dataset`; rows in files stay there until they are read."""
    return dataset.with_format("arrow")[:]


def _load(name: str, dataset_id: DatasetId) -> Any:
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        return datasets.load_dataset(
            dataset_id.path,
            dataset_id.subset,
            data_files=dataset_id.files,
            revision=dataset_id.revision,
            split=dataset_id.split or _only_split(name, dataset_id),
        )
    except BadInput:
        raise
    except Exception as exc:
        # Readers of dataset files raise many kinds of exceptions.
        raise BadInput(f"{name} cannot be read: {_reason(exc)}") from exc


def _only_split(name: str, dataset_id: DatasetId) -> str:
    """Return the only split of a dataset, before anything large is downloaded."""
    import datasets

    splits = datasets.get_dataset_split_names(
        dataset_id.path,
        dataset_id.subset,
        data_files=dataset_id.files,
        revision=dataset_id.revision,
    )
    if len(splits) != 1:
        named = ", ".join(splits[:_MAX_NAMED]) + (", …" if len(splits) > _MAX_NAMED else "")
        raise BadInput(f"{name} has several splits ({named}): select one with --split")
    return str(splits[0])


def _reason(exc: Exception) -> str:
    """Return an error of `datasets` as one line; errors in a file are in its cause."""
    from datasets.exceptions import DatasetGenerationError

    if isinstance(exc, DatasetGenerationError) and isinstance(exc.__cause__, Exception):
        exc = exc.__cause__
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    if lines and lines[0].startswith("Config name is missing"):
        configs = lines[1].partition("[")[2].rstrip("]").replace("'", "")
        return f"it has several subsets ({configs}): select one with --subset"
    return (lines[0] if lines else type(exc).__name__).rstrip(".")
