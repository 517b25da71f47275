"""Lists of objects, a page at a time, as OpenAI's clients page through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel


class Listed(Protocol):
    """Whatever has an id."""

    id: str


Item = TypeVar("Item")
ListedItem = TypeVar("ListedItem", bound=Listed)


class Page(BaseModel, Generic[Item]):
    """One page of a list. An empty one is the last: clients would ask for ever after another."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """Return the name that the OpenAPI document has for pages of a kind."""
        return f"{params[0].__name__}Page"


def page_of(
    kind: type[ListedItem], data: Sequence[ListedItem], *, has_more: bool
) -> Page[ListedItem]:
    """Return a page of objects that have an id; `has_more` counts only where there are any."""
    ids = [data[0].id, data[-1].id] if data else [None, None]
    return Page[kind](  # type: ignore[valid-type]
        data=list(data), first_id=ids[0], last_id=ids[1], has_more=has_more and bool(data)
    )
