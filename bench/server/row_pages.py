"""Pages of rows on the dashboard of a server: reads, bytes and time of a search in a large batch.

python -m bench.server.row_pages --rows 1000000
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

from bench.cloud.row_pages import PAGE_ROWS, ROW_BYTES, kind_of, row_of
from tidemill.batch.model import Batch, Options, Source
from tidemill.batch.object_keys import DROP_TENANT, outputs_of_request
from tidemill.batch.parts import FinishedRow
from tidemill.batch.states import Status
from tidemill.batch.stored_file import File
from tidemill.dashboard.rows_page import (
    RowCounts,
    RowLinks,
    RowsHeading,
    first_rows,
    requests,
    rows,
)
from tidemill.server.local.batch_rows import BatchRows
from tidemill.server.local.publish import publish
from tidemill.server.local.store import Store, open_store

_WRITTEN_AT_ONCE = 20_000


def fill(store: Store, num_rows: int) -> Batch:
    """Add an ended batch with this many rows, all of one size, and requests of that size."""
    with tempfile.NamedTemporaryFile(dir=store.folder.incoming, delete=False) as file:
        for line in range(1, num_rows + 1):
            file.write(_request_of(line))
    now = int(time.time())
    size = num_rows * ROW_BYTES
    store.add_file(
        Path(file.name), File("file-x", DROP_TENANT, "file-x", size, now, "x.jsonl", "batch")
    )
    batch = Batch(
        id="batch_x",
        tenant=DROP_TENANT,
        source=Source("", "file-x", "", size),
        input_file_id="file-x",
        options=Options(),
        outputs=outputs_of_request(DROP_TENANT, "batch_x"),
        created_at=now,
        expires_at=now + 3600,
        num_rows=num_rows,
    )
    store.batches.create(batch)
    store.link_input("file-x", batch.id)
    store.batches.move(batch.id, Status.IN_PROGRESS, now)
    finished = store.rows_of(batch.id)
    for first in range(1, num_rows + 1, _WRITTEN_AT_ONCE):
        lines = range(first, min(first + _WRITTEN_AT_ONCE, num_rows + 1))
        finished.append(
            [FinishedRow(line, row_of(line), kind_of(line) != "failed") for line in lines]
        )
    store.batches.move(batch.id, Status.FINALIZING, now)
    return publish(store, batch, Status.COMPLETED, now)


def _request_of(line: int) -> bytes:
    text = f'{{"custom_id":"c{line}","url":"/v1/completions","body":{{"prompt":"p {line}"}}}}'
    return text.encode().ljust(ROW_BYTES - 1) + b"\n"


@dataclass(slots=True)
class Figures:
    """Reads of files and steps of SQLite while `counted` is entered."""

    store: Store
    num_rows: int = 0
    num_bytes: int = 0
    num_steps: int = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count from zero until the block is left."""
        self.num_rows = self.num_bytes = self.num_steps = 0
        connection, pread = self.store.database._connection, os.pread  # noqa: SLF001

        def counting_read(descriptor: int, size: int, offset: int) -> bytes:
            data = pread(descriptor, size, offset)
            self.num_rows += 1
            self.num_bytes += len(data)
            return data

        def step() -> int:
            self.num_steps += 1
            return 0

        connection.set_progress_handler(step, 1)
        try:
            with patch.object(os, "pread", counting_read):
                yield
        finally:
            connection.set_progress_handler(None, 1)


def main() -> None:
    """Measure each kind of page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder)) as store:
        begin = time.perf_counter()
        batch = fill(store, args.rows)
        print(f"filled in {time.perf_counter() - begin:.0f} s")
        stored = store.batches.get(batch.id)
        assert stored is not None
        source, links = BatchRows(store, stored), RowLinks.of_batch(batch.id)
        heading = RowsHeading("x.jsonl", RowCounts(), args.rows)
        middle = args.rows // 2
        lines = ",".join(map(str, range(middle, middle + PAGE_ROWS)))
        searches = {
            "failed, first page": {"status": "failed"},
            "failed, last page": {"status": "failed", "after": str(args.rows - 9)},
            "truncated, first page": {"status": "truncated"},
            "all, in the middle": {"status": "all", "after": str(middle)},
            "one line": {"line": str(middle)},
            "text, no match": {"text": "nothing", "after": str(middle)},
        }
        pages: dict[str, Callable[[], str]] = {
            "requests, first call": partial(requests, source, links, lines),
            "requests": partial(requests, source, links, lines),
            "first rows": partial(first_rows, source, links, RowCounts(failed=1)),
        }
        for name, fields in searches.items():
            pages[name] = partial(rows, source, links, heading, fields)
        figures = Figures(store)
        print(f"{'page':24} {'reads':>6} {'MB':>7} {'steps':>8} {'counted':>7} {'ms':>7}")
        for name, render in pages.items():
            begin = time.perf_counter()
            with figures.counted():
                render()
            first = 1000 * (time.perf_counter() - begin)
            counted = f"{figures.num_rows:6} {figures.num_bytes / 1e6:7.2f} {figures.num_steps:8}"
            begin = time.perf_counter()
            render()
            print(f"{name:24} {counted} {first:7.1f} {1000 * (time.perf_counter() - begin):7.1f}")


if __name__ == "__main__":
    main()
