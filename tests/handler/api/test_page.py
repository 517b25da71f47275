"""Pages: what every list of the API looks like."""

from __future__ import annotations

from pydantic import BaseModel

from handler.api.page import Page, page_of


class Thing(BaseModel):
    """Something that is listed."""

    id: str


def test_a_page_names_its_ends() -> None:
    """The first and the last of what is on it."""
    page = page_of(Thing, [Thing(id=name) for name in "abc"], has_more=True)
    assert page.model_dump() == {
        "object": "list",
        "data": [{"id": "a"}, {"id": "b"}, {"id": "c"}],
        "first_id": "a",
        "last_id": "c",
        "has_more": True,
    }


def test_an_empty_page_is_the_last() -> None:
    """Whatever is said: clients would ask for the next one for ever."""
    page = page_of(Thing, [], has_more=True)
    assert (page.first_id, page.last_id, page.has_more) == (None, None, False)


def test_pages_of_a_kind_have_a_name() -> None:
    """By which the OpenAPI document knows them."""
    assert Page[Thing].__name__ == "ThingPage"
