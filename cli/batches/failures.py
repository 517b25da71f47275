"""Why rows of a batch failed: errors of one kind told once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from pydantic_core import from_json

from cli.errors import CliError
from cli.kinds import Kinds
from cli.terminal import amount, say
from engine.batchfile.rows import failure_in

if TYPE_CHECKING:
    from cli.api.client import Client
    from cli.api.objects import Batch


# Of an error file that is looked at from afar.
_HEAD_BYTES = 2**20


def failures_in(path: Path) -> Kinds:
    """Return the failures among the rows of a file; what is no row is passed over."""
    with path.open("rb") as file:
        return _failures_among(file)


def first_failures(client: Client, batch: Batch) -> Kinds:
    """Return the first failures of a batch on the server, as many as it tells at once; or none."""
    try:
        if batch.error_file_id is not None:
            return _failures_among(_head_of(client, batch.error_file_id).splitlines())
        kinds = Kinds()
        for row in client.rows(batch.id, 0).rows if batch.failed else ():
            if (message := failure_in(row)) is not None:
                kinds.add(message, row["line"])
    except (CliError, httpx.TransportError):
        return Kinds()  # the files may be gone, which is no reason to tell nothing else
    return kinds


def _head_of(client: Client, file_id: str) -> bytes:
    head = b""
    with client.open_content(file_id, 0) as response:
        if response.is_error:
            return b""
        for chunk in response.iter_bytes():
            head += chunk
            if len(head) > _HEAD_BYTES:
                return head[: head.rfind(b"\n")]
    return head


def _failures_among(rows: Iterable[bytes]) -> Kinds:
    kinds = Kinds()
    for data in rows:
        try:
            row = from_json(data)
        except ValueError:
            continue
        if isinstance(row, dict) and (message := failure_in(row)) is not None:
            kinds.add(message)
    return kinds


def tell_failures(kinds: Kinds, place: str | None = None) -> None:
    """Say why rows failed, and where they are; nothing where none did."""
    if kinds.count:
        where = f", in {place}" if place is not None else ""
        say("\n".join((f"{amount(kinds.count, 'row')} failed{where}:", *kinds.told())))
