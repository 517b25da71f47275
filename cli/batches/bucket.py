"""A file into the bucket of a deployment, and its results out of there, with AWS's own client."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.header import Header
from typing import Any, Self

from boto3.s3.transfer import TransferConfig
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from cli.api import patience
from cli.api.objects import Batch
from cli.api.patience import LONG_SECONDS, Patience
from cli.batches.dropped import drop_shown
from cli.batches.follow import poll_delays
from cli.batches.options import NAMES
from cli.batches.outcome import exit_status_of, print_json, tell_end
from cli.batches.submission import checked
from cli.batches.wait import Targets, tell_of_errors
from cli.carrying.bytes_bar import bytes_shown
from cli.carrying.fetch import Interrupted, fetch
from cli.deployment.aws import client_of, told
from cli.errors import Refused, Stopped, Unreachable
from cli.files.source import Source
from cli.terminal import put, say
from engine.batchfile.forms import Form
from handler.batch.keys import INPUT_PREFIX, outputs_of_drop, why_no_name
from handler.batch.model import Outputs

# Of which ten may be in memory.
_PART_BYTES = 8 * 2**20
_CHUNK_BYTES = 2**18
_MAX_METADATA_BYTES = 2048  # S3's
_NOT_THERE = frozenset({"404", "NoSuchKey", "NotFound"})
_OPTIONS = frozenset(name.replace("_", "-") for name in NAMES)
_ENDINGS = (".jsonl", ".ndjson", ".json", ".gz")
# Of two clocks that agree.
_SKEW_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Drop:
    """What is to be put where: the object, its user metadata and where its results will be."""

    bucket: str
    key: str
    metadata: Mapping[str, str]
    outputs: Outputs

    @classmethod
    def of(cls, bucket: str, name: str, fields: Mapping[str, Any], form: Form) -> Self:
        """Return the drop of a name with these options; raises Refused for what cannot be.

        A name that says nothing of the file's form gets the ending that does.
        """
        says_its_form = name.lower().endswith(_ENDINGS)
        key = f"{INPUT_PREFIX}{name}{'' if says_its_form else _ending_of(form)}"
        outputs, reason = outputs_of_drop(key), why_no_name(key)
        if outputs is None or reason or not name.strip("/") or not name.isprintable():
            said = f"{name!r} cannot be the name of a drop: give another one by --name"
            raise Refused(f"{said}. {reason}" if reason else said)
        return cls(bucket, key, _user_metadata(fields), outputs)

    @property
    def url(self) -> str:
        """Return its address."""
        return f"s3://{self.bucket}/{self.key}"


def _ending_of(form: Form) -> str:
    return (".json" if form.is_array else ".jsonl") + (".gz" if form.is_gzip else "")


def _user_metadata(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return options and metadata as they ride on an object; raises Refused."""
    options = {name.replace("_", "-"): str(fields[name]) for name in fields if name != "metadata"}
    own = {name.lower(): value for name, value in fields.get("metadata", {}).items()}
    for name in own:
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9a-z-]+", name):
            raise Refused(f"{name!r} cannot be a key of an object's metadata: letters and digits")
        if name in _OPTIONS:
            raise Refused(f"{name} is an option: it has a flag of its own")
    found = {name: _header(value) for name, value in (options | own).items()}
    if sum(len(name) + len(value) for name, value in found.items()) > _MAX_METADATA_BYTES:
        raise Refused(f"options and metadata may have {_MAX_METADATA_BYTES:,} bytes in the bucket")
    return found


def _header(value: str) -> str:
    """Return a value as a header can hold it, encoded as RFC 2047 says where it must be."""
    if value.isascii() and value.isprintable() and value == value.strip() and "=?" not in value:
        return value
    return Header(value, "utf-8", maxlinelen=sys.maxsize).encode(linesep="")


