"""Referenced items: output items of earlier responses that a request names by their IDs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json, to_json

from tidemill.protocol.responses.response import response_id

from ..errors import Refused
from .query_params import not_found
from .responses import ResponseTable

MAX_RECENT_BYTES: Final = 64 * 2**20
"""Memory for the output of responses that are not stored; the oldest is dropped first."""

_ENTRY_BYTES: Final = 300


class ReferencedItems:
    """Output items by their IDs: those of stored responses, and recent ones of others."""

    def __init__(self, table: ResponseTable, max_bytes: int = MAX_RECENT_BYTES) -> None:
        self._table = table
        self._max_bytes = max_bytes
        self._recent: OrderedDict[str, bytes] = OrderedDict()
        self._num_bytes = 0

    def remember(self, response: Mapping[str, Any]) -> None:
        """Retain the output of a response that is not stored."""
        output = to_json([_without_logprobs(item) for item in response["output"]])
        self._recent[response["id"]] = output
        self._num_bytes += len(output) + _ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._recent.popitem(last=False)[1]) + _ENTRY_BYTES

    def resolved(self, body: dict[str, Any], max_bytes: int) -> dict[str, Any]:
        """Return a body with the items that it refers to.

        Raises the 404 for an unknown item, and the 413 for items of more than `max_bytes`.
        """
        outputs: dict[str, Any] = {}
        sizes: dict[str, int] = {}
        num_bytes = 0
        items = []
        for place, item in enumerate(body["input"]):
            if not is_reference(item):
                items.append(item)
                continue
            found = self._item(item, place, outputs)
            if found["id"] not in sizes:
                sizes[found["id"]] = len(to_json(found))
            num_bytes += sizes[found["id"]]
            if num_bytes > max_bytes:
                raise Refused(
                    f"The items that `input` refers to have more bytes than the limit of"
                    f" {max_bytes:,}: refer to fewer items.",
                    status_code=413,
                    code="body_too_large",
                    param=f"input.{place}",
                )
            items.append(found)
        return {**body, "input": items}

    def _item(self, reference: Mapping[str, Any], place: int, outputs: dict[str, Any]) -> Any:
        item_id = reference.get("id")
        name = response_id(str(item_id).partition("_")[2].rpartition("_")[0])
        if name not in outputs:
            outputs[name] = self._output(name)
        for item in outputs[name]:
            if item["id"] == item_id:
                return item
        error = not_found("item", str(item_id), f"input.{place}.id")
        error.message += " Send the item itself: only recent items can be referred to."
        raise error

    def _output(self, name: str) -> list[Any]:
        output = self._recent.get(name)
        if output is not None:
            return list(from_json(output))
        stored = self._table.get(name)
        return [] if stored is None else list(stored.response["output"])


def is_reference(item: object) -> bool:
    """Say whether an input item refers to an earlier one."""
    return isinstance(item, dict) and item.get("type") == "item_reference"


def _without_logprobs(item: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = item.get("content")
    if item["type"] != "message" or not parts:
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in parts]}
