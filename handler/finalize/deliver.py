"""Putting a batch's objects where its client asked: uploaded once, retried, and told when not.

Tries are counted in the batch before they begin, and the wait between them is a queue's delay: no
run sleeps, and one that dies takes its try with it. The rows stay in the bucket in any case. Those
of a tenant whose receivers have taken too much of everybody's runs wait a while, no try is used up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.client import HTTPException
from typing import IO

from botocore.exceptions import BotoCoreError

from engine.hosts.addresses import Target, UrlRefused, find_target, without_secrets
from engine.hosts.network import Network
from handler.aws.items import dump
from handler.batch.kinds import KINDS, Kind
from handler.batch.model import BatchError
from handler.errors import HandlerError, NotThere
from handler.log import logger
from handler.moves.turn import RESERVE_SECONDS, ComeBack, Run
from handler.outbound.transfer import Answer, put_stream

MAX_TRIES = 5
DELIVERED, FAILED = "delivered", "failed"

_FIRST_DELAY_SECONDS = 2.0
# Who takes bytes more slowly than this, and a minute for the rest, is given up.
_MIN_BYTES_PER_SECOND = 2**18
_STEPS_SECONDS = 60.0
# What is quicker than this is not waited for. And when to look again whether it may be.
_FAIR_BYTES_PER_SECOND = 2**20
_LATER_SECONDS = 60.0
_CHUNK_BYTES = 2**16
_MAX_TEXT_CHARS = 500


class TryFailed(HandlerError):
    """One try of a delivery that came to nothing; `is_final` when no other would do better."""

    code = "output_delivery_failed"

    def __init__(self, message: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


def deliver(run: Run, network: Network | None = None) -> None:
    """Put output and errors to the urls of the batch; raises ComeBack before another try."""
    for kind in KINDS:
        url = kind.url_of(run.batch)
        is_made = kind.field(run.batch, "file_id") is not None
        if url and is_made and kind.field(run.batch, "delivery") is None:
            _deliver(run, kind, url, network or Network())


def _deliver(run: Run, kind: Kind, url: str, network: Network) -> None:
    tries = kind.field(run.batch, "tries")
    if tries >= MAX_TRIES:
        _give_up(run, kind, "the last try did not come to its end")
        return
    run.check()
    if not run.aws.run(run.deployment.usage.may_wait(run.batch.tenant, int(run.now()))):
        raise ComeBack(_LATER_SECONDS)
    run.change(**kind.fields(tries=tries + 1))
    try:
        _put(run, kind, url, network, tries)
    except TryFailed as exc:
        logger.warning(
            "delivery failed",
            batch_id=run.batch.id,
            kind=kind.name,
            tries=tries + 1,
            reason=str(exc),
        )
        if not exc.is_final and tries + 1 < MAX_TRIES:
            raise ComeBack(_FIRST_DELAY_SECONDS * 2**tries) from exc
        _give_up(run, kind, str(exc))
    else:
        run.change(**kind.fields(delivery=DELIVERED))
        logger.info("delivered", batch_id=run.batch.id, kind=kind.name)


def _put(run: Run, kind: Kind, url: str, network: Network, tries: int) -> None:
    """Upload the object once; raises TryFailed unless it was taken."""
    try:
        target = find_target(url, network.resolve)
    except UrlRefused as exc:
        raise TryFailed(str(exc), is_final=True) from exc
    except OSError as exc:
        raise TryFailed(f"the host was not found: {exc}") from exc
    try:
        answer = _send(run, kind, target, network, tries)
    except (OSError, HTTPException, BotoCoreError) as exc:
        raise TryFailed(_words(f"{type(exc).__name__}: {exc}", url)) from exc
    if not answer.is_success:
        is_redirect = 300 <= answer.status < 400
        told = "redirects are not followed" if is_redirect else _words(answer.text, url)
        raise TryFailed(f"answered {answer.status}: {told}", is_final=not answer.may_change)


def _words(text: str, url: str) -> str:
    """Return what went wrong, cut short and without what the url may hide."""
    return without_secrets(text, url)[:_MAX_TEXT_CHARS]


def _send(run: Run, kind: Kind, target: Target, network: Network, tries: int) -> Answer:
    bucket, key = run.deployment.bucket, kind.key_of(run.batch)
    found = run.aws.run(bucket.head(key))
    if found is None:
        raise NotThere(f"{key} has gone")
    num_bytes = found["ContentLength"]
    stall_seconds = min(network.stall_seconds, max(1.0, run.time_left() - RESERVE_SECONDS))
    whole_seconds = _STEPS_SECONDS + num_bytes / _MIN_BYTES_PER_SECOND
    # The turn must outlast a stall.
    run.turn_seconds += stall_seconds
    run.keep_turn()
    with (
        _waiting(run, num_bytes),
        closing(run.aws.open(Bucket=bucket.name, Key=key, IfMatch=found["ETag"])) as stream,
    ):
        return put_stream(
            replace(network, stall_seconds=stall_seconds, whole_seconds=whole_seconds),
            target,
            target.addresses[tries % len(target.addresses)],
            _chunks(run, stream),
            num_bytes,
        )


@contextmanager
def _waiting(run: Run, num_bytes: int) -> Iterator[None]:
    """Count what such an upload takes beyond its due, whatever comes of it."""
    began = run.now()
    try:
        yield
    finally:
        seconds = run.now() - began - num_bytes / _FAIR_BYTES_PER_SECOND
        usage = run.deployment.usage
        run.aws.run(usage.add_waited(run.batch.tenant, seconds, int(began)))


def _chunks(run: Run, stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK_BYTES):
        run.check()
        yield chunk


def _give_up(run: Run, kind: Kind, reason: str) -> None:
    param = f"{kind.name}_url"
    error = BatchError(
        TryFailed.code,
        f"The PUT to `{param}` failed: {reason}. The rows are kept as {kind.key_of(run.batch)}.",
        param=param,
    )
    errors = [dump(each) for each in (*run.batch.errors, error)]
    run.change(errors=errors, **kind.fields(delivery=FAILED))
