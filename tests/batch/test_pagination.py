"""Pages of the API's lists."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from tidemill.batch import pagination
from tidemill.batch.pagination import Page, make_page


class Thing(BaseModel):
    """A listed object."""

    id: str


def test_a_page_has_its_first_and_last_id() -> None:
    """They are the IDs of its first and last object."""
    found = make_page(Thing, [Thing(id=name) for name in "abc"], has_more=True)
    assert found.model_dump() == {
        "object": "list",
        "data": [{"id": "a"}, {"id": "b"}, {"id": "c"}],
        "first_id": "a",
        "last_id": "c",
        "has_more": True,
    }


def test_an_empty_page_is_the_last() -> None:
    """Otherwise clients would request pages for ever."""
    found = make_page(Thing, [], has_more=True)
    assert (found.first_id, found.last_id, found.has_more) == (None, None, False)


def test_a_page_has_a_maximum_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest comes on the next page; a single object always fits."""
    monkeypatch.setattr(pagination, "MAX_BYTES", 45)
    things = [Thing(id=name * 10) for name in "abc"]  # each of 19 bytes
    found = make_page(Thing, things, has_more=False)
    assert (len(found.data), found.last_id, found.has_more) == (2, "b" * 10, True)
    assert make_page(Thing, things[:2], has_more=False).has_more is False
    large = make_page(Thing, [Thing(id="x" * 99), *things], has_more=False)
    assert (len(large.data), large.has_more) == (1, True)


def test_pages_of_a_kind_have_a_name() -> None:
    """The OpenAPI document uses the names."""
    assert Page[Thing].__name__ == "ThingPage"
