"""Copies inside a bucket, timed."""

from __future__ import annotations

from infra.ops.smoke import time_copies
from tests.emulators import Emulator


def test_copies_are_timed_and_nothing_is_left(emulator: Emulator) -> None:
    """Many parts at once and all of them as one, of objects and uploads that are gone behind."""
    bucket, s3 = emulator.create().bucket, emulator.client("s3")
    sentence = time_copies(s3, bucket, part_mib=6, count=2)
    assert sentence.startswith("S3 copied 2 parts of 6 MiB at once in ")
    assert ", and one of 12 MiB in " in sentence
    assert s3.list_objects_v2(Bucket=bucket, Prefix="work/").get("Contents", []) == []
    assert s3.list_multipart_uploads(Bucket=bucket).get("Uploads", []) == []
