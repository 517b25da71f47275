"""Retry of a batch: a new batch with the requests that did not succeed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from tidemill.batch.batch_request import MAX_METADATA_PAIRS
from tidemill.offline.console.errors import BadInput, CliError, ServerRefused
from tidemill.offline.console.terminal import amount, log
from tidemill.offline.files.new_file import NewFile
from tidemill.offline.files.request_lines import copy_requests
from tidemill.offline.files.row_file import RowFile
from tidemill.offline.files.row_index import RowIndex
from tidemill.offline.files.source import Source

from ..api.client import Client
from ..api.objects import Batch
from ..transfer.download import FileContent, fetch_into
from .batch_flags import WINDOW
from .outcome import errors_of

RETRY_OF = "retry_of"
"""Metadata key of the new batch, for the retried batch's ID."""

_GONE = frozenset({404, 410})
_NO_ROUTE = _GONE | {405}
_INVALID = frozenset({400, 413, 422})
"""Statuses of rows whose request would fail again unchanged."""


def check_can_retry(batch: Batch) -> None:
    """Raise CliError for a batch that is still running, was erased, or failed as a whole."""
    if not batch.has_ended:
        raise CliError(
            f"{batch.id} is {batch.status}: its requests can be retried once it has ended. Wait "
            f"for it with `tidemill resume {batch.id}`"
        )
    if batch.extension.get("erasing_at"):
        raise BadInput(f"{batch.id} was erased, so its requests cannot be retried")
    if batch.status == "failed" and not (batch.output_file_id or batch.error_file_id):
        why = "; ".join(errors_of(batch)[:1]) or "no request was run"
        raise BadInput(
            f"{batch.id} failed as a whole ({why}): correct its file and submit it again"
        )


def create_on_server(
    client: Client, batch: Batch, given: Mapping[str, Any], edits: Mapping[str, Any]
) -> Batch | None:
    """Return the retry that the server created; None if it has no such route.

    `edits` select and change the requests, `given` are options of the new batch. Raises
    ServerRefused.
    """
    changes = {name: value for name, value in edits.items() if value}
    try:
        return client.retry(batch.id, {**given, **changes}, uuid4().hex)
    except ServerRefused as exc:
        if exc.status not in _NO_ROUTE:
            raise
        # A batch whose files were deleted (410) is left to the other way: it names the files.
        if exc.status != 410 and changes.keys() & {"body", "prompt"}:
            raise BadInput(
                "this server cannot edit the requests of a retry: omit --body and --prompt"
            ) from exc
        return None


@contextmanager
def open_failed_requests(
    client: Client, batch: Batch, tmp_dir: Path | None, *, include_invalid: bool = False
) -> Iterator[Source | None]:
    """Open the requests of an ended batch that did not succeed; yield None if all did.

    Invalid requests, which would fail again, are omitted unless `include_invalid` is set. Raises
    BadInput if a file of the batch no longer exists.
    """
    with ExitStack() as stack:

        def open_file(file_id: str, kind: str) -> Source:
            file = stack.enter_context(tempfile.TemporaryFile(dir=tmp_dir))
            _fetch(client, batch, file_id, kind, file)
            return Source(file, f"the {kind} of {batch.id}", int(time.time()))

        if 0 < batch.total <= batch.completed:
            yield None
            return
        wanted = _WantedLines(
            batch,
            lambda file_id, kind: _rows(open_file(file_id, kind)),
            include_invalid=include_invalid,
        )
        source = open_file(str(batch.fields.get("input_file_id")), "input")
        requests = stack.enter_context(tempfile.TemporaryFile(dir=tmp_dir))
        out = NewFile(requests, f"a temporary file in {tmp_dir or tempfile.gettempdir()}")
        copied = copy_requests(source, out, wanted.take)
        out.flush()
        if copied.num_malformed:
            left_out = amount(copied.num_malformed, "malformed line")
            log(f"note: {left_out} of {batch.id} cannot be retried")
        if wanted.num_invalid:
            invalid = amount(wanted.num_invalid, "request")
            log(
                f"note: omitted {invalid} of {batch.id} that "
                f"{'is' if wanted.num_invalid == 1 else 'are'} invalid (status 400) and would fail "
                "again: correct them in the file, or retry them with --include-invalid"
            )
        if not copied.num_copied:
            yield None
            return
        retried = f"{copied.num_copied:,} of {amount(copied.num_lines, 'line')}"
        log(f"retrying {retried} of {batch.id}")
        yield Source(requests, f"the retry of {batch.id}", source.created)


def fields_of_retry(batch: Batch, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the new batch: the given ones, with the old batch's as defaults."""
    metadata = {**(batch.fields.get("metadata") or {}), **given.get("metadata", {})}
    if len(metadata) < MAX_METADATA_PAIRS or RETRY_OF in metadata:
        metadata[RETRY_OF] = batch.id
    else:
        log(f"note: the metadata of {batch.id} is full, so `{RETRY_OF}` was not added")
    window = {WINDOW: batch.fields[WINDOW]} if batch.fields.get(WINDOW) else {}
    return {**window, **given, "metadata": metadata}


def filename_of_retry(client: Client, batch: Batch) -> str:
    """Return a name for the file of the new batch: `questions.retry.jsonl`."""
    name = client.file(str(batch.fields["input_file_id"])).name.rpartition("/")[2]
    stem = name.removesuffix(".gz")
    for suffix in (".jsonl", ".ndjson", ".json", ".retry"):
        stem = stem.removesuffix(suffix)
    return f"{stem}.retry.jsonl"


class _WantedLines:
    """Selects the lines of a batch to retry, by custom ID, each once.

    If every line has a row, the error file lists all failures; otherwise the output file lists
    all successes.
    """

    def __init__(
        self, batch: Batch, open_rows: Callable[[str, str], RowFile], *, include_invalid: bool
    ) -> None:
        self.num_invalid = 0
        self._include_invalid = include_invalid
        self._failed_rows: RowFile | None = None
        self._failed, self._good = RowIndex(), RowIndex()
        has_all_rows = 0 < batch.total <= batch.completed + batch.failed
        self._is_whole = has_all_rows and batch.error_file_id is not None
        if batch.error_file_id is not None:
            self._failed_rows = open_rows(batch.error_file_id, "error file")
            self._failed = RowIndex.from_rows(self._failed_rows)
        if not self._is_whole and batch.output_file_id is not None:
            self._good = RowIndex.from_rows(open_rows(batch.output_file_id, "output"))

    def take(self, custom_id: str) -> bool:
        """Return whether the line with this custom ID is to be retried."""
        if not self._is_whole and self._good.pop_id(custom_id) is not None:
            return False
        place = self._failed.pop_id(custom_id)
        if place is None or self._failed_rows is None:
            return not self._is_whole
        if not self._include_invalid and self._failed_rows.read(place).status in _INVALID:
            self.num_invalid += 1
            return False
        return True


def _rows(source: Source) -> RowFile:
    return RowFile(source.file, source)


def _fetch(client: Client, batch: Batch, file_id: str, kind: str, file: IO[bytes]) -> None:
    try:
        found = client.file(file_id)
        fetch_into(FileContent(client, found.id, found.num_bytes), file, f"the {kind}")
    except ServerRefused as exc:
        if exc.status not in _GONE:
            raise
        raise BadInput(
            f"the {kind} of {batch.id} no longer exists ({file_id}). If you have local copies of "
            "the input and the rows, use `tidemill retry ROWS -i FILE -o failed.jsonl`"
        ) from exc
    file.flush()
