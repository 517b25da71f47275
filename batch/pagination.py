"""Pages of lists, as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final, Generic, Literal, Protocol, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

# Limit for the objects of one page: Lambda allows 6 MB, which may be base64.
MAX_BYTES: Final = 4_000_000


class Listed(Protocol):
    """Any object with an ID."""

    id: str


Item = TypeVar("Item")
ListedItem = TypeVar("ListedItem", bound=Listed)


class Page(BaseModel, Generic[Item]):
    """One page of a list; an empty one must be the last, or clients would never stop."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def model_parametrized_name(cls, params: tuple[Any, ...]) -> str:
        """Return the name of a page type in the OpenAPI document."""
        return f"{params[0].__name__}Page"


def make_page(
    kind: type[ListedItem], data: Sequence[ListedItem], *, has_more: bool
) -> Page[ListedItem]:
    """Return a page of objects with IDs; `has_more` counts only for a page with objects.

    Objects that do not fit in the response are left to the next page.
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
    """Return the first objects that fit in one response, at least one."""
    sizes = accumulate(len(to_json(item)) for item in data)
    num_fitting = sum(size <= MAX_BYTES for size in sizes)
    return list(data[: max(1, num_fitting)])
