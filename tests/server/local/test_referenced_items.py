"""Referenced items: a short ID may stand for a long item, so their sizes are limited."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidemill.protocol.responses.response import response_id
from tidemill.server.errors import Refused
from tidemill.server.local.referenced_items import ReferencedItems
from tidemill.server.local.responses import ResponseTable, StoredResponse
from tidemill.server.local.store import open_store

NAME = response_id("a1")
ITEM = {"id": f"fc_{NAME.removeprefix('resp_')}_0", "type": "function_call", "arguments": "x" * 900}
REFERENCE = {"type": "item_reference", "id": ITEM["id"]}
RESPONSE = {"id": NAME, "created_at": int(time.time()), "status": "completed", "output": [ITEM]}


@pytest.fixture
def table(tmp_path: Path) -> Iterator[ResponseTable]:
    """Yield an empty table."""
    with open_store(tmp_path) as store:
        yield store.responses


@pytest.mark.parametrize("is_stored", [True, False])
def test_each_reference_counts_as_its_item(table: ResponseTable, *, is_stored: bool) -> None:
    """The limit of a request's body is also that of the items that it refers to."""
    items = ReferencedItems(table)
    if is_stored:
        table.put(StoredResponse({"input": "Hi"}, RESPONSE), ())
    else:
        items.remember(RESPONSE)
    body: dict[str, Any] = {"input": ["Hi", *[REFERENCE] * 10]}
    assert items.resolved(body, max_bytes=10_000)["input"] == ["Hi", *[ITEM] * 10]
    with pytest.raises(Refused, match="refer to fewer items") as caught:
        items.resolved(body, max_bytes=9_000)
    assert (caught.value.status_code, caught.value.param) == (413, "input.10")
