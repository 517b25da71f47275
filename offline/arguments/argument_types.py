"""Argument types: parse sizes, numbers, ports and texts for argparse."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Literal, NamedTuple

_S3 = "s3://"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size_in_bytes(text: str) -> int:
    """Return `512M`, `4G`, `1.5GiB` or a plain number as bytes; units are powers of 1,024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size: use 512M, 4G or a number of bytes"
        )
    return size


class S3Folder(NamedTuple):
    """A prefix in a bucket, which is empty or ends with a slash."""

    bucket: str
    prefix: str

    def __str__(self) -> str:
        return f"{_S3}{self.bucket}/{self.prefix}"


def local_or_s3_folder(text: str) -> Path | S3Folder:
    """Return a local path, or the bucket and prefix of `s3://bucket/prefix`."""
    if not text.startswith(_S3):
        if "://" in text:
            raise argparse.ArgumentTypeError(
                f"{text!r} is neither a local folder nor s3://bucket/prefix"
            )
        return Path(text)
    bucket, _, prefix = text.removeprefix(_S3).partition("/")
    if not bucket:
        raise argparse.ArgumentTypeError(f"{text!r} has no bucket: use s3://bucket/prefix")
    prefix = prefix.strip("/")
    return S3Folder(bucket, f"{prefix}/" if prefix else "")


def field_names(text: str) -> tuple[str, ...]:
    """Return comma-separated names of a line's fields, except those of every row."""
    from tidemill.batch.batch_request import ECHO_FIELDS, echo_field_names  # late: rarely given

    names = echo_field_names(text.split(","))
    if names is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be {ECHO_FIELDS}")
    return names


def positive_int(text: str) -> int:
    """Return the number, which must be at least 1."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number ≥ 1")
    return int(text)


def positive_number(text: str) -> float:
    """Return the number, which must be above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number > 0")
    return value


def port_number(text: str) -> int:
    """Return the port, which may be 0 for any free one."""
    if not re.fullmatch(r"\d{1,5}", text) or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid port: use 0 to 65535")
    return int(text)


def seed_number(text: str) -> int:
    """Return the seed, which must fit in 63 bits."""
    if not re.fullmatch(r"\d+", text) or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid seed: use a whole number from 0 to 2**63 - 1"
        )
    return int(text)


def temperature(text: str) -> float:
    """Return the temperature of sampling, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid temperature: use a number ≥ 0")
    return value


def nonblank_text(text: str) -> str:
    """Return the text, which must not be blank."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the text must not be empty")
    return text


def data_parallel_size(text: str) -> int | Literal["auto"]:
    """Return `auto`, or a whole number of 1 or more; raises ArgumentTypeError."""
    return "auto" if text == "auto" else positive_int(text)
