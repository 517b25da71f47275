"""Lists of objects, a page at a time, as OpenAI's clients page through them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

# Of the objects of one page: Lambda takes 6 MB, and what it takes may be base64.
MAX_BYTES: Final = 4_000_000


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


def make_page(
    kind: type[ListedItem], data: Sequence[ListedItem], *, has_more: bool
) -> Page[ListedItem]:
    """Return a page of objects that have an id; `has_more` counts only where there are any.

    Objects for which an answer has no room are left to the next page.
    """
    fitting = _fitting(data)
    ids = [fitting[0].id, fitting[-1].id] if fitting else [None, None]
    return Page[kind](  # type: ignore[valid-type]
        data=fitting,
        first_id=ids[0],
        last_id=ids[1],
        has_more=bool(fitting) and (has_more or len(fitting) < len(data)),
    )


def _fitting(data: Sequence[ListedItem]) -> list[ListedItem]:
    """Return the first of the objects, at least one, that one answer can hold."""
    sizes = accumulate(len(to_json(item)) for item in data)
    num_fitting = sum(size <= MAX_BYTES for size in sizes)
    return list(data[: max(1, num_fitting)])
