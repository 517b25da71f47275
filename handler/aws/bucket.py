"""The bucket's operations. Streams of whole objects are `sync.Aws.open`; all else is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from handler.aws.calls import Call, Operation
from handler.batch.keys import part_key, part_prefix, segment_key
from handler.batch.model import Shard, Source
from handler.batch.parts import PartIndex, Seal, Segment, decode_index
from handler.errors import NotThere

_CACHED_PART_BYTES = 64 * 2**20


def pinned(source: Source) -> dict[str, str]:
    """Return what `get_object` takes to read this very object and no later one."""
    pin = {"Bucket": source.bucket, "Key": source.key, "IfMatch": source.etag}
    return pin if source.version_id is None else pin | {"VersionId": source.version_id}


def read_range(source: Source, start: int, end: int) -> Operation[bytes]:
    """Return bytes `start` to `end` (exclusive) of the input.

    Raises ObjectChanged or NotThere when it is no longer what was pinned.
    """
    if end <= start:
        return b""
    response = yield Call(
        "s3", "get_object", pinned(source) | {"Range": f"bytes={start}-{end - 1}"}
    )
    body: bytes = response["Body"]
    return body


@dataclass(frozen=True, slots=True)
class Bucket:
    """Makes the operations on the bucket that a deployment owns."""

    name: str

    def head(self, key: str, version_id: str | None = None) -> Operation[Mapping[str, Any] | None]:
        """Return what S3 tells of an object, or None when it is not there."""
        version = {} if version_id is None else {"VersionId": version_id}
        try:
            response: Mapping[str, Any] = yield Call(
                "s3", "head_object", {"Bucket": self.name, "Key": key, **version}
            )
        except NotThere:
            return None
        return response

    def get(self, key: str) -> Operation[bytes]:
        """Return an object whole; raises NotThere."""
        response = yield Call("s3", "get_object", {"Bucket": self.name, "Key": key})
        body: bytes = response["Body"]
        return body

    def put(
        self, key: str, body: bytes, content_type: str = "application/x-ndjson"
    ) -> Operation[None]:
        """Write an object whole, over one that is there."""
        yield Call(
            "s3",
            "put_object",
            {"Bucket": self.name, "Key": key, "Body": body, "ContentType": content_type},
        )

    def list_keys(self, prefix: str) -> Operation[list[str]]:
        """Return all keys that begin with `prefix`, in their order."""
        arguments: dict[str, Any] = {"Bucket": self.name, "Prefix": prefix}
        keys: list[str] = []
        while True:
            response = yield Call("s3", "list_objects_v2", arguments)
            keys += [found["Key"] for found in response.get("Contents", ())]
            if not response.get("IsTruncated"):
                return keys
            arguments["ContinuationToken"] = response["NextContinuationToken"]

    # Parts of a shard

    def put_part(self, shard: Shard, number: int, data: bytes) -> Operation[str]:
        """Make rows durable as the `number`th part of the shard's owner; return its key."""
        key = part_key(shard.batch_id, shard.number, shard.fence, number)
        yield from self.put(key, data)
        return key

    def index_parts(self, batch_id: str, shard: int) -> Operation[PartIndex]:
        """Read every part of a shard and return which lines have a row."""
        index = PartIndex()
        keys = yield from self.list_keys(part_prefix(batch_id, shard))
        for key in keys:
            data = yield from self.get(key)
            index.add(key, decode_index(data))
        return index

    def put_segments(self, shard: Shard, seal: Seal) -> Operation[None]:
        """Write the segments of a seal under the shard's fence.

        Parts are read as their rows come up; at most 64 MiB of them are held.
        """
        held: dict[str, bytes] = {}
        for kind, segments in (("output", seal.output), ("errors", seal.errors)):
            for number, segment in enumerate(segments):
                body = yield from self._assemble(segment, held)
                key = segment_key(shard.batch_id, shard.number, shard.fence, kind, number)
                yield from self.put(key, body)

    def _assemble(self, segment: Segment, held: dict[str, bytes]) -> Operation[bytes]:
        pieces = []
        for key, start, end in segment.slices:
            if key not in held:
                while held and sum(map(len, held.values())) > _CACHED_PART_BYTES:
                    held.pop(next(iter(held)))
                held[key] = yield from self.get(key)
            pieces.append(held[key][start:end])
        return b"".join(pieces)
