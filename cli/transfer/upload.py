"""Uploads: one request for a small file, otherwise a resumable multipart upload."""

from __future__ import annotations

import os
from typing import IO

from tidemill.offline.console.errors import BadInput, ServerRefused
from tidemill.offline.console.progress_bar import byte_progress
from tidemill.offline.console.terminal import log

from ..api.client import Client
from ..api.objects import Upload
from .submission_state import StateFile
from .upload_parts import PartsSender, bytes_there

# A Lambda accepts about 4.4 MB, including the form.
MAX_WHOLE_BYTES = 4 * 2**20


def upload_file(client: Client, file: IO[bytes], name: str, state_file: StateFile) -> str:
    """Upload a file unless it is on the server already; return its id."""
    state = state_file.state
    if state.file_id is not None and _is_there(client, state.file_id):
        log("the file was uploaded earlier")
        return state.file_id
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes <= MAX_WHOLE_BYTES:
        file.seek(0)
        file_id = client.create_file(name, file.read(MAX_WHOLE_BYTES + 1))
    else:
        file_id = _send_parts(client, file, name, num_bytes, state_file)
    state_file.state.file_id = file_id
    state_file.save()
    return file_id


def _is_there(client: Client, file_id: str) -> bool:
    try:
        client.file(file_id)
    except ServerRefused as exc:
        if exc.status == 404:
            return False
        raise
    return True


def _send_parts(
    client: Client, file: IO[bytes], name: str, num_bytes: int, state_file: StateFile
) -> str:
    upload = _resume_or_create(client, name, num_bytes, state_file)
    if upload.file_id is not None:
        return upload.file_id
    before = os.fstat(file.fileno()).st_mtime_ns
    done = bytes_there(upload, num_bytes)
    if done:
        log(f"resuming an upload: {done / 10**6:,.0f} of {num_bytes / 10**6:,.0f} MB are uploaded")
    with byte_progress("uploading", num_bytes, done) as show:
        PartsSender(client, upload, file, num_bytes, show).run()
    after = os.fstat(file.fileno())
    if (after.st_size, after.st_mtime_ns) != (num_bytes, before):
        raise BadInput(f"{name} changed during the upload: submit it again")
    return _complete(client, upload.id)


def _resume_or_create(client: Client, name: str, num_bytes: int, state_file: StateFile) -> Upload:
    """Return the interrupted upload of this file, or a new one."""
    if state_file.state.upload_id is not None:
        try:
            upload = client.upload(state_file.state.upload_id)
        except ServerRefused as exc:
            if exc.status != 404:
                raise
        else:
            if upload.status in {"pending", "completed"}:
                return upload
        state_file.reset()
    upload = client.create_upload(name, num_bytes)
    state_file.state.upload_id = upload.id
    state_file.save()
    return upload


def _complete(client: Client, upload_id: str) -> str:
    upload = client.complete_upload(upload_id)
    if upload.file_id is None:
        raise ServerRefused(f"the upload {upload_id} is {upload.status}, but has no file")
    return upload.file_id
