"""S3 transfer: objects in AWS S3 or a compatible store as inputs and outputs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from botocore.exceptions import BotoCoreError, ClientError

from tidemill.handler.aws.calls import Call, Operation, translate
from tidemill.handler.aws.sync import Aws
from tidemill.handler.errors import AwsError, NotThere, ObjectChanged
from tidemill.handler.worker.weights.download import DownloadItem, download

from ..console.errors import BadInput, InputChanged, Refused, TransferFailed
from .s3_object import S3Object

_NAME = "object"
_NO_RIGHT_TO_READ = "AccessDenied"


class _Found(NamedTuple):
    """An object's version and size, and when it was written (Unix seconds)."""

    etag: str
    num_bytes: int
    modified: int


@contextmanager
def open_object(place: S3Object, tmp_dir: Path | None) -> Iterator[tuple[IO[bytes], int]]:
    """Copy an object to a temporary file; yield that file and the object's time of writing.

    Raises Refused if the object does not exist, InputChanged if it changes in the meantime,
    TransferFailed for an error of the store, and BadInput if the disk is full.
    """
    try:
        with tempfile.TemporaryDirectory(dir=tmp_dir, prefix="tidemill-input-") as folder:
            path = Path(folder) / _NAME
            found = _download(place, path)
            file = path.open("rb")
    except OSError as exc:
        raise BadInput(
            f"copying {place} to {tmp_dir or tempfile.gettempdir()} failed: "
            f"{exc.strerror or exc}. Pass --output-tmp-dir to use another folder"
        ) from exc
    with file:
        yield file, found.modified


def _download(place: S3Object, path: Path) -> _Found:
    aws = Aws()
    with _errors(f"reading {place}"):
        found = aws.run(_find(place))
        if found is None:
            raise Refused(f"the input {place} does not exist")
        if found.num_bytes:
            item = DownloadItem(place.key, found.etag, found.num_bytes, path)
            download(aws.clients["s3"], place.bucket, [item], lambda _: None)
        else:
            path.touch()
    return found


def check_new_object(place: S3Object, *, force: bool) -> None:
    """Raise Refused for an existing object, unless `force`; without read permission, do not check.

    Raises TransferFailed for a store that cannot be used.
    """
    with _errors(f"checking {place}"):
        try:
            found = Aws().run(_find(place))
        except AwsError as exc:
            if exc.aws_code != _NO_RIGHT_TO_READ:
                raise
            return
    if found is not None and not force:
        raise Refused(
            f"{place} already exists: choose another object, or pass --force to overwrite it"
        )


def upload_object(place: S3Object, rows: IO[bytes]) -> None:
    """Write `rows` as an object, in parts if they are large; raises TransferFailed."""
    rows.seek(0)
    about = {"ContentType": "application/x-ndjson"}
    with _errors(f"writing {place}"):
        try:
            Aws().clients["s3"].upload_fileobj(rows, *place, ExtraArgs=about)
        except (ClientError, BotoCoreError) as exc:
            raise translate(exc, Call("s3", "put_object", {})) from exc


def _find(place: S3Object) -> Operation[_Found | None]:
    """Return an object's version, size and time; None if it does not exist.

    Its first byte is read, because the response to a HEAD does not contain the reason of an error.
    """
    where = {"Bucket": place.bucket, "Key": place.key}
    try:
        response = yield Call("s3", "get_object", where | {"Range": "bytes=0-0"})
        num_bytes = int(response.get("ContentRange", "/1").rpartition("/")[2])
    except NotThere:
        return None
    except AwsError as exc:
        if exc.aws_code != "InvalidRange":
            raise
        response, num_bytes = (yield Call("s3", "head_object", where)), 0
    if "ETag" not in response:
        raise AwsError("s3 get_object: the endpoint is not S3; it may be a console or another port")
    return _Found(response["ETag"], num_bytes, int(response["LastModified"].timestamp()))


@contextmanager
def _errors(doing: str) -> Iterator[None]:
    """Translate errors of the store to command-line errors."""
    try:
        yield
    except ObjectChanged as exc:
        raise InputChanged(f"{doing} failed: the object changed in the meantime") from exc
    except AwsError as exc:
        raise TransferFailed(f"{doing} failed: {exc}") from exc
