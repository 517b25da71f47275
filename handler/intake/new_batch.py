"""New batches: from an upload to the bucket, or from a request to the API.

An idempotency key makes a repeated API request return the batch that the first one created.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from tidemill.batch.batch_request import (
    S3,
    BatchParams,
    invalid_input_file,
    parse_options,
    window_seconds,
)
from tidemill.batch.creation_order import creation_ns
from tidemill.batch.errors import InvalidOption
from tidemill.batch.escalation import Escalation
from tidemill.batch.model import Batch, BatchError, Options, Source
from tidemill.batch.object_keys import (
    DROP_TENANT,
    INPUT_PREFIX,
    MAX_KEY_BYTES,
    batch_id_of_request,
    invalid_key_reason,
    invalid_tenant_reason,
    is_folder,
    is_of_table,
    outputs_of_drop,
    outputs_of_request,
)
from tidemill.batch.states import Status

from ..aws.calls import Operation
from ..aws.queues import advance_message
from ..aws.stores.drops import Arrival
from ..deployment import Deployment
from ..lifecycle.announce import announce
from ..lifecycle.batch_lock import LOCK_SECONDS
from ..lifecycle.cancel import NotCancellable, cancel
from ..lifecycle.erasure import BatchErased
from ..observability import logger
from .control_messages import Drop
from .escalation import escalation_of

# The control Lambda reads drops up to this size itself: a message to another run takes longer.
SHORT_BYTES = 2**20


def create_batch_of_drop(
    deployment: Deployment, drop: Drop, now: int, owner: str | None = None
) -> Operation[Batch | None]:
    """Return the batch that an upload creates, or has created if its event is repeated.

    It is None for an upload that creates none: it is in another bucket or prefix, a folder, or a
    table's recipe or calibration; it has been deleted, or a newer one of its name is known. The
    batch that it replaces is cancelled. The new one is not announced: it may leave `validating` in
    this run. A short file's batch is created with a lock of `owner`, under which this run can
    continue. If the run dies, the lock expires like any other.
    """
    outputs = outputs_of_drop(drop.key)
    if drop.bucket != deployment.bucket.name or outputs is None:
        logger.warning("upload ignored", bucket=drop.bucket, key=drop.key)
        return None
    found = yield from deployment.bucket.head(drop.key, drop.version_id)
    if found is None:
        known = yield from deployment.table.get_batch(drop.batch_id)
        if known is None:
            logger.warning("upload gone", batch_id=drop.batch_id, key=drop.key)
        return known
    if is_of_table(drop.key):
        logger.info("file of a table ignored", key=drop.key)
        return None
    if is_folder(drop.key, found["ContentLength"]):
        logger.info("folder ignored", key=drop.key)
        return None
    batch_id = drop.batch_id
    settings, tenant = deployment.settings, deployment.settings.tenant_of_drop(drop.key)
    default_window = settings.default_window
    options, errors = _options_of_drop(found.get("Metadata", {}), default_window)
    optional: dict[str, Any] = {}
    try:
        optional = yield from webhook_of(deployment, tenant, options, "webhook-url", now)
        optional["escalation"] = requested_escalation(deployment, options)
    except InvalidOption as exc:
        errors = (*errors, _error_of(exc))
    errors = (*errors, *_key_errors(drop.key, drop_tenants=settings.drop_tenants))
    expires_at = now + window_seconds(options.completion_window)
    batch = Batch(
        id=batch_id,
        tenant=tenant,
        source=_source(deployment, drop.key, found, drop.version_id),
        input_file_id=f"{S3}{drop.bucket}/{drop.key}",
        options=options,
        outputs=outputs,
        created_at=now,
        created_ns=creation_ns(),
        expires_at=expires_at,
        expires=settings.forget_at(expires_at),
        errors=errors,
        num_errors=len(errors),
        **optional,
    )
    if owner is not None and batch.source.num_bytes <= SHORT_BYTES:
        batch = replace(batch, turn=owner, turn_until=now + LOCK_SECONDS)
    arrival = Arrival(drop.sequencer, int(found["LastModified"].timestamp()))
    made = yield from deployment.table.create_drop(batch, arrival)
    if made is None:
        # Overtaken: a run that created it may have died before it could cancel the older one.
        made = yield from deployment.table.get_batch(batch_id)
    if made is None:
        logger.info("upload overtaken by a newer one", batch_id=batch_id, key=drop.key)
        return None
    logger.info("upload", batch_id=batch_id, key=drop.key, num_bytes=batch.source.num_bytes)
    yield from _cancel_replaced(deployment, made, now)
    return made


def create_batch(
    deployment: Deployment, tenant: str, params: BatchParams, now: int
) -> Operation[Batch]:
    """Return the batch that an API request creates, or has created if it is repeated.

    Raises InvalidOption for a missing file, an unknown second model, or if a webhook could not be
    signed; errors in the file itself are found later and recorded in the batch. Raises
    LimitReached, and BatchErased if the created batch has been erased since.
    """
    options = params.options
    batch_id = batch_id_of_request(tenant, params.idempotency_key or uuid4().hex)
    made = (yield from deployment.table.get_batch(batch_id)) if params.idempotency_key else None
    if made is None:
        yield from deployment.limits.admit_batch(tenant, now)
        expires_at = now + window_seconds(options.completion_window)
        batch = Batch(
            id=batch_id,
            tenant=tenant,
            source=(yield from _find_input(deployment, tenant, params.input_file_id)),
            input_file_id=params.input_file_id,
            options=options,
            outputs=outputs_of_request(tenant, batch_id),
            created_at=now,
            created_ns=creation_ns(),
            expires_at=expires_at,
            expires=deployment.settings.forget_at(expires_at),
            endpoint=params.endpoint,
            escalation=requested_escalation(deployment, options),
            **(yield from webhook_of(deployment, tenant, options, "webhook_url", now)),
        )
        made = yield from deployment.table.create_batch(batch)
    if made.erasing_at is not None:
        raise BatchErased(made)
    params.check_same(made)
    # Not left to the run that reads it: a cancel may come first.
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


def requested_escalation(deployment: Deployment, options: Options) -> Escalation | None:
    """Return the second model of a batch's options, if any; raises InvalidOption."""
    name = options.escalate
    return None if name is None else escalation_of(deployment, name, options)


