"""Drops: upload a file to the bucket, wait for its batch report, and download the rows."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.header import Header
from typing import Any, Self

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from tidemill.batch.file.formats import FileFormat
from tidemill.batch.model import Outputs
from tidemill.batch.object_keys import (
    INPUT_PREFIX,
    invalid_key_reason,
    outputs_of_drop,
    recipe_key,
)
from tidemill.offline.console import backoff
from tidemill.offline.console.backoff import LONG_SECONDS, Backoff
from tidemill.offline.console.errors import CliError, Refused, Stopped, Unreachable
from tidemill.offline.console.progress_bar import byte_progress
from tidemill.offline.console.terminal import log, print_output
from tidemill.offline.files.source import Source
from tidemill.offline.files.table_options import TableOptions

from ..api.client import Client
from ..api.objects import Batch
from ..api.server import API_KEY, BASE_URL, server_of
from ..deployment.aws import aws_call, make_client
from ..transfer.download import Interrupted, fetch
from .batch_flags import NAMES, flag_of
from .follow import Show, batch_progress, poll_delays
from .outcome import exit_status_of, log_end, print_json
from .submission import check_source
from .wait import Targets, log_row_errors

# A drop's batch is searched for among this many of the newest batches.
_NUM_NEWEST = 100


@contextmanager
def drop_progress(url: str, since: float) -> Iterator[Callable[[], object]]:
    """Yield a function that shows the batch of an object dropped at `since` or later.

    Best effort: it never raises, and logs once why no progress is shown.
    """
    if not os.environ.get(BASE_URL):
        log(f"set {BASE_URL} and {API_KEY} to see the batch's progress here")
        yield lambda: None
        return
    try:
        client = Client(server_of(None))
    except CliError as exc:
        log(f"progress is not shown: {exc}")
        yield lambda: None
        return
    with client, batch_progress() as show:
        yield _DropTracker(client, url, since, show).update


class _DropTracker:
    """Finds a batch by its input URL, then polls it by ID."""

    def __init__(self, client: Client, url: str, since: float, show: Show) -> None:
        self._client = client
        self._url = url
        self._since = since
        self._show = show
        self._batch_id: str | None = None
        self._is_over = False

    def update(self) -> None:
        """Poll the batch and show it, if it exists."""
        if self._is_over:
            return
        try:
            self._batch_id = self._batch_id or self._find()
            if self._batch_id is not None:
                self._show(self._client.batch(self._batch_id))
        except CliError as exc:
            log(f"progress is no longer shown: {exc}")
            self._is_over = True

    def _find(self) -> str | None:
        for batch in self._client.batches(_NUM_NEWEST):
            is_its = batch.fields.get("input_file_id") == self._url
            if is_its and batch.fields["created_at"] >= self._since and not batch.has_ended:
                return batch.id
        return None


# Up to ten parts are in memory.
_PART_BYTES = 8 * 2**20
_CHUNK_BYTES = 2**18
_MAX_METADATA_BYTES = 2048  # S3's limit
_NOT_THERE = frozenset({"404", "NoSuchKey", "NotFound"})
_OPTIONS = frozenset(name.replace("_", "-") for name in NAMES)
_ENDINGS = (".jsonl", ".ndjson", ".json", ".gz")
# Allowed clock skew.
_SKEW_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Drop:
    """A drop: the object's key, its user metadata, and the keys of its results."""

    bucket: str
    key: str
    metadata: Mapping[str, str]
    outputs: Outputs

    @classmethod
    def from_name(cls, bucket: str, name: str, fields: Mapping[str, Any], form: FileFormat) -> Self:
        """Return the drop of a file name with these options; raises Refused.

        A name without a known suffix gets the suffix of the file's format.
        """
        has_suffix = form.is_table or name.lower().endswith(_ENDINGS)
        key = f"{INPUT_PREFIX}{name}{'' if has_suffix else form.suffix}"
        outputs, reason = outputs_of_drop(key), invalid_key_reason(key)
        if outputs is None or reason or not name.strip("/") or not name.isprintable():
            message = f"{name!r} is not a valid name for a drop: pass another one with --name"
            raise Refused(f"{message}. {reason}" if reason else message)
        return cls(bucket, key, _user_metadata(fields), outputs)

    @property
    def url(self) -> str:
        """Return the `s3://` URL."""
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True, slots=True)
class DroppedTable:
    """A table to upload, whose rows were rendered into the drop's requests."""

    source: Source
    options: TableOptions


