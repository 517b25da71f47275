"""Retries: a file of the selected lines, and the merged rows when they have run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

from tidemill.batch.file.formats import detect_file, open_lines
from tidemill.batch.file.lines import RawLine, read_lines
from tidemill.batch.file.row_order import rows_of_lines
from tidemill.batch.model import Batch, File, Retry
from tidemill.batch.object_keys import DROP_TENANT, result_file_id
from tidemill.batch.result_kinds import ERRORS, KINDS, ResultKind
from tidemill.batch.retry import NothingToRetry, RetryLines

from .store import Store
from .upload import incoming_file

_SUFFIXES = (".gz", ".jsonl", ".ndjson", ".json", ".retry")


class FileGone(Exception):
    """A deleted file that a retry needs."""


def make_input(store: Store, old: Batch, retry: Retry) -> File:
    """Add a file with the selected lines of a batch and return it.

    Raises NothingToRetry, FileGone, OSError.
    """
    is_whole = old.final is not None and old.final.num_rows >= old.num_rows > 0
    selection = RetryLines(retry, is_whole)
    kinds = (ERRORS,) if is_whole else KINDS
    source = store.files.get(old.input_file_id)
    if source is None:
        raise FileGone(old.input_file_id)
    with ExitStack() as stack, incoming_file(store.folder) as path:
        lines = _lines(stack, store.folder.file(source.id))
        files = [_rows(stack, store, kind.field(old, "file_id")) for kind in kinds]
        with path.open("wb") as out:
            num_bytes = sum(out.write(piece) for piece in selection.select(lines, files))
        if not num_bytes:
            raise NothingToRetry(selection.counts.reason)
        name = source.filename
        for suffix in _SUFFIXES:
            name = name.removesuffix(suffix)
        file_id, now = f"file-{uuid4().hex}", int(time.time())
        file = File(file_id, DROP_TENANT, file_id, num_bytes, now, f"{name}.retry.jsonl", "batch")
        store.add_file(path, file)
    return file


def make_merged(store: Store, batch: Batch, made: Mapping[ResultKind, File]) -> File | None:
    """Write the rows of the whole input, with the rows of this retry in their places.

    `made` are the result files of the batch. Returns None if it is no retry, or if a file of the
    retried batches was deleted. Raises OSError.
    """
    if batch.retry is None or not made:
        return None
    runs, retried = [[file.id for file in made.values()]], batch
    while retried.retry is not None:
        stored = store.batches.get(retried.retry.of)
        if stored is None:
            return None
        retried = stored.batch
        runs.append([each for kind in KINDS if (each := kind.field(retried, "file_id"))])
    file_id = result_file_id(batch.id, "merged")
    path = store.folder.work_path(batch.id) / "merged"
    try:
        with ExitStack() as stack, path.open("wb") as out:
            lines = _lines(stack, store.folder.file(retried.input_file_id))
            rows = [[_rows(stack, store, each) for each in files] for files in runs]
            num_bytes = sum(out.write(row or b"") for _, row in rows_of_lines(lines, rows))
    except FileGone:
        return None
    path.rename(store.folder.file(file_id))
    seconds = batch.options.output_expires_seconds
    created_at = batch.winds_up_since or batch.created_at
    return File(
        file_id,
        batch.tenant,
        file_id,
        num_bytes,
        created_at,
        f"{batch.id}.merged.jsonl",
        "batch_output",
        expires=None if seconds is None else created_at + seconds,
    )


def _lines(stack: ExitStack, path: Path) -> Iterator[RawLine]:
    try:
        file = stack.enter_context(path.open("rb"))
    except FileNotFoundError as exc:
        raise FileGone(path.name) from exc
    return read_lines(open_lines(detect_file(file), file))


def _rows(stack: ExitStack, store: Store, file_id: str | None) -> Iterator[bytes]:
    if file_id is None:
        return iter(())
    try:
        return stack.enter_context(store.folder.file(file_id).open("rb"))
    except FileNotFoundError as exc:
        raise FileGone(file_id) from exc
