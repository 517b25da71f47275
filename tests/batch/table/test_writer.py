"""Table writers that are not closed, because the rows of their table cannot be read."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tidemill.batch.table.recipe import TableFormat
from tidemill.batch.table.writer import open_writer


@pytest.mark.parametrize("form", ["parquet", "arrow", "csv", "jsonl"])
def test_an_unfinished_table_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: TableFormat
) -> None:
    """The error that ends it is reported, and not that a closed file cannot be written."""
    printed: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)
    batch = pa.record_batch({"text": ["a"]})
    with (tmp_path / "out").open("wb") as file:
        writer = open_writer(file, batch.schema, form)
        writer.write(batch)
    del writer
    gc.collect()
    assert not printed
