"""Measures how fast S3 copies parts inside a bucket, as joining results does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

_MIB = 2**20


def time_copies(s3: Any, bucket: str, *, part_mib: int = 16, count: int = 32) -> str:
    """Return how long many copies of a part take at once, and one of them all; `s3` is boto3's.

    Leaves nothing behind.
    """
    stem = f"work/smoke/{uuid4().hex}"
    part, whole = f"{stem}/part", f"{stem}/whole"
    try:
        s3.put_object(Bucket=bucket, Key=part, Body=bytes(part_mib * _MIB))
        with _upload(s3, bucket, whole) as upload:
            many_seconds = _copy(s3, upload, part, count)
            parts = [
                {"PartNumber": each["PartNumber"], "ETag": each["ETag"]}
                for each in s3.list_parts(**upload)["Parts"]
            ]
            s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        with _upload(s3, bucket, f"{stem}/again") as upload:
            one_seconds = _copy(s3, upload, whole, 1)
    finally:
        for key in (part, whole):
            s3.delete_object(Bucket=bucket, Key=key)
    return (
        f"S3 copied {count} parts of {part_mib} MiB at once in {many_seconds:.1f} s, and one of "
        f"{count * part_mib} MiB in {one_seconds:.1f} s"
    )


@contextmanager
def _upload(s3: Any, bucket: str, key: str) -> Iterator[dict[str, str]]:
    """Begin an upload and give it up behind the block, unless it was completed there."""
    where = {"Bucket": bucket, "Key": key}
    where["UploadId"] = s3.create_multipart_upload(**where)["UploadId"]
    try:
        yield where
    finally:
        uploads = s3.list_multipart_uploads(Bucket=bucket, Prefix=key).get("Uploads", ())
        if uploads:
            s3.abort_multipart_upload(**where)


def _copy(s3: Any, upload: dict[str, str], source: str, count: int) -> float:
    """Copy an object as so many parts at once and return the seconds."""

    def copy(number: int) -> None:
        s3.upload_part_copy(
            **upload, PartNumber=number, CopySource={"Bucket": upload["Bucket"], "Key": source}
        )

    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(copy, range(1, count + 1)))
    return time.perf_counter() - began
