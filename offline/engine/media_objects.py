"""Media in S3: reads the objects of `s3://` URLs in requests, from allowed buckets only."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from tidemill.net.backoff import exponential_delays, retry, retry_async
from tidemill.net.fetch import ByteBudget, FetchFailed
from tidemill.protocol.urls import ObjectUrl, parse_object_url

if TYPE_CHECKING:
    from tidemill.handler.aws.sync import Aws

_ANY: Final = "*"
_NUM_THREADS: Final = 16
_CHUNK_BYTES: Final = 2**18
# The client retries requests; these are tries of a response's body.
_NUM_TRIES: Final = 3
_DELAY_SECONDS: Final = 0.5
_OBJECT_SECONDS: Final = 300.0
# Delays of a patient reader's retries.
_OUTAGE_SECONDS: Final = 1.0
_MAX_OUTAGE_SECONDS: Final = 30.0
# Errors of an object or its address. All others are of the store, the network or the credentials.
_REASONS: Final = {
    "404": "the object does not exist",
    "NoSuchKey": "the object does not exist",
    "NoSuchBucket": "the bucket does not exist",
    "403": "access to the object is denied, or it does not exist",
    "AccessDenied": "access to the object is denied, or it does not exist",
    "AllAccessDisabled": "access to the object is denied, or it does not exist",
    "InvalidBucketName": "the bucket's name is invalid",
    "InvalidObjectState": "the object is archived: restore it first",
    "InvalidRequest": "the object cannot be read without its encryption key",
    "KMS.DisabledException": "the object's KMS key is disabled",
    "KMS.NotFoundException": "the object's KMS key does not exist",
    "KeyTooLongError": "the key is too long",
    "MethodNotAllowed": "the object was deleted",
}


class _NotSetUp(FetchFailed):
    """S3 cannot be used by this process at all; waiting does not help."""


@dataclass(frozen=True, slots=True)
class ObjectReader:
    """Reads objects with this process's AWS credentials.

    `allowed` are buckets, each perhaps followed by a slash and the prefix of its keys; `*` is any.
    While S3 fails, reads are repeated, until all of them have failed for `patience_seconds`.
    """

    allowed: tuple[str, ...]
    patience_seconds: float = 0

    async def __call__(self, url: str, max_bytes: int, allowance: ByteBudget) -> bytes:
        """Return an object of at most `max_bytes`, counted in `allowance`; raises `FetchFailed`."""
        try:
            place = parse_object_url(url)
        except ValueError as exc:
            raise FetchFailed(str(exc)) from exc
        self._check(place)
        loop = asyncio.get_running_loop()
        return await retry_async(
            lambda: loop.run_in_executor(_threads(), _read, place, max_bytes, allowance),
            exponential_delays(_OUTAGE_SECONDS, most=_MAX_OUTAGE_SECONDS),
            FetchFailed,
            self._is_outage,
        )

    def _check(self, place: ObjectUrl) -> None:
        for one in self.allowed:
            bucket, _, prefix = one.partition("/")
            if one == _ANY or (bucket == place.bucket and place.key.startswith(prefix)):
                return
        raise FetchFailed(
            f"{place.bucket} is not an allowed bucket, or the key has another prefix (allowed: "
            f"{', '.join(self.allowed)})"
        )

    def _is_outage(self, failure: FetchFailed) -> bool:
        """Say whether a read is to be repeated after its failure."""
        if not failure.is_of_service or isinstance(failure, _NotSetUp):
            return False
        return _outage.seconds() < self.patience_seconds


class _Outage:
    """Time since the first failure of S3 after which no object was read."""

    def __init__(self) -> None:
        self._since: float | None = None

    def seconds(self) -> float:
        """Return the time until this failure."""
        now = time.monotonic()
        if self._since is None:
            self._since = now
        return now - self._since

    def end(self) -> None:
        """Note that an object was read."""
        self._since = None


_outage = _Outage()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_NUM_THREADS, "tidemill-objects")


@cache
def _aws() -> Aws:
    """Return this process's client, which works in any thread; raises FetchFailed without boto3."""
    try:
        from tidemill.handler.aws.sync import Aws
    except ModuleNotFoundError as exc:
        raise _NotSetUp(
            "s3:// URLs require boto3: pip install 'tidemill[cloud]'", is_of_service=True
        ) from exc
    return Aws()


def _read(place: ObjectUrl, max_bytes: int, allowance: ByteBudget) -> bytes:
    until = time.monotonic() + _OBJECT_SECONDS
    data = retry(
        lambda: _read_once(place, max_bytes, allowance, until),
        islice(exponential_delays(_DELAY_SECONDS), _NUM_TRIES - 1),
        FetchFailed,
        lambda failure: failure.is_retryable and time.monotonic() <= until,
    )
    _outage.end()
    return data


def _read_once(place: ObjectUrl, max_bytes: int, allowance: ByteBudget, until: float) -> bytes:
    aws = _aws()
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        response = aws.clients["s3"].get_object(Bucket=place.bucket, Key=place.key)
    except ClientError as exc:
        code = str(exc.response.get("Error", {}).get("Code", ""))
        if (reason := _REASONS.get(code)) is not None:
            raise FetchFailed(reason) from exc
        raise _of_service(f"S3 failed ({code or 'without a code'})") from exc
    except NoCredentialsError as exc:
        words = (
            "S3 failed (NoCredentialsError): set AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret"
        )
        raise _NotSetUp(words, is_of_service=True) from exc
    except BotoCoreError as exc:
        raise _of_service(f"S3 failed ({type(exc).__name__})") from exc
    body, num_bytes = response["Body"], int(response["ContentLength"])
    with closing(body):
        if num_bytes > max_bytes:
            raise FetchFailed(f"it is larger than {max_bytes:,} bytes")
        allowance.acquire(num_bytes)
        try:
            return _received(body, num_bytes, until)
        except BaseException:
            allowance.release(num_bytes)
            raise


def _received(body: Any, num_bytes: int, until: float) -> bytes:
    """Return the bytes of a response; raises FetchFailed unless it is complete in time."""
    data = bytearray()
    while chunk := _chunk(body):
        data += chunk
        if time.monotonic() > until:
            raise _of_service("S3 timed out")
    if len(data) != num_bytes:
        message = f"only {len(data):,} of {num_bytes:,} bytes arrived"
        raise _of_service(message, is_retryable=True)
    return bytes(data)


def _chunk(body: Any) -> bytes:
    """Return the next bytes of an object; raises FetchFailed if the connection fails."""
    from botocore.exceptions import BotoCoreError, HTTPClientError
    from urllib3.exceptions import HTTPError

    try:
        chunk: bytes = body.read(_CHUNK_BYTES)
    except (BotoCoreError, HTTPClientError, HTTPError, OSError) as exc:
        raise _of_service(f"S3 failed ({type(exc).__name__})", is_retryable=True) from exc
    return chunk


def _of_service(message: str, *, is_retryable: bool = False) -> FetchFailed:
    return FetchFailed(message, is_retryable=is_retryable, is_of_service=True)