def drop(place: Drop, source: Source, targets: Targets | None, *, as_json: bool) -> int:
    """Put a file into the bucket; with targets, wait and fetch its rows. Return the exit status."""
    on_invalid_line = place.metadata.get("on-invalid-line", "fail")
    checked(source, None, "skip" if on_invalid_line == "skip" else "fail", as_json=as_json)
    s3 = client_of("s3")
    before = _etag_of(s3, place.bucket, place.outputs.report_key) if targets else None
    try:
        _put(s3, place, source)
    except Stopped as exc:
        raise Stopped(exc.signum, "nothing was dropped") from exc
    if as_json:
        print_json({"object": "drop", "url": place.url, "report": place.outputs.report_key})
    elif targets is not None and targets.take_standard_output:
        say(f"{place.url} is dropped")
    else:
        put(place.url)
    if targets is None:
        say(f"its rows will be at s3://{place.bucket}/{place.outputs.output_key}")
        return 0
    try:
        return _bring_home(s3, place, before, targets, as_json=as_json)
    except Stopped as exc:
        where = f"s3://{place.bucket}/{place.outputs.report_key}"
        raise Stopped(exc.signum, f"the batch is not ended by that; {where} will tell") from exc


def _put(s3: Any, place: Drop, source: Source) -> None:
    size = os.fstat(source.file.fileno()).st_size
    config = TransferConfig(
        multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=4
    )
    source.file.seek(0)
    with told(f"putting {place.url}"), bytes_shown("uploading", size) as show:
        s3.upload_fileobj(
            source.file,
            place.bucket,
            place.key,
            ExtraArgs={"Metadata": dict(place.metadata)},
            Callback=show,
            Config=config,
        )


def _bring_home(
    s3: Any, place: Drop, before: str | None, targets: Targets, *, as_json: bool
) -> int:
    say(f"waiting for s3://{place.bucket}/{place.outputs.report_key}")
    batch = _report(s3, place, before)
    saved: dict[str, str | None] = {"output": None, "errors": None}
    for kind, key, name, is_there in (
        ("output", place.outputs.output_key, targets.output, batch.output_file_id),
        ("errors", place.outputs.error_key, targets.errors, batch.error_file_id),
    ):
        if is_there and name is not None:
            with told(f"reading {key}"):
                found = s3.head_object(Bucket=place.bucket, Key=key)
            content = ObjectContent(s3, place.bucket, key, found["ETag"], found["ContentLength"])
            fetch(content, name, force=targets.force)
            saved[kind] = name
    if as_json:
        print_json({**batch.fields, "saved": saved})
    tell_end(batch)
    tell_of_errors(batch, targets)
    return exit_status_of(batch)


def _report(s3: Any, place: Drop, before: str | None) -> Batch:
    """Wait for the report of this drop: one that was there before is of an earlier one."""
    with told(f"reading {place.url}"):
        found = s3.head_object(Bucket=place.bucket, Key=place.key)
    since = found["LastModified"].timestamp() - _SKEW_SECONDS
    key, delays, faults = place.outputs.report_key, poll_delays(), Patience(LONG_SECONDS)
    with drop_shown(place.url, since) as look:
        while True:
            try:
                etag = _etag_of(s3, place.bucket, key)
                if etag not in {None, before}:
                    with told(f"reading s3://{place.bucket}/{key}"):
                        body = s3.get_object(Bucket=place.bucket, Key=key)["Body"].read()
                    batch = Batch(json.loads(body))
                    if batch.fields["created_at"] >= since:
                        return batch
                    before = etag
                faults.reset()
            except (Unreachable, HTTPError) as exc:
                faults.bear(str(exc))
            look()
            patience.pause(next(delays))


def _etag_of(s3: Any, bucket: str, key: str) -> str | None:
    with told(f"reading s3://{bucket}/{key}"):
        try:
            return str(s3.head_object(Bucket=bucket, Key=key)["ETag"])
        except ClientError as exc:
            if exc.response["Error"]["Code"] in _NOT_THERE:
                return None
            raise


@dataclass(frozen=True, slots=True)
class ObjectContent:
    """An object of the bucket as it was when it was looked at."""

    s3: Any
    bucket: str
    key: str
    etag: str
    num_bytes: int

    @property
    def id(self) -> str:
        """Return what tells its bytes from all others."""
        return re.sub(r"\W", "", self.etag)

    @contextmanager
    def open(self, start: int) -> Iterator[Iterator[bytes]]:
        """Open the bytes from `start` on."""
        wanted = {"Range": f"bytes={start}-"} if start else {}
        place = {"Bucket": self.bucket, "Key": self.key, "IfMatch": self.etag}
        try:
            with told(f"reading s3://{self.bucket}/{self.key}"):
                body = self.s3.get_object(**place, **wanted)["Body"]
            yield body.iter_chunks(_CHUNK_BYTES)
        except (Unreachable, BotoCoreError, HTTPError) as exc:
            raise Interrupted(str(exc)) from exc
