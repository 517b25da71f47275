"""Client of a deployment's bucket: uploads files, reads results."""

from __future__ import annotations

import json
import time
from typing import Any

from botocore.exceptions import ClientError


class NotFinished(Exception):
    """A batch without a report in time; the message contains its state."""


class Drops:
    """Uploads files and reads their results; `s3` is a boto3 client."""

    def __init__(self, s3: Any, bucket: str) -> None:
        self.s3 = s3
        self.bucket = bucket

    def drop(self, name: str, body: bytes, **metadata: str) -> str:
        """Upload `input/<name>.jsonl`, return its URL; `_` in an option's name becomes `-`."""
        return self.put(f"{name}.jsonl", body, **metadata)

    def put(self, name: str, body: bytes, **metadata: str) -> str:
        """Upload `input/<name>`, return its URL."""
        key = f"input/{name}"
        self.s3.put_object(
            Bucket=self.bucket,
            Key=key,
            Body=body,
            Metadata={option.replace("_", "-"): value for option, value in metadata.items()},
        )
        return f"s3://{self.bucket}/{key}"

    def wait(self, name: str, seconds: float = 120) -> dict[str, Any]:
        """Wait for the report of a dropped file and return it; raises NotFinished."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (report := self.report(name)) is not None:
                return report
            time.sleep(0.1)
        raise NotFinished(f"{name}: no report after {seconds:g} s")

    def report(self, name: str) -> dict[str, Any] | None:
        """Return the report of a dropped file, or None if there is none yet."""
        body = self.read(f"output/{name}.batch.json")
        return None if body is None else dict(json.loads(body))

    def rows(self, name: str, kind: str = "") -> list[dict[str, Any]]:
        """Return the rows of a dropped file's output, or with `.errors` of its errors."""
        body = self.read(f"output/{name}{kind}.jsonl") or b""
        return [json.loads(line) for line in body.splitlines()]

    def read(self, key: str) -> bytes | None:
        """Return an object of the bucket, or None."""
        try:
            body: bytes = self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        except ClientError as exc:
            if exc.response["Error"]["Code"] in {"NoSuchKey", "404"}:
                return None
            raise
        return body

    def remove(self, name: str) -> None:
        """Delete a dropped file and all of its results."""
        for key in (
            f"input/{name}.jsonl",
            f"output/{name}.jsonl",
            f"output/{name}.errors.jsonl",
            f"output/{name}.batch.json",
        ):
            self.s3.delete_object(Bucket=self.bucket, Key=key)
