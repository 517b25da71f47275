"""Delta and Iceberg tables: folders whose log lists the files with their rows."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pyarrow as pa

from tidemill.batch.table.errors import TableError
from tidemill.batch.table.reader import ScannedTable, Table

from ..console.errors import BadInput
from ..console.terminal import log
from .source import Source
from .table_options import lake_of

_BATCH_ROWS: Final = 2**13


def open_lake_table(folder: Path) -> tuple[Source, Table] | None:
    """Return the table of a folder, pinned to its current version; None for other folders.

    Raises BadInput for a table that cannot be read.
    """
    kind = lake_of(folder)
    if kind is None:
        return None
    try:
        table, created = (_open_delta if kind == "Delta" else _open_iceberg)(folder)
    except TableError as exc:
        raise BadInput(f"{folder} cannot be run. {exc}") from exc
    except Exception as exc:
        # Each library has its own exceptions, and passes on others.
        reason = (str(exc) or type(exc).__name__).split("\n", 1)[0].rstrip(".")
        raise BadInput(f"{folder} cannot be read as a {kind} table: {reason}") from exc
    return Source(io.BytesIO(), str(folder), created), table


def _open_delta(folder: Path) -> tuple[Table, int]:
    """Return a Delta table, whose files are read in the order in which they were added."""
    from deltalake import DeltaTable

    delta = DeltaTable(folder)
    log(f"reading version {delta.version()} of {folder}")
    dataset = delta.to_pyarrow_dataset()
    added = pa.table(delta.get_add_actions())
    paths, times = added.column("path").to_pylist(), added.column("modification_time").to_pylist()
    # Paths in the log are URL-encoded.
    added_at = {unquote(path): _milliseconds(time) for path, time in zip(paths, times, strict=True)}
    fragments = sorted(
        dataset.get_fragments(), key=lambda each: (added_at.get(each.path, 0), each.path)
    )

    def scan(columns: list[str]) -> Iterator[pa.RecordBatch]:
        for fragment in fragments:
            yield from fragment.to_batches(
                schema=dataset.schema,
                columns=columns,
                batch_size=_BATCH_ROWS,
                batch_readahead=1,
                fragment_readahead=1,
            )

    return ScannedTable("Delta", dataset.schema, scan), max(added_at.values(), default=0) // 1000


def _open_iceberg(folder: Path) -> tuple[Table, int]:
    """Return an Iceberg table from the newest metadata in its folder, without a catalog."""
    from pyiceberg.table import StaticTable

    path = newest_metadata(folder)
    iceberg = StaticTable.from_metadata(str(path))
    snapshot = iceberg.current_snapshot()
    number = "none" if snapshot is None else snapshot.snapshot_id
    log(f"reading snapshot {number} of {folder}")
    schema = iceberg.scan().to_arrow_batch_reader().schema

    def scan(columns: list[str]) -> Iterator[pa.RecordBatch]:
        reader = iceberg.scan(selected_fields=tuple(columns)).to_arrow_batch_reader()
        for batch in reader:
            yield batch.select(columns)

    return ScannedTable("Iceberg", schema, scan), iceberg.metadata.last_updated_ms // 1000


def newest_metadata(folder: Path) -> Path:
    """Return the metadata file with the highest number, such as `v2.metadata.json`.

    For tables without a catalog, `version-hint.text` contains the number.
    """
    files = {path.name: path for path in (folder / "metadata").glob("*.metadata.json")}
    hint = folder / "metadata/version-hint.text"
    if hint.is_file() and (found := files.get(f"v{hint.read_text().strip()}.metadata.json")):
        return found
    return max(files.values(), key=lambda path: (_number_of(path.name), path.name))


def _number_of(name: str) -> int:
    digits = name.removeprefix("v").partition(".")[0].partition("-")[0]
    return int(digits) if digits.isdecimal() else -1


def _milliseconds(time: object) -> int:
    """Return the time of a log entry, a number or a date depending on the library's version."""
    from datetime import datetime

    return int(time.timestamp() * 1000) if isinstance(time, datetime) else int(str(time))
