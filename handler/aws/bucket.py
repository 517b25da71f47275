"""Operations on the bucket, except streams of whole objects, which are in `sync.Aws.open`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, NamedTuple

from tidemill.batch.errors import BadPart
from tidemill.batch.model import Shard, Source
from tidemill.batch.object_keys import (
    draft_key,
    draft_prefix,
    part_key,
    part_prefix,
    seal_key,
    segment_key,
)
from tidemill.batch.parts import (
    PartIndex,
    RowPlace,
    Seal,
    SealIndex,
    Segment,
    decode_head,
    decode_seal,
    encode_seal,
)

from ..errors import AwsError, NotThere, ObjectChanged
from .calls import Call, Operation

# The header of a part with some hundred rows; larger ones need a second read.
_HEAD_BYTES = 2**14

# A lifecycle rule deletes objects with this tag: infra/data/bucket.py.
SHORT_LIVED = "tidemill-short-lived=yes"
_LINES_TYPE = "application/x-ndjson"
# S3's maximum per call.
_MAX_DELETED = 1000


def _tags(is_short_lived: bool) -> dict[str, str]:  # noqa: FBT001 - every call names it
    return {"Tagging": SHORT_LIVED} if is_short_lived else {}


def pinned(source: Source) -> dict[str, str]:
    """Return `get_object` arguments that read exactly this object and no later one."""
    pin = {"Bucket": source.bucket, "Key": source.key, "IfMatch": source.etag}
    return pin if source.version_id is None else pin | {"VersionId": source.version_id}


def read_range(source: Source, start: int, end: int) -> Operation[bytes]:
    """Return bytes `start` to `end` (exclusive) of the input.

    Raises ObjectChanged or NotThere when it is no longer what was pinned.
    """
    if end <= start:
        return b""
    wanted = {"Range": f"bytes={start}-{end - 1}"}
    try:
        # Without the version while it is the newest: MiniStack lacks ranges of versions.
        newest = pinned(replace(source, version_id=None))
        response = yield Call("s3", "get_object", newest | wanted)
    except (ObjectChanged, NotThere):
        if source.version_id is None:
            raise
        response = yield Call("s3", "get_object", pinned(source) | wanted)
    body: bytes = response["Body"]
    # A server may reply with the whole object.
    return body if "ContentRange" in response else body[start:end]


class ObjectHead(NamedTuple):
    """An object in a listing; `modified` is Unix seconds."""

    key: str
    etag: str
    num_bytes: int
    modified: int


class ObjectVersion(NamedTuple):
    """A version of an object, or a marker of its deletion; `id` is "null" without versions.

    `modified` is Unix seconds; of a multipart upload it is when that began.
    """

    key: str
    id: str
    etag: str | None
    is_latest: bool
    modified: int
    is_marker: bool


@dataclass(frozen=True, slots=True)
class Bucket:
    """Creates operations on the deployment's bucket."""

    name: str

    def head(self, key: str, version_id: str | None = None) -> Operation[Mapping[str, Any] | None]:
        """Return the S3 metadata of an object, or None if it does not exist."""
        try:
            response: Mapping[str, Any] = yield Call(
                "s3", "head_object", self._version(key, version_id)
            )
        except NotThere:
            return None
        return response

    def get(self, key: str, version_id: str | None = None) -> Operation[bytes]:
        """Return a whole object; raises NotThere."""
        response = yield Call("s3", "get_object", self._version(key, version_id))
        body: bytes = response["Body"]
        return body

    def get_range(
        self, key: str, start: int, end: int, version_id: str | None = None
    ) -> Operation[bytes]:
        """Return bytes `start` to `end` (exclusive) of an object; raises NotThere."""
        wanted = {"Range": f"bytes={start}-{end - 1}"}
        response = yield Call("s3", "get_object", self._version(key, version_id) | wanted)
        body: bytes = response["Body"]
        # A server may reply with the whole object.
        return body if "ContentRange" in response else body[start:end]

    def download(self, key: str, version_id: str | None, *, disposition: str) -> Call:
        """Return the call to presign for a download in a browser; `disposition` names the file."""
        wanted = {"ResponseContentDisposition": disposition}
        return Call("s3", "get_object", self._version(key, version_id) | wanted)

    def put(
        self, key: str, body: bytes | IO[bytes], content_type: str = _LINES_TYPE
    ) -> Operation[None]:
        """Write a whole object, replacing an existing one."""
        yield Call("s3", "put_object", self._new(key, content_type) | {"Body": body})

    def put_file(self, key: str, body: bytes, *, is_short_lived: bool) -> Operation[str | None]:
        """Write a file as `put` does and return the object's version, if it has one."""
        where = self._new(key) | _tags(is_short_lived)
        response = yield Call("s3", "put_object", where | {"Body": body})
        version_id: str | None = response.get("VersionId")
        return version_id

    def list_keys(self, prefix: str) -> Operation[list[str]]:
        """Return all keys that begin with `prefix`, in order."""
        found = yield from self._list(prefix)
        return [each["Key"] for each in found]

    def list_sizes(self, prefix: str) -> Operation[dict[str, int]]:
        """Return the size of every object whose key begins with `prefix`, by key."""
        found = yield from self._list(prefix)
        return {each["Key"]: each["Size"] for each in found}

    def list_page(self, prefix: str, after: str) -> Operation[tuple[list[ObjectHead], bool]]:
        """Return the objects after a key, at most a thousand, and whether more follow."""
        arguments = {"Bucket": self.name, "Prefix": prefix, "StartAfter": after}
        response = yield Call("s3", "list_objects_v2", arguments)
        listed = [
            ObjectHead(
                each["Key"], each["ETag"], each["Size"], int(each["LastModified"].timestamp())
            )
            for each in response.get("Contents", ())
        ]
        return listed, bool(response.get("IsTruncated"))

    def delete_all(self, keys: Sequence[str]) -> Operation[None]:
        """Delete objects, a thousand per call; one by one if the store does not support that."""
        for start in range(0, len(keys), _MAX_DELETED):
            some = keys[start : start + _MAX_DELETED]
            gone = [{"Key": key} for key in some]
            where = {"Bucket": self.name, "Delete": {"Objects": gone, "Quiet": True}}
            try:
                yield Call("s3", "delete_objects", where)
            except AwsError as exc:
                if exc.aws_code != "NotImplemented":
                    raise
                for key in some:
                    yield from self.delete(key)

    def delete(self, key: str) -> Operation[None]:
        """Delete an object; in a bucket with versions it can be restored."""
        yield Call("s3", "delete_object", {"Bucket": self.name, "Key": key})

    def delete_found(self, key: str, found: Mapping[str, Any]) -> Operation[None]:
        """Delete an object if it is still the one that `head` has `found`."""
        where = {"Bucket": self.name, "Key": key, "IfMatch": found["ETag"]}
        try:
            yield Call("s3", "delete_object", where)
        except (NotThere, ObjectChanged):
            return

    def delete_version(self, key: str, version_id: str | None) -> Operation[None]:
        """Delete an object unless another version has replaced it."""
        found = yield from self.head(key)
        if found is not None and version_id in {None, found.get("VersionId")}:
            yield from self.delete_found(key, found)

    def list_versions(
        self, prefix: str, after: Mapping[str, str] | None = None
    ) -> Operation[tuple[list[ObjectVersion], Mapping[str, str] | None]]:
        """Return versions and delete markers of keys with a prefix, at most 1,000.

        The second item is the position of the next page, None after the last page.
        """
        where = {"Bucket": self.name, "Prefix": prefix, **(after or {})}
        response = yield Call("s3", "list_object_versions", where)
        following = None
        if response.get("IsTruncated"):
            names = ("KeyMarker", "VersionIdMarker")
            following = {name: response[f"Next{name}"] for name in names}
        found = [
            ObjectVersion(
                each["Key"],
                each["VersionId"],
                each.get("ETag"),
                each["IsLatest"],
                int(each["LastModified"].timestamp()),
                is_marker=kind == "DeleteMarkers",
            )
            for kind in ("Versions", "DeleteMarkers")
            for each in response.get(kind, ())
        ]
        return found, following

    def erase(self, versions: Sequence[ObjectVersion]) -> Operation[None]:
        """Permanently delete at most a thousand versions; AwsError if S3 refuses one."""
        gone = [{"Key": each.key, "VersionId": each.id} for each in versions]
        where = {"Bucket": self.name, "Delete": {"Objects": gone, "Quiet": True}}
        response = yield Call("s3", "delete_objects", where)
        if refused := response.get("Errors"):
            raise AwsError(f"s3 delete_objects: {len(refused)} refused, {refused[0].get('Code')}")

    # Multipart uploads

    def part_url(self, key: str, upload_id: str, number: int, num_bytes: int) -> Call:
        """Return the call that writes one part of exactly `num_bytes`, for a signed URL."""
        where = {"Bucket": self.name, "Key": key, "UploadId": upload_id, "PartNumber": number}
        return Call("s3", "upload_part", where | {"ContentLength": num_bytes})

    def create_upload(
        self, key: str, metadata: Mapping[str, str], *, is_short_lived: bool = False
    ) -> Operation[str]:
        """Start a multipart upload; return its ID."""
        about = _tags(is_short_lived) | {"Metadata": dict(metadata)}
        return (yield from self._create_upload(self._new(key) | about))

    def create_work_upload(self, key: str) -> Operation[str]:
        """Start a multipart upload of an internal object; return the upload's id."""
        return self._create_upload(self._new(key))

    def _create_upload(self, where: Mapping[str, Any]) -> Operation[str]:
        response = yield Call("s3", "create_multipart_upload", where)
        upload_id: str = response["UploadId"]
        return upload_id

    def list_uploaded(self, key: str, upload_id: str) -> Operation[dict[int, tuple[str, int]]]:
        """Return ETag and size of each stored part; raises NotThere if the upload has ended."""
        arguments = {"Bucket": self.name, "Key": key, "UploadId": upload_id}
        found: dict[int, tuple[str, int]] = {}
        while True:
            response = yield Call("s3", "list_parts", arguments)
            for part in response.get("Parts", ()):
                found[part["PartNumber"]] = (part["ETag"], part["Size"])
            if not response.get("IsTruncated"):
                return found
            arguments["PartNumberMarker"] = response["NextPartNumberMarker"]

    def upload_part(self, key: str, upload_id: str, number: int, body: IO[bytes]) -> Operation[str]:
        """Write one part from a seekable stream; return its ETag."""
        where = {"Bucket": self.name, "Key": key, "UploadId": upload_id, "PartNumber": number}
        response = yield Call("s3", "upload_part", where | {"Body": body})
        etag: str = response["ETag"]
        return etag

    def copy_part(
        self,
        key: str,
        upload_id: str,
        number: int,
        source_key: str,
        span: tuple[int, int] | None = None,
    ) -> Operation[str]:
        """Copy an object of this bucket as one part; return the part's ETag.

        The whole object is copied, or its bytes from the first of `span` to before the second.
        """
        where = {"Bucket": self.name, "Key": key, "UploadId": upload_id, "PartNumber": number}
        source: dict[str, Any] = {"CopySource": {"Bucket": self.name, "Key": source_key}}
        if span is not None:
            source["CopySourceRange"] = f"bytes={span[0]}-{span[1] - 1}"
        response = yield Call("s3", "upload_part_copy", where | source)
        etag: str = response["CopyPartResult"]["ETag"]
        return etag

    def complete_upload(
        self, key: str, upload_id: str, etags: Mapping[int, str]
    ) -> Operation[None]:
        """Complete a multipart upload; raises NotThere if it has ended or is gone."""
        parts = [{"PartNumber": number, "ETag": etags[number]} for number in sorted(etags)]
        where = {"Bucket": self.name, "Key": key, "UploadId": upload_id}
        yield Call("s3", "complete_multipart_upload", where | {"MultipartUpload": {"Parts": parts}})

    def abort_upload(self, key: str, upload_id: str) -> Operation[None]:
        """Abort an upload; an upload that is already gone is not an error."""
        where = {"Bucket": self.name, "Key": key, "UploadId": upload_id}
        try:
            yield Call("s3", "abort_multipart_upload", where)
        except NotThere:
            return

    # Parts of a shard

    def put_part(
        self, shard: Shard, number: int, data: bytes, *, is_draft: bool = False
    ) -> Operation[str]:
        """Store rows as the `number`th part, or draft, of the shard's owner; return its key."""
        key_of = draft_key if is_draft else part_key
        key = key_of(shard.batch_id, shard.number, shard.fence, number)
        yield from self.put(key, data)
        return key

    def index_parts(
        self,
        batch_id: str,
        shard: int,
        *,
        left_out: Callable[[str, str], None],
        are_drafts: bool = False,
    ) -> Operation[PartIndex]:
        """Read the header of every part, or draft, of a shard and return which lines have a row.

        An unreadable part counts as missing; `left_out` is called with its key and the reason.
        """
        index = PartIndex()
        prefix_of = draft_prefix if are_drafts else part_prefix
        keys = yield from self.list_keys(prefix_of(batch_id, shard))
        for key in keys:
            try:
                index.add(key, (yield from self.read_head(key)))
            except (BadPart, NotThere) as exc:
                left_out(key, str(exc))
        return index

    def put_segments(self, shard: Shard, seal: Seal) -> Operation[None]:
        """Write the segments of a seal and their row index, under the shard's fencing token."""
        for kind, segments in (("output", seal.output), ("errors", seal.errors)):
            for number, segment in enumerate(segments):
                body = yield from self._assemble(segment)
                key = segment_key(shard.batch_id, shard.number, shard.fence, kind, number)
                yield from self.put(key, body)
        key = seal_key(shard.batch_id, shard.number, shard.fence)
        yield from self.put(key, encode_seal(seal), "application/json")

    def read_seal(self, shard: Shard) -> Operation[SealIndex]:
        """Return the row index of a committed shard's segments; raises BadPart and NotThere."""
        key = seal_key(shard.batch_id, shard.number, shard.fence)
        return decode_seal((yield from self.get(key)))

    def _assemble(self, segment: Segment) -> Operation[bytes]:
        """Return the rows of a segment; each part is read once, from its first row to its last.

        Parts are in line order, so few unwanted bytes are in between.
        """
        of_part: dict[str, list[int]] = defaultdict(list)
        for index, piece in enumerate(segment.slices):
            of_part[piece.key].append(index)
        rows = [b""] * len(segment.slices)
        for key, indexes in of_part.items():
            start = min(segment.slices[index].start for index in indexes)
            end = max(segment.slices[index].end for index in indexes)
            data = yield from self.get_range(key, start, end)
            for index in indexes:
                piece = segment.slices[index]
                rows[index] = data[piece.start - start : piece.end - start]
        return b"".join(rows)

    def read_head(self, key: str) -> Operation[tuple[RowPlace, ...]]:
        """Return the place of each row in a part; only its first line is read.

        Raises BadPart and NotThere.
        """
        head, step = b"", _HEAD_BYTES
        while b"\n" not in head:
            start = len(head)
            where = {"Bucket": self.name, "Key": key, "Range": f"bytes={start}-{start + step - 1}"}
            try:
                response = yield Call("s3", "get_object", where)
            except AwsError as exc:
                if exc.aws_code == "InvalidRange":  # the object ends before its first line does
                    raise BadPart("not a part: it has no rows") from exc
                raise
            whole = response.get("ContentRange")
            head = head + response["Body"] if whole else response["Body"]
            num_bytes = int(whole.rpartition("/")[2]) if whole else len(head)
            step *= 8
            if len(head) >= num_bytes:
                break
        first, newline, _ = head.partition(b"\n")
        return decode_head(first + newline, num_bytes)

    def _list(self, prefix: str) -> Operation[list[Mapping[str, Any]]]:
        arguments: dict[str, Any] = {"Bucket": self.name, "Prefix": prefix}
        listed: list[Mapping[str, Any]] = []
        while True:
            response = yield Call("s3", "list_objects_v2", arguments)
            listed += response.get("Contents", ())
            if not response.get("IsTruncated"):
                return listed
            arguments["ContinuationToken"] = response["NextContinuationToken"]

    def _version(self, key: str, version_id: str | None) -> dict[str, Any]:
        version = {} if version_id is None else {"VersionId": version_id}
        return {"Bucket": self.name, "Key": key, **version}

    def _new(self, key: str, content_type: str = _LINES_TYPE) -> dict[str, Any]:
        return {"Bucket": self.name, "Key": key, "ContentType": content_type}