def _key_errors(key: str, *, drop_tenants: bool) -> list[BatchError]:
    reasons = [invalid_key_reason(key), invalid_tenant_reason(key) if drop_tenants else None]
    return [BatchError(InvalidOption.code, reason, "key") for reason in reasons if reason]


def _error_of(exc: InvalidOption) -> BatchError:
    return BatchError(exc.code, exc.message, exc.param)


def webhook_of(
    deployment: Deployment, tenant_name: str, options: Options, param: str, now: int
) -> Operation[dict[str, Any]]:
    """Return the webhook fields of a batch; empty if it has no webhook.

    Raises InvalidOption if there is no secret to sign with.
    """
    tenant = yield from deployment.known_tenants.refresh(tenant_name, now)
    url = options.webhook_url or tenant.webhook_url
    if url is None:
        return {}
    if tenant.webhook_secret is None:
        raise InvalidOption(
            f"`{param}` requires a signing secret, and tenant {tenant_name} has none: create one "
            f"with `tidemill tenants set {tenant_name} --new-webhook-secret`.",
            param=param,
        )
    return {"webhook_host": urlsplit(url).hostname, "webhook_delivery": "pending"}


def _cancel_replaced(deployment: Deployment, batch: Batch, now: int) -> Operation[None]:
    """Cancel the batch that this one replaces, and earlier ones if that never ran."""
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
    """Return the source pinned to the version in S3's metadata."""
    version_id = version_id or found.get("VersionId")
    return Source(
        bucket=deployment.bucket.name,
        key=key,
        etag=found["ETag"],
        num_bytes=found["ContentLength"],
        version_id=None if version_id == "null" else version_id,
    )


def _find_input(deployment: Deployment, tenant: str, input_file_id: str) -> Operation[Source]:
    """Return the pinned object that an API request names; raises InvalidOption."""
    version_id = None
    if input_file_id.startswith(S3):
        bucket, _, key = input_file_id.removeprefix(S3).partition("/")
        owner = deployment.settings.tenant_of_drop(key)
        # A drop belongs to its tenant; for other tenants it does not exist.
        if tenant not in {DROP_TENANT, owner}:
            raise invalid_input_file("does not name an existing file")
        if bucket != deployment.bucket.name or not key.startswith(INPUT_PREFIX):
            place = f"{S3}{deployment.bucket.name}/{INPUT_PREFIX}"
            raise invalid_input_file(f"may name objects under {place} only")
        if tenant != owner:
            raise invalid_input_file("does not name an existing file")
    else:
        file = yield from deployment.files.get_file(input_file_id)
        if file is None or file.tenant != tenant:
            raise invalid_input_file("does not name an existing file")
        key, version_id = file.key, file.version_id
    # S3 has a separate error for a name that no object can have.
    is_key = len(key.encode()) <= MAX_KEY_BYTES and "\0" not in key
    found = (yield from deployment.bucket.head(key, version_id)) if is_key else None
    if found is None:
        raise invalid_input_file("does not name an existing object")
    return _source(deployment, key, found, version_id)
