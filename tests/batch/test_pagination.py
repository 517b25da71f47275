"""Pages: what every list of the API looks like."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from tidemill.batch import pagination
from tidemill.batch.pagination import Page, make_page


class Thing(BaseModel):
    """Something that is listed."""

    id: str


def test_a_page_names_its_ends() -> None:
    """The first and the last of what is on it."""
    found = make_page(Thing, [Thing(id=name) for name in "abc"], has_more=True)
    assert found.model_dump() == {
        "object": "list",
        "data": [{"id": "a"}, {"id": "b"}, {"id": "c"}],
        "first_id": "a",
        "last_id": "c",
        "has_more": True,
    }


def test_an_empty_page_is_the_last() -> None:
    """Whatever is said: clients would ask for the next one for ever."""
    found = make_page(Thing, [], has_more=True)
    assert (found.first_id, found.last_id, found.has_more) == (None, None, False)


def test_a_page_has_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beyond it comes with the next page; one object alone is always given."""
    monkeypatch.setattr(pagination, "MAX_BYTES", 45)
    things = [Thing(id=name * 10) for name in "abc"]  # each of 19 bytes
    found = make_page(Thing, things, has_more=False)
    assert (len(found.data), found.last_id, found.has_more) == (2, "b" * 10, True)
    assert make_page(Thing, things[:2], has_more=False).has_more is False
    large = make_page(Thing, [Thing(id="x" * 99), *things], has_more=False)
    assert (len(large.data), large.has_more) == (1, True)


def test_pages_of_a_kind_have_a_name() -> None:
    """By which the OpenAPI document knows them."""
    assert Page[Thing].__name__ == "ThingPage"
