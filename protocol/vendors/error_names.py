"""Error names: errors of a chat with the names and places of the vendor's request."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

_PLACE: Final = re.compile(r"\bmessages\.([0-9]+)(?:(\.content)(?:\.([0-9]+))?)?")


class Origin(NamedTuple):
    """Place of a chat message in its request, that of its content, and numbers of its blocks."""

    message: str
    content: str
    blocks: Sequence[int]


class ErrorNames:
    """Fields of a request by those of its chat."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._pattern = re.compile(f"`({'|'.join(map(re.escape, names))})(?=[`.])")

    def apply(self, text: str, origins: Sequence[Origin] = ()) -> str:
        """Return an error with the request's names and the places of the messages' origins."""

        def place(match: re.Match[str]) -> str:
            number, content, part = match.groups()
            if int(number) >= len(origins):
                return match[0]
            origin = origins[int(number)]
            if part is not None and int(part) < len(origin.blocks):
                part = str(origin.blocks[int(part)])
            found = origin.content if content else origin.message
            return found if part is None else f"{found}.{part}"

        placed = _PLACE.sub(place, text)
        return self._pattern.sub(lambda match: f"`{self._names[match[1]]}", placed)
