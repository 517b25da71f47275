"""Retries: a file of the selected lines, and the merged results when they have run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from tidemill.batch.file.formats import detect_file, open_lines
from tidemill.batch.file.lines import FormatError, RawLine, read_lines
from tidemill.batch.file.row_order import rows_of_lines
from tidemill.batch.file.rows import is_success
from tidemill.batch.model import Batch, Retry
from tidemill.batch.object_keys import DROP_TENANT
from tidemill.batch.parts import RowKind
from tidemill.batch.result_kinds import ERRORS, KINDS, OUTPUT, ResultKind
from tidemill.batch.retry import (
    NothingToRetry,
    RetryLines,
    have_only_requests,
    merged_counts,
)
from tidemill.batch.stored_file import File

from .rows import MergedPlaces, kind_of
from .store import Store, merged_file_id
from .upload import incoming_file

_SUFFIXES = (".gz", ".jsonl", ".ndjson", ".json", ".retry")


class FileGone(Exception):
    """A deleted file that a retry needs."""


def make_input(store: Store, old: Batch, retry: Retry) -> File:
    """Add a file with the selected lines of a batch and return it.

    Raises NothingToRetry, FileGone, OSError.
    """
    selection = RetryLines(retry, old)
    source = store.files.get(old.input_file_id)
    if source is None:
        raise FileGone(old.input_file_id)
    with ExitStack() as stack, incoming_file(store.folder) as path:
        lines = _lines(stack, store.folder.file(source.id), old.endpoint)
        files = [_rows(stack, store, kind.field(old, "file_id")) for kind in selection.kinds]
        with path.open("wb") as out:
            num_bytes = sum(out.write(piece) for piece in selection.select(lines, files))
            out.flush()
            os.fsync(out.fileno())
        if not num_bytes:
            raise NothingToRetry(selection.counts.reason)
        name = source.filename
        for suffix in _SUFFIXES:
            name = name.removesuffix(suffix)
        file_id, now = f"file-{uuid4().hex}", int(time.time())
        file = File(file_id, DROP_TENANT, file_id, num_bytes, now, f"{name}.retry.jsonl", "batch")
        store.add_file(path, file)
    return file


class MergedResults(NamedTuple):
    """New result files of a retried batch, its changes for them, and the positions of its rows."""

    files: Sequence[File]
    batch_id: str
    changes: Mapping[str, Any]
    places: MergedPlaces


def merge_retry(
    store: Store, batch: Batch, made: Mapping[ResultKind, File]
) -> MergedResults | None:
    """Write the results of the retried batch again, with the rows of this retry in their places.

    `made` are the result files of the retry. The earlier files keep their IDs. Returns None if a
    file of the retried batch was deleted. Raises OSError.
    """
    assert batch.retry is not None
    stored = store.batches.get(batch.retry.of)
    if stored is None:
        return None
    old = stored.batch
    files: list[File] = []
    changes: dict[str, Any] = {}
    folder = store.folder.work_path(batch.id)
    paths = {kind: folder / f"merged-{kind.name}" for kind in KINDS}
    places = MergedPlaces(store.database, stored.place)
    try:
        counts = _write_merged(store, paths, old, made, places)
    except (FileGone, FormatError):
        places.discard()
        return None
    for kind, path in paths.items():
        changes |= kind.fields(file_id=None)
        if counts[kind]:
            file_id = merged_file_id(kind, old.id, batch.id)
            num_bytes = path.stat().st_size
            path.rename(store.folder.file(file_id))
            files.append(result_file(old, kind, file_id, num_bytes))
            changes |= kind.fields(file_id=file_id)
    changes |= merged_counts(old, counts[OUTPUT], counts[ERRORS])
    return MergedResults(files, old.id, changes, places)


def result_file(batch: Batch, kind: ResultKind, file_id: str, num_bytes: int) -> File:
    """Return a result file of a batch."""
    created_at = batch.winds_up_since or batch.created_at
    seconds = batch.options.output_expires_seconds
    return File(
        id=file_id,
        tenant=batch.tenant,
        key=file_id,
        num_bytes=num_bytes,
        created_at=created_at,
        filename=kind.key_of(batch).rpartition("/")[2],
        purpose="batch_output",
        expires=None if seconds is None else created_at + seconds,
    )


def _write_merged(
    store: Store,
    paths: Mapping[ResultKind, Path],
    old: Batch,
    made: Mapping[ResultKind, File],
    places: MergedPlaces,
) -> dict[ResultKind, int]:
    """Write the newest rows of each kind and return their numbers."""
    counts = dict.fromkeys(paths, 0)
    runs = [
        [file.id for file in made.values()],
        [each.field(old, "file_id") for each in KINDS],
    ]
    with ExitStack() as stack:
        outs = {kind: stack.enter_context(path.open("wb")) for kind, path in paths.items()}
        lines = _lines(stack, store.folder.file(old.input_file_id), old.endpoint)
        rows = [[_rows(stack, store, each) for each in files] for files in runs]
        for raw, row in rows_of_lines(lines, rows, are_requests=have_only_requests(old)):
            if row:
                row_kind = kind_of(row, is_success=is_success(row))
                kind = ERRORS if row_kind is RowKind.FAILED else OUTPUT
                outs[kind].write(row)
                places.add(raw.number, row, row_kind)
                counts[kind] += 1
        for out in outs.values():
            out.flush()
            os.fsync(out.fileno())
    return counts


def _lines(stack: ExitStack, path: Path, url: str) -> Iterator[RawLine]:
    try:
        file = stack.enter_context(path.open("rb"))
    except FileNotFoundError as exc:
        raise FileGone(path.name) from exc
    return read_lines(open_lines(detect_file(file, url), file))


def _rows(stack: ExitStack, store: Store, file_id: str | None) -> Iterator[bytes]:
    if file_id is None:
        return iter(())
    try:
        return stack.enter_context(store.folder.file(file_id).open("rb"))
    except FileNotFoundError as exc:
        raise FileGone(file_id) from exc
