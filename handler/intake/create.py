"""New batches: of an upload to the bucket, or of a request to the API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from handler.aws.calls import Operation
from handler.aws.queues import advance_message
from handler.aws.stores.drops import Arrival
from handler.batch.keys import (
    DROP_TENANT,
    INPUT_PREFIX,
    MAX_KEY_BYTES,
    batch_id_of_request,
    is_folder,
    outputs_of_drop,
    outputs_of_request,
    why_no_name,
)
from handler.batch.model import Batch, BatchError, Options, Source
from handler.batch.request import S3, Asked, bad_input, parse_options
from handler.batch.states import Status
from handler.batch.window import window_seconds
from handler.deployment import Deployment
from handler.errors import InvalidOption
from handler.intake.events import Drop
from handler.log import logger
from handler.moves.announce import announce
from handler.moves.cancel import NotCancellable, cancel


def take_drop(deployment: Deployment, drop: Drop, now: int) -> Operation[Batch | None]:
    """Return the batch that an upload makes, or has made when its event comes again.

    None for an upload that makes none: it is of another bucket or prefix, or a folder; it has been
    deleted, or a newer one of its name is known. The batch it replaces is cancelled. Nobody is told
    of it yet: that is the first thing that the run does which goes on with it.
    """
    outputs = outputs_of_drop(drop.key)
    if drop.bucket != deployment.bucket.name or outputs is None:
        logger.warning("upload left alone", bucket=drop.bucket, key=drop.key)
        return None
    found = yield from deployment.bucket.head(drop.key, drop.version_id)
    if found is None:
        known = yield from deployment.table.get_batch(drop.batch_id)
        if known is None:
            logger.warning("upload gone", batch_id=drop.batch_id, key=drop.key)
        return known
    if is_folder(drop.key, found["ContentLength"]):
        logger.info("folder left alone", key=drop.key)
        return None
    batch_id = drop.batch_id
    default_window = deployment.settings.default_window
    options, errors = _options_of_drop(found.get("Metadata", {}), default_window)
    webhook: dict[str, Any] = {}
    try:
        webhook = yield from _webhook_of(deployment, DROP_TENANT, options, "webhook-url")
    except InvalidOption as exc:
        errors = (*errors, _error_of(exc))
    if (reason := why_no_name(drop.key)) is not None:
        errors = (*errors, BatchError(InvalidOption.code, reason, "key"))
    expires_at = now + window_seconds(options.completion_window)
    batch = Batch(
        id=batch_id,
        tenant=DROP_TENANT,
        source=_source(deployment, drop.key, found, drop.version_id),
        input_file_id=f"{S3}{drop.bucket}/{drop.key}",
        options=options,
        outputs=outputs,
        created_at=now,
        expires_at=expires_at,
        expires=deployment.settings.forget_at(expires_at),
        errors=errors,
        num_errors=len(errors),
        **webhook,
    )
    arrival = Arrival(drop.sequencer, int(found["LastModified"].timestamp()))
    made = yield from deployment.table.create_drop(batch, arrival)
    if made is None:
        # Overtaken: perhaps after a run that made it and died before it could cancel the older one.
        made = yield from deployment.table.get_batch(batch_id)
    if made is None:
        logger.info("upload overtaken by a newer one", batch_id=batch_id, key=drop.key)
        return None
    logger.info("upload", batch_id=batch_id, key=drop.key, num_bytes=batch.source.num_bytes)
    yield from _replace(deployment, made, now)
    return made


def create_batch(deployment: Deployment, tenant: str, asked: Asked, now: int) -> Operation[Batch]:
    """Return the batch that an API request makes, or has made when it is repeated.

    Raises InvalidOption for a file that is not there, or where a webhook could not be signed; what
    is wrong with the file is seen later and stands in the batch. Raises LimitReached.
    """
    options = asked.options
    batch_id = batch_id_of_request(tenant, asked.idempotency_key or uuid4().hex)
    made = (yield from deployment.table.get_batch(batch_id)) if asked.idempotency_key else None
    if made is None:
        yield from deployment.limits.admit_batch(tenant, now)
        expires_at = now + window_seconds(options.completion_window)
        batch = Batch(
            id=batch_id,
            tenant=tenant,
            source=(yield from _find_input(deployment, tenant, asked.input_file_id)),
            input_file_id=asked.input_file_id,
            options=options,
            outputs=outputs_of_request(tenant, batch_id),
            created_at=now,
            expires_at=expires_at,
            expires=deployment.settings.forget_at(expires_at),
            endpoint=asked.endpoint,
            **(yield from _webhook_of(deployment, tenant, options, "webhook_url")),
        )
        made = yield from deployment.table.create_batch(batch)
    asked.refuse_another(made)
    # Not left to the run that reads it: a cancel may come before that one.
    yield from announce(deployment, made)
    if made.status is Status.VALIDATING:
        yield from deployment.control.send(advance_message(made.id), group=tenant)
    return made


def _options_of_drop(
    user_metadata: Mapping[str, str], default_window: str
) -> tuple[Options, tuple[BatchError, ...]]:
    """Return the options, or the defaults and the error with which the batch will fail."""
    try:
        return parse_options(user_metadata, default_window), ()
    except InvalidOption as exc:
        return Options(default_window), (_error_of(exc),)


def _error_of(exc: InvalidOption) -> BatchError:
    return BatchError(exc.code, exc.message, exc.param)


def _webhook_of(
    deployment: Deployment, tenant_name: str, options: Options, param: str
) -> Operation[dict[str, Any]]:
    """Return the fields of a batch that has a webhook to tell, none for one that has not.

    Raises InvalidOption where nothing could be signed.
    """
    tenant = yield from deployment.tenants.find(tenant_name)
    url = options.webhook_url or tenant.webhook_url
    if url is None:
        return {}
    if tenant.webhook_secret is None:
        raise InvalidOption(
            f"`{param}` needs a secret to sign with, and the tenant {tenant_name} has none: "
            f"`tidemill tenants set {tenant_name} --new-webhook-secret` makes one.",
            param=param,
        )
    return {"webhook_host": urlsplit(url).hostname, "webhook_delivery": "pending"}


def _replace(deployment: Deployment, batch: Batch, now: int) -> Operation[None]:
    """Cancel the batch that this one replaces, and those before it if it never came to run."""
    older_id = batch.predecessor
    while older_id is not None:
        try:
            older = yield from cancel(deployment, older_id, now)
        except NotCancellable:
            older = yield from deployment.table.get_batch(older_id)
        else:
            logger.info("older batch of the key cancelled", batch_id=older_id, newer=batch.id)
        is_over = older is not None and older.is_terminal and older.final is None
        older_id = older.predecessor if older is not None and is_over else None


def _source(
    deployment: Deployment, key: str, found: Mapping[str, Any], version_id: str | None = None
) -> Source:
    """Pin the object that S3 has told of."""
    version_id = version_id or found.get("VersionId")
    return Source(
        bucket=deployment.bucket.name,
        key=key,
        etag=found["ETag"],
        num_bytes=found["ContentLength"],
        version_id=None if version_id == "null" else version_id,
    )


def _find_input(deployment: Deployment, tenant: str, input_file_id: str) -> Operation[Source]:
    """Return the object that an API request names, pinned; raises InvalidOption."""
    version_id = None
    if input_file_id.startswith(S3):
        # What is dropped belongs to one tenant; to others it is not there.
        if tenant != DROP_TENANT:
            raise bad_input("names no file that is there")
        bucket, _, key = input_file_id.removeprefix(S3).partition("/")
        if bucket != deployment.bucket.name or not key.startswith(INPUT_PREFIX):
            place = f"{S3}{deployment.bucket.name}/{INPUT_PREFIX}"
            raise bad_input(f"may name objects under {place} only")
    else:
        file = yield from deployment.files.get_file(input_file_id)
        if file is None or file.tenant != tenant:
            raise bad_input("names no file that is there")
        key, version_id = file.key, file.version_id
    # S3 has an error of its own for a name that none of its objects can have.
    is_key = len(key.encode()) <= MAX_KEY_BYTES and "\0" not in key
    found = (yield from deployment.bucket.head(key, version_id)) if is_key else None
    if found is None:
        raise bad_input("names no object that is there")
    return _source(deployment, key, found, version_id)
