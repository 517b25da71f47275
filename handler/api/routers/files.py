"""`/v1/files`: inputs of batches, and their results."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Annotated, Final, Literal
from uuid import uuid4

from aws_lambda_powertools.event_handler import Response
from aws_lambda_powertools.event_handler.openapi.params import File as FileParam
from aws_lambda_powertools.event_handler.openapi.params import Form, Query, UploadFile
from aws_lambda_powertools.event_handler.router import APIGatewayHttpRouter

from tidemill.batch.batch_request import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS
from tidemill.batch.creation_order import creation_ns
from tidemill.batch.file_object import (
    BATCH,
    FileDeleted,
    FileObject,
    check_purpose,
    content_disposition,
    display_name,
    file_object,
)
from tidemill.batch.object_keys import file_key
from tidemill.batch.pagination import Page, make_page
from tidemill.batch.stored_file import File

from ...aws.sync import MAX_PRESIGNED_SECONDS
from ...deployment import deployment
from ..envelope.caller import IS_HEAD, aws, tenant_of
from ..envelope.errors import NotFound, Refused
from ..envelope.redirect import redirect

router = APIGatewayHttpRouter()  # type: ignore[no-untyped-call]

# Any other string cannot be an ID of ours, so the table is not queried (its keys have limits).
_ID: Final = re.compile(r"file-[0-9a-f]{32}", re.ASCII)
# Below OpenAI's limit; its clients request the next page.
_MAX_LISTED: Final = 1000


@router.post("/v1/files")
def create_file(
    file: Annotated[UploadFile, FileParam(description="The requests, as JSONL.")],
    purpose: Annotated[str, Form(json_schema_extra={"enum": [BATCH]})],
    expires_anchor: Annotated[
        Literal["created_at"] | None, Form(alias="expires_after[anchor]")
    ] = None,
    expires_seconds: Annotated[
        int | None,
        Form(alias="expires_after[seconds]", ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS),
    ] = None,
) -> FileObject:
    """Upload a file of requests for batches."""
    check_purpose(purpose)
    if (expires_anchor is None) is not (expires_seconds is None):
        raise Refused("`expires_after` requires `anchor` and `seconds`.", param="expires_after")
    if not file.content:
        raise Refused("`file` is empty.", param="file", code="empty_file")
    tenant, file_id, now = tenant_of(router.context), f"file-{uuid4().hex}", int(time.time())
    key = file_key(tenant, file_id)
    aws().run(deployment().limits.admit_bytes(tenant, len(file.content), now))
    version_id = aws().run(
        deployment().bucket.put_file(key, file.content, is_short_lived=expires_seconds is not None)
    )
    made = File(
        id=file_id,
        tenant=tenant,
        key=key,
        num_bytes=len(file.content),
        created_at=now,
        created_ns=creation_ns(),
        filename=display_name(file.filename),
        purpose=purpose,
        version_id=version_id,
        expires=now + expires_seconds
        if expires_seconds
        else deployment().settings.file_expires_at(now),
    )
    aws().run(deployment().files.put_file(made))
    return file_object(made)


@router.get("/v1/files")
def list_files(
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    after: Annotated[str | None, Query()] = None,
    order: Annotated[Literal["asc", "desc"], Query()] = "desc",
    purpose: Annotated[str | None, Query()] = None,
) -> Page[FileObject]:
    """List the tenant's files by creation time, at most a thousand."""
    tenant = tenant_of(router.context)
    found, has_more = aws().run(
        deployment().files.list_files(
            tenant,
            limit=min(limit, _MAX_LISTED),
            after=None if after is None else _place_of(after, tenant),
            order=order,
            purpose=purpose,
        )
    )
    return make_page(FileObject, [file_object(file) for file in found], has_more=has_more)


@router.get("/v1/files/<file_id>")
def retrieve_file(file_id: str) -> FileObject:
    """Return one file's metadata."""
    return file_object(own_file(file_id))


@router.delete("/v1/files/<file_id>")
def delete_file(file_id: str) -> FileDeleted:
    """Delete a file; a batch that reads it continues."""
    file = own_file(file_id)
    aws().run(deployment().bucket.delete_version(file.key, file.version_id))
    aws().run(deployment().files.delete_file(file, int(time.time())))
    return FileDeleted(id=file.id)


@router.get("/v1/files/<file_id>/content")
def file_content(file_id: str) -> Response[str]:
    """Redirect the client to a presigned URL of the content, valid for one hour."""
    file = own_file(file_id)
    call = deployment().bucket.download(
        file.key, file.version_id, disposition=content_disposition(file.filename)
    )
    if router.context.get(IS_HEAD):  # a presigned URL is valid for one method only
        call = replace(call, method="head_object")
    return redirect(
        aws().presign(call, MAX_PRESIGNED_SECONDS),
        "The content is at the URL in the Location header, which is valid for one hour. "
        "Request it without the API key: follow redirects, as `curl -L` does.",
        # Anyone who has the URL can read the file.
        headers={"Cache-Control": "no-store"},
    )


def own_file(file_id: str, param: str | None = None) -> File:
    """Return a file of the caller's tenant; raises NotFound for any other."""
    is_id = _ID.fullmatch(file_id) is not None
    file = aws().run(deployment().files.get_file(file_id)) if is_id else None
    if file is None or file.tenant != tenant_of(router.context):
        raise _unknown(file_id, param)
    return file


def _place_of(file_id: str, tenant: str) -> str:
    is_id = _ID.fullmatch(file_id) is not None
    place = aws().run(deployment().files.find_place(tenant, file_id)) if is_id else None
    if place is None:
        raise _unknown(file_id, "after")
    return place


def _unknown(file_id: str, param: str | None) -> NotFound:
    return NotFound(f"File {file_id[:100]} not found.", param=param, code="file_not_found")
