"""Delivery of a batch's objects to its client's URLs: once, with retries; failures are reported.

Tries are counted in the batch before they start, and the backoff is a queue's delay: no run
sleeps, and a run that dies uses up its try. The rows stay in the bucket in any case. If a
tenant's receivers have been too slow, its deliveries are postponed without using up a try.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPException
from typing import IO

from botocore.exceptions import BotoCoreError

from tidemill.batch.errors import HandlerError
from tidemill.batch.model import BatchError
from tidemill.batch.result_kinds import KINDS, ResultKind
from tidemill.net.pinned_connection import Network
from tidemill.net.request import Response, put_stream
from tidemill.net.ssrf_guard import Target, UrlRefused, redact_url, resolve_target

from ..aws.items import dump
from ..errors import NotThere
from ..lifecycle.batch_lock import RESERVE_SECONDS, BatchLock, Requeue
from ..observability import logger

MAX_TRIES = 5
DELIVERED, FAILED = "delivered", "failed"

_FIRST_DELAY_SECONDS = 2.0
# A receiver slower than this, plus a minute for the rest, is given up.
_MIN_BYTES_PER_SECOND = 2**18
_STEPS_SECONDS = 60.0
# Quicker uploads do not count as waiting; and the delay before checking the allowance again.
_FAIR_BYTES_PER_SECOND = 2**20
_LATER_SECONDS = 60.0
_CHUNK_BYTES = 2**16
_MAX_TEXT_CHARS = 500


class TryFailed(HandlerError):
    """One failed try of a delivery; `is_final` if another one cannot succeed."""

    code = "output_delivery_failed"

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


def deliver(lock: BatchLock, network: Network | None = None) -> None:
    """Upload output and errors to the batch's URLs; raises Requeue before another try."""
    for kind in KINDS:
        url = kind.url_of(lock.batch)
        is_made = kind.field(lock.batch, "file_id") is not None
        if url and is_made and kind.field(lock.batch, "delivery") is None:
            _deliver(lock, kind, url, network or Network())


def _deliver(lock: BatchLock, kind: ResultKind, url: str, network: Network) -> None:
    tries = kind.field(lock.batch, "tries")
    if tries >= MAX_TRIES:
        _give_up(lock, kind, "the last try did not finish")
        return
    lock.check_deadline()
    if not lock.aws.run(lock.deployment.usage.may_wait(lock.batch.tenant, int(lock.now()))):
        raise Requeue(_LATER_SECONDS)
    lock.change(**kind.fields(tries=tries + 1))
    try:
        _put(lock, kind, url, network, tries)
    except TryFailed as exc:
        logger.warning(
            "delivery failed",
            batch_id=lock.batch.id,
            kind=kind.name,
            tries=tries + 1,
            reason=str(exc),
        )
        if not exc.is_final and tries + 1 < MAX_TRIES:
            raise Requeue(_FIRST_DELAY_SECONDS * 2**tries) from exc
        _give_up(lock, kind, str(exc))
    else:
        lock.change(**kind.fields(delivery=DELIVERED))
        logger.info("delivered", batch_id=lock.batch.id, kind=kind.name)


def _put(lock: BatchLock, kind: ResultKind, url: str, network: Network, tries: int) -> None:
    """Upload the object once; raises TryFailed unless it was accepted."""
    try:
        target = resolve_target(url, network.resolve)
    except UrlRefused as exc:
        raise TryFailed(str(exc), is_final=True) from exc
    except OSError as exc:
        raise TryFailed(f"host not found: {exc}") from exc
    try:
        answer = _send(lock, kind, target, network, tries)
    except (OSError, HTTPException, BotoCoreError) as exc:
        raise TryFailed(_words(f"{type(exc).__name__}: {exc}", url)) from exc
    if not answer.is_success:
        is_redirect = 300 <= answer.status < 400
        reason = "redirects are not followed" if is_redirect else _words(answer.text, url)
        raise TryFailed(
            f"the server returned {answer.status}: {reason}", is_final=not answer.is_retryable
        )


def _words(text: str, url: str) -> str:
    """Return the failure, truncated and without secret parts of the URL."""
    return redact_url(text, url)[:_MAX_TEXT_CHARS]


def _send(
    lock: BatchLock, kind: ResultKind, target: Target, network: Network, tries: int
) -> Response:
    bucket, key = lock.deployment.bucket, kind.key_of(lock.batch)
    found = lock.aws.run(bucket.head(key))
    if found is None:
        raise NotThere(f"{key} is gone")
    num_bytes = found["ContentLength"]
    stall_seconds = min(network.stall_seconds, max(1.0, lock.time_left() - RESERVE_SECONDS))
    whole_seconds = _STEPS_SECONDS + num_bytes / _MIN_BYTES_PER_SECOND
    # The lock must outlast a stalled connection.
    lock.lock_seconds += stall_seconds
    lock.renew()
    with (
        _waiting(lock, num_bytes),
        closing(lock.aws.open(Bucket=bucket.name, Key=key, IfMatch=found["ETag"])) as stream,
    ):
        return put_stream(
            replace(network, stall_seconds=stall_seconds, whole_seconds=whole_seconds),
            target,
            target.addresses[tries % len(target.addresses)],
            _chunks(lock, stream),
            num_bytes,
        )


@contextmanager
def _waiting(lock: BatchLock, num_bytes: int) -> Iterator[None]:
    """Count the time of an upload beyond its allowance, whatever its result."""
    began = lock.now()
    try:
        yield
    finally:
        seconds = lock.now() - began - num_bytes / _FAIR_BYTES_PER_SECOND
        usage = lock.deployment.usage
        lock.aws.run(usage.add_waited(lock.batch.tenant, seconds, int(began)))


def _chunks(lock: BatchLock, stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK_BYTES):
        lock.check_deadline()
        yield chunk


def _give_up(lock: BatchLock, kind: ResultKind, reason: str) -> None:
    param = f"{kind.name}_url"
    error = BatchError(
        TryFailed.code,
        f"The PUT to `{param}` failed: {reason}. The rows are stored as {kind.key_of(lock.batch)}.",
        param=param,
    )
    errors = [dump(each) for each in (*lock.batch.errors, error)]
    lock.change(errors=errors, **kind.fields(delivery=FAILED))
