"""A file to the server: whole when it is small, else in parts, going on where it was cut off."""

from __future__ import annotations

import os
from typing import IO

from cli.api.client import Client
from cli.api.objects import Upload
from cli.carrying.begun import Notes
from cli.carrying.bytes_bar import bytes_shown
from cli.carrying.parts import PartsSender, bytes_there
from cli.errors import BadInput, ServerRefused
from cli.terminal import say

# A Lambda takes about 4.4 MB, of which the form around the file is a little.
MAX_WHOLE_BYTES = 4 * 2**20


def upload_file(client: Client, file: IO[bytes], name: str, notes: Notes) -> str:
    """Return the id of the file on the server; it is sent unless it is there already."""
    begun = notes.begun
    if begun.file_id is not None and _is_there(client, begun.file_id):
        say("the file is there from before")
        return begun.file_id
    num_bytes = os.fstat(file.fileno()).st_size
    if num_bytes <= MAX_WHOLE_BYTES:
        file.seek(0)
        file_id = client.create_file(name, file.read(MAX_WHOLE_BYTES + 1))
    else:
        file_id = _send_parts(client, file, name, num_bytes, notes)
    notes.begun.file_id = file_id
    notes.save()
    return file_id


def _is_there(client: Client, file_id: str) -> bool:
    try:
        client.file(file_id)
    except ServerRefused as exc:
        if exc.status == 404:
            return False
        raise
    return True


def _send_parts(client: Client, file: IO[bytes], name: str, num_bytes: int, notes: Notes) -> str:
    upload = _begin(client, name, num_bytes, notes)
    if upload.file_id is not None:
        return upload.file_id
    before = os.fstat(file.fileno()).st_mtime_ns
    done = bytes_there(upload, num_bytes)
    if done:
        say(
            f"going on with an upload: {done / 10**6:,.0f} of {num_bytes / 10**6:,.0f} MB are there"
        )
    with bytes_shown("uploading", num_bytes, done) as show:
        PartsSender(client, upload, file, num_bytes, show).run()
    after = os.fstat(file.fileno())
    if (after.st_size, after.st_mtime_ns) != (num_bytes, before):
        raise BadInput(f"{name} was changed while it was uploaded: submit it again")
    return _complete(client, upload.id)


def _begin(client: Client, name: str, num_bytes: int, notes: Notes) -> Upload:
    """Return the upload that was begun before, or a new one."""
    if notes.begun.upload_id is not None:
        try:
            upload = client.upload(notes.begun.upload_id)
        except ServerRefused as exc:
            if exc.status != 404:
                raise
        else:
            if upload.status in {"pending", "completed"}:
                return upload
        notes.begin_anew()
    upload = client.create_upload(name, num_bytes)
    notes.begun.upload_id = upload.id
    notes.save()
    return upload


def _complete(client: Client, upload_id: str) -> str:
    upload = client.complete_upload(upload_id)
    if upload.file_id is None:
        raise ServerRefused(f"the upload {upload_id} is {upload.status} and has made no file")
    return upload.file_id
