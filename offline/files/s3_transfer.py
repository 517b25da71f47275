"""S3 transfer: objects of AWS's S3, or of another store, as inputs and outputs."""

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
    """Copy an object to a temporary file and yield that, and when the object was written.

    Raises Refused for an object that does not exist, InputChanged for one that is written
    meanwhile, TransferFailed for what the store refuses and BadInput where the disk has no room.
    """
    try:
        with tempfile.TemporaryDirectory(dir=tmp_dir, prefix="tidemill-input-") as folder:
            path = Path(folder) / _NAME
            found = _download(place, path)
            file = path.open("rb")
    except OSError as exc:
        raise BadInput(
            f"copying {place} to {tmp_dir or tempfile.gettempdir()} failed: "
            f"{exc.strerror or exc}; --output-tmp-dir names another folder"
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
    """Raise Refused for an object that is there, unless `force`; who may only write may go on.

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
        raise Refused(f"{place} is there already: name another object, or --force writes over it")


def upload_object(place: S3Object, rows: IO[bytes]) -> None:
    """Write all of `rows` as an object, in parts where they are large; raises TransferFailed."""
    rows.seek(0)
    about = {"ContentType": "application/x-ndjson"}
    with _errors(f"writing {place}"):
        try:
            Aws().clients["s3"].upload_fileobj(rows, *place, ExtraArgs=about)
        except (ClientError, BotoCoreError) as exc:
            raise translate(exc, Call("s3", "put_object", {})) from exc


def _find(place: S3Object) -> Operation[_Found | None]:
    """Return what is known of an object, None if it does not exist.

    Its first byte is read, as the answer to a HEAD does not say why it is refused.
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
        raise AwsError("s3 get_object: what answers there is not S3, as a console or another port")
    return _Found(response["ETag"], num_bytes, int(response["LastModified"].timestamp()))


@contextmanager
def _errors(doing: str) -> Iterator[None]:
    """Raise errors of the store as errors of the command line."""
    try:
        yield
    except ObjectChanged as exc:
        raise InputChanged(f"{doing} failed: it was written to meanwhile") from exc
    except AwsError as exc:
        raise TransferFailed(f"{doing} failed: {exc}") from exc
