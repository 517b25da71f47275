"""S3 objects on the command line: `s3://bucket/key`."""

from __future__ import annotations

from typing import Final, NamedTuple, Self

from ..console.errors import Refused

SCHEME: Final = "s3://"


class S3Object(NamedTuple):
    """An object's bucket and key."""

    bucket: str
    key: str

    @classmethod
    def parse(cls, name: str) -> Self:
        """Parse `s3://bucket/key`; raises Refused."""
        bucket, _, key = name[len(SCHEME) :].partition("/")
        if not bucket or not key or key.endswith("/"):
            raise Refused(f"{name} is not an S3 object: use {SCHEME}bucket/key")
        return cls(bucket, key)

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}/{self.key}"


def is_s3(name: str) -> bool:
    """Return whether the name is an `s3://` URL."""
    return name.lower().startswith(SCHEME)
