"""Notifies a client's webhook of the end of a batch, as OpenAI does: signed, with retries.

Each try belongs to the one run that counts it in the batch before it begins; a run that dies uses
up its try. The URL and the secrets are the tenant's current ones. The event and its ID are the
same in every try, so a receiver can detect duplicates. The wait between tries is the queue's
delay, or the reaper's rounds if it is longer than a queue can wait.

A run that waits for a receiver delays other batches: if a tenant's receivers have been too slow,
its tries fail unsent for a while.
"""

from __future__ import annotations

import hmac
import time
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from http.client import HTTPException
from typing import Final
from urllib.parse import urlsplit

from pydantic_core import to_json

from tidemill.batch.model import Batch, WebhookDelivery, WebhookTry
from tidemill.batch.object_keys import event_id
from tidemill.net.pinned_connection import Network
from tidemill.net.request import Request, send
from tidemill.net.ssrf_guard import UrlRefused, redact_url, resolve_target

from ..aws.items import dump
from ..aws.queues import MAX_DELAY_SECONDS, advance_message
from ..aws.sync import Aws
from ..deployment import Deployment
from ..lifecycle.announce import announce
from ..observability import logger

# Delays before each try but the first: nine tries in less than a day.
DELAYS_SECONDS: Final = (5, 60, 5 * 60, 15 * 60, 3600, 3 * 3600, 6 * 3600, 12 * 3600)
MAX_TRIES: Final = len(DELAYS_SECONDS) + 1
GONE: Final = 410

# From connecting to the response; a run that waits for it is not available to other batches.
_WHOLE_SECONDS = 15.0
# Longer than that plus the DNS lookup: only after it is an unreported try considered lost.
_TRY_SECONDS = 60
# A queue's clock and ours may differ.
_EARLY_SECONDS = 2
_MAX_TEXT_CHARS = 200


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of one try; `pending` means that another may succeed."""

    delivery: WebhookDelivery
    status_code: int | None = None
    error: str | None = None


def send_webhook(
    aws: Aws,
    deployment: Deployment,
    batch: Batch,
    time_left: Callable[[], float],
    *,
    now: Callable[[], float] = time.time,
    network: Network | None = None,
) -> None:
    """Try once to notify the webhook of a batch that has ended, if it has one and a try is due."""
    if batch.webhook_delivery != "pending" or now() < (batch.webhook_due or 0) - _EARLY_SECONDS:
        return
    if time_left() < _TRY_SECONDS:
        aws.run(deployment.control.send(advance_message(batch.id), group=batch.tenant))
        return
    if batch.webhook_tries >= MAX_TRIES:
        outcome = _Outcome("failed", error="the last try did not finish")
        _record_attempt(aws, deployment, batch, outcome, int(now()))
        return
    tries = batch.webhook_tries + 1
    # If this run dies, the reaper sends a message for the next try.
    due = int(now()) + max(_TRY_SECONDS, _delay_after(tries))
    begun = aws.run(deployment.table.change_webhook(batch, webhook_tries=tries, webhook_due=due))
    if begun is None:
        logger.info("another run notifies the webhook", batch_id=batch.id)
        return
    at = int(now())
    if not aws.run(deployment.usage.may_wait(batch.tenant, at)):
        outcome = _Outcome("pending", error="not tried: the tenant's webhooks respond too slowly")
        _record_attempt(aws, deployment, begun, outcome, at)
        return
    began = now()
    tried, outcome = _try(aws, deployment, begun, at, network or Network())
    waited_seconds = now() - began
    _record_attempt(aws, deployment, tried, outcome, at)
    aws.run(deployment.usage.add_waited(batch.tenant, waited_seconds, at))


def event_of(batch: Batch) -> bytes:
    """Return the event for the end of a batch: the same bytes in every try."""
    status = str(batch.status)
    return to_json(
        {
            "id": event_id(batch.id, status),
            "object": "event",
            "created_at": getattr(batch, f"{status}_at"),
            "type": f"batch.{status}",
            "data": {"id": batch.id},
        }
    )


def sign(secret: str, event: str, at: int, body: bytes) -> str:
    """Return a signature as Standard Webhooks 1.0.0 defines it."""
    key = b64decode(secret.removeprefix("whsec_"))
    digest = hmac.digest(key, f"{event}.{at}.".encode() + body, sha256)
    return f"v1,{b64encode(digest).decode()}"


def _try(
    aws: Aws, deployment: Deployment, batch: Batch, at: int, network: Network
) -> tuple[Batch, _Outcome]:
    """Send the event once; return the batch with the receiver's host, and the outcome."""
    tenant = aws.run(deployment.tenants.find(batch.tenant))
    url, secrets = batch.options.webhook_url or tenant.webhook_url, tenant.secrets_at(at)
    if url is None or not secrets:
        return batch, _Outcome("failed", error="the tenant no longer has a webhook")
    batch = replace(batch, webhook_host=_host_of(url))
    body, event = event_of(batch), event_id(batch.id, str(batch.status))
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "tidemill",
        "webhook-id": event,
        "webhook-timestamp": str(at),
        "webhook-signature": " ".join(sign(secret, event, at, body) for secret in secrets),
    }
    network = replace(network, whole_seconds=_WHOLE_SECONDS)
    try:
        target = resolve_target(url, network.resolve)
        address = target.addresses[batch.webhook_tries % len(target.addresses)]
        answer = send(network, target, address, Request("POST", headers, body))
    except (UrlRefused, OSError, HTTPException) as exc:
        kind = "" if isinstance(exc, UrlRefused) else f"{type(exc).__name__}: "
        return batch, _Outcome("pending", error=_words(f"{kind}{exc}", url))
    if answer.is_success:
        return batch, _Outcome("delivered", answer.status)
    is_redirect = 300 <= answer.status < 400
    words = "redirects are not followed" if is_redirect else _words(answer.text, url)
    return batch, _Outcome("failed" if answer.status == GONE else "pending", answer.status, words)


def _words(text: str, url: str) -> str:
    """Return the failure, truncated and without secret parts of the URL."""
    return redact_url(text, url)[:_MAX_TEXT_CHARS]


def _record_attempt(
    aws: Aws, deployment: Deployment, batch: Batch, outcome: _Outcome, at: int
) -> None:
    """Record the outcome of a try, and schedule the next one if there is any."""
    tries, delivery = batch.webhook_tries, outcome.delivery
    if delivery == "pending" and tries >= MAX_TRIES:
        delivery = "failed"
    delay_seconds = _delay_after(tries)
    log = (*batch.webhook_log, WebhookTry(at, outcome.status_code, outcome.error))
    noted = aws.run(
        deployment.table.change_webhook(
            batch,
            webhook_host=batch.webhook_host,
            webhook_delivery=delivery,
            webhook_due=at + delay_seconds if delivery == "pending" else None,
            webhook_log=[dump(each) for each in log],
        )
    )
    logger.info(
        "webhook delivered" if delivery == "delivered" else "webhook not delivered",
        batch_id=batch.id,
        tries=tries,
        delivery=delivery,
        status_code=outcome.status_code,
        reason=outcome.error,
    )
    if noted is None:
        return
    if delivery != "pending":
        aws.run(announce(deployment, noted))
    elif delay_seconds <= MAX_DELAY_SECONDS:
        message, tenant = advance_message(batch.id), batch.tenant
        aws.run(deployment.control.send(message, group=tenant, delay_seconds=delay_seconds))


def _delay_after(tries: int) -> int:
    return DELAYS_SECONDS[min(tries, len(DELAYS_SECONDS)) - 1]


def _host_of(url: str) -> str:
    return urlsplit(url).hostname or ""
