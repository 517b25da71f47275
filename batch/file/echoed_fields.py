"""Echoed fields: fields next to a line's `body`, copied to the end of its row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tidemill.protocol.json_bodies import load_json
from tidemill.protocol.json_printing import print_json

from .lines import BOM, RawLine, Vendor
from .rows import escape_separators
from .vendor_lines import OF_REQUESTS, VENDOR_FIELDS

_OF_CONVERTED_CHATS: Final = OF_REQUESTS | {"custom_id"}


class EchoedFields:
    """The fields of these names; a row of a chat has them among those of its `body`."""

    def __init__(self, names: Sequence[str], vendor: Vendor | None = None) -> None:
        self._names = names
        self._vendor = vendor

    def add_to(self, row: bytes, raw: RawLine) -> bytes:
        """Return a row with the fields of its line; a line that is not JSON has none."""
        return with_fields(row, self.of_line(raw))

    def of_line(self, raw: RawLine) -> bytes:
        """Return the fields of a line as the members of an object, empty without any."""
        try:
            line = load_json(raw.data.removeprefix(BOM), cache_strings="keys", in_slices=True)
        except ValueError:
            return b""
        fields = self._fields_of(line) if isinstance(line, dict) else {}
        return escape_separators(print_json(fields, inf_nan_mode="null"))[1:-1]

    def _fields_of(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the line had before it became a request."""
        found, body = line, line.get("body")
        if self._vendor == "chats" and isinstance(body, dict):
            found = body if line.keys() == _OF_CONVERTED_CHATS else {**body, **line}
        elif self._vendor not in {None, "no_url", "chats"}:
            own = {name: value for name, value in line.items() if name not in OF_REQUESTS}
            found = own | line.get(VENDOR_FIELDS, {})
        return {name: found[name] for name in self._names if name in found}


def with_fields(row: bytes, members: bytes) -> bytes:
    """Return a printed row with more members at its end."""
    return b"%s,%s}\n" % (row.removesuffix(b"}\n"), members) if members else row
