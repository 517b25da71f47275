"""Batch lookup: by id, id prefix or `@last`."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tidemill.offline.console.errors import BadInput, ServerRefused

if TYPE_CHECKING:
    from ..api.client import Client
    from ..api.objects import Batch

ID_HELP = "give a batch's ID or its beginning, or @last"

_LAST = "@last"
_NOT_FOUND = 404
_PREFIX = "batch_"
_WHOLE_CHARS = len(_PREFIX) + 32
_MOST_LOOKED_AT = 1000
_MOST_NAMED = 3


def find_batch(client: Client, name: str) -> Batch:
    """Return the batch of this name; raises BadInput if unknown or ambiguous."""
    if name == _LAST:
        for batch in client.batches(1):
            return batch
        raise BadInput("there are no batches: create one with `tidemill submit FILE`")
    try:
        return client.batch(name)
    except ServerRefused as exc:
        if exc.status != _NOT_FOUND or len(name) >= _WHOLE_CHARS:
            raise
        refused = exc
    begin = name if name.startswith(_PREFIX) else _PREFIX + name
    newest = islice(client.batches(None), _MOST_LOOKED_AT)
    found = [batch for batch in newest if batch.id.startswith(begin)]
    if not found:
        raise refused
    if len(found) > 1:
        named = ", ".join(batch.id for batch in found[:_MOST_NAMED])
        more = ", …" if len(found) > _MOST_NAMED else ""
        raise BadInput(
            f"{len(found)} batches start with {begin}: {named}{more}. Give more characters"
        )
    return found[0]


def cancel_batch(client: Client, name: str) -> Batch:
    """Cancel the batch of this name; raises the errors of `find_batch`."""
    if name != _LAST:
        try:
            return client.cancel(name)
        except ServerRefused as exc:
            if exc.status != _NOT_FOUND:
                raise
    return client.cancel(find_batch(client, name).id)
