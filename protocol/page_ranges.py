"""Page ranges of a document, such as `1-3,7`; pages count from 1."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from .fields import Text

_RANGE: Final = re.compile(r"\s*([1-9][0-9]{0,5})(?:-([1-9][0-9]{0,5}))?\s*", re.ASCII)
_MAX_CHARS: Final = 1_000


def _checked(text: str) -> str:
    for _ in page_ranges(text):
        pass
    return text


def page_ranges(text: str) -> Iterator[range]:
    """Yield the ranges of pages, in their order; raises ValueError for any other text."""
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError('must be pages and ranges of pages, such as "1-3,7"')
        yield range(first, last + 1)


Pages = Annotated[Text, Field(max_length=_MAX_CHARS), AfterValidator(_checked)]
"""Pages of a document, counted from 1."""