def _text_of(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return "true" if value is True else str(value)


def _user_metadata(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return options and metadata as user metadata of the object; raises Refused."""
    given = {name: value for name, value in fields.items() if name != "metadata"}
    options = {name.replace("_", "-"): _text_of(value) for name, value in given.items()}
    own = {name.lower(): value for name, value in fields.get("metadata", {}).items()}
    for name in own:
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name):
            raise Refused(
                f"{name!r} is not a valid metadata key of an S3 object: use letters and digits"
            )
        if name in _OPTIONS:
            flag = flag_of(name.replace("-", "_"))
            raise Refused(f"{name} is a batch option, not metadata: pass it as {flag}")
    headers = {name: _header(value) for name, value in (options | own).items()}
    if sum(len(name) + len(value) for name, value in headers.items()) > _MAX_METADATA_BYTES:
        raise Refused(f"options and metadata exceed S3's limit of {_MAX_METADATA_BYTES:,} bytes")
    return headers


def _header(value: str) -> str:
    """Return a header value, RFC 2047 encoded when needed."""
    if value.isascii() and value.isprintable() and value == value.strip() and "=?" not in value:
        return value
    return Header(value, "utf-8", maxlinelen=sys.maxsize).encode(linesep="")


def drop_file(
    target: Drop,
    source: Source,
    targets: Targets | None,
    table: DroppedTable | None = None,
    *,
    as_json: bool,
) -> int:
    """Drop a file of requests or a table, and return the exit status.

    With targets, wait for the batch and fetch its rows or its table.
    """
    fields = {
        "on_invalid_line": target.metadata.get("on-invalid-line", "fail"),
        "strict_parameters": "strict-parameters" in target.metadata,
    }
    check_source(source, None, fields, as_json=as_json)
    s3 = make_client("s3")
    before = _etag_of(s3, target.bucket, target.outputs.report_key) if targets else None
    try:
        if table is not None:
            _put_recipe(s3, target, table.options)
        _put(s3, target, source if table is None else table.source)
    except Stopped as exc:
        raise Stopped(exc.signum, "nothing was uploaded") from exc
    if as_json:
        print_json({"object": "drop", "url": target.url, "report": target.outputs.report_key})
    elif targets is not None and targets.take_standard_output:
        log(f"{target.url} was uploaded")
    else:
        print_output(target.url)
    if targets is None:
        log(f"the rows will be written to s3://{target.bucket}/{target.outputs.output_key}")
        return 0
    try:
        return _wait_and_fetch(s3, target, before, targets, table, as_json=as_json)
    except Stopped as exc:
        where = f"s3://{target.bucket}/{target.outputs.report_key}"
        raise Stopped(
            exc.signum, f"the batch continues; its report will be written to {where}"
        ) from exc


def _put_recipe(s3: Any, target: Drop, options: TableOptions) -> None:
    """Put the recipe where intake looks for it, before the table."""
    key = recipe_key(target.key)
    with aws_call(f"writing s3://{target.bucket}/{key}"):
        s3.put_object(Bucket=target.bucket, Key=key, Body=options.print_recipe().encode())


def _put(s3: Any, target: Drop, source: Source) -> None:
    size = os.fstat(source.file.fileno()).st_size
    config = TransferConfig(
        multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=4
    )
    source.file.seek(0)
    with aws_call(f"writing {target.url}"), byte_progress("uploading", size) as show:
        s3.upload_fileobj(
            source.file,
            target.bucket,
            target.key,
            ExtraArgs={"Metadata": dict(target.metadata)},
            Callback=show,
            Config=config,
        )


def _wait_and_fetch(
    s3: Any,
    target: Drop,
    before: str | None,
    targets: Targets,
    table: DroppedTable | None,
    *,
    as_json: bool,
) -> int:
    log(f"waiting for s3://{target.bucket}/{target.outputs.report_key}")
    batch = _wait_for_report(s3, target, before)
    url = batch.table_url
    results: list[tuple[str, str, str | None, object]] = [
        ("output", target.outputs.output_key, targets.output, batch.output_file_id),
        ("errors", target.outputs.error_key, targets.errors, batch.error_file_id),
    ]
    if table is not None and url is not None:
        key = url.removeprefix(f"s3://{target.bucket}/")
        results = [("table", key, str(table.options.output), True)]
    saved: dict[str, str | None] = {kind: None for kind, *_ in results}
    for kind, key, name, is_there in results:
        if is_there and name is not None:
            with aws_call(f"reading {key}"):
                found = s3.head_object(Bucket=target.bucket, Key=key)
            content = ObjectContent(s3, target.bucket, key, found["ETag"], found["ContentLength"])
            fetch(content, name, force=targets.force)
            saved[kind] = name
    if as_json:
        print_json({**batch.fields, "saved": saved})
    log_end(batch)
    log_row_errors(batch, targets)
    return exit_status_of(batch)


def _wait_for_report(s3: Any, target: Drop, before: str | None) -> Batch:
    """Wait for the report of this drop; an earlier drop's report is ignored."""
    with aws_call(f"reading {target.url}"):
        found = s3.head_object(Bucket=target.bucket, Key=target.key)
    since = found["LastModified"].timestamp() - _SKEW_SECONDS
    key, delays, retries = target.outputs.report_key, poll_delays(), Backoff(LONG_SECONDS)
    with drop_progress(target.url, since) as show_progress:
        while True:
            try:
                etag = _etag_of(s3, target.bucket, key)
                if etag not in {None, before}:
                    with aws_call(f"reading s3://{target.bucket}/{key}"):
                        body = s3.get_object(Bucket=target.bucket, Key=key)["Body"].read()
                    batch = Batch(json.loads(body))
                    if batch.fields["created_at"] >= since:
                        return batch
                    before = etag
                retries.reset()
            except (Unreachable, HTTPError) as exc:
                retries.wait(str(exc))
            show_progress()
            backoff.sleep(next(delays))


def _etag_of(s3: Any, bucket: str, key: str) -> str | None:
    with aws_call(f"reading s3://{bucket}/{key}"):
        try:
            return str(s3.head_object(Bucket=bucket, Key=key)["ETag"])
        except ClientError as exc:
            if exc.response["Error"]["Code"] in _NOT_THERE:
                return None
            raise


@dataclass(frozen=True, slots=True)
class ObjectContent:
    """An S3 object pinned to its ETag, as download content."""

    s3: Any
    bucket: str
    key: str
    etag: str
    num_bytes: int

    @property
    def id(self) -> str:
        """Return an ID of this content, derived from its ETag."""
        return re.sub(r"\W", "", self.etag)

    @contextmanager
    def open(self, start: int) -> Iterator[Iterator[bytes]]:
        """Stream the bytes from `start` on."""
        wanted = {"Range": f"bytes={start}-"} if start else {}
        target = {"Bucket": self.bucket, "Key": self.key, "IfMatch": self.etag}
        try:
            with aws_call(f"reading s3://{self.bucket}/{self.key}"):
                body = self.s3.get_object(**target, **wanted)["Body"]
            yield body.iter_chunks(_CHUNK_BYTES)
        except (Unreachable, BotoCoreError, HTTPError) as exc:
            raise Interrupted(str(exc)) from exc
