"""Echoed fields: fields next to a line's `body`, copied to the end of its row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tidemill.batch.file.lines import RawLine, Vendor
from tidemill.batch.file.rows import escape_separators
from tidemill.batch.file.run_line import LineResult
from tidemill.batch.file.vendor_lines import OF_REQUESTS, VENDOR_FIELDS
from tidemill.engine_process.exchange import in_thread_if_long
from tidemill.protocol.json_bodies import load_json
from tidemill.protocol.json_printing import print_json

from ..files.input_file import PlacedLine
from .feed import RunLine

_OF_CONVERTED_CHATS: Final = OF_REQUESTS | {"custom_id"}


class EchoedFields:
    """The fields of these names; a row of a chat has them among those of its `body`."""

    def __init__(self, names: Sequence[str], vendor: Vendor | None = None) -> None:
        self._names = names
        self._vendor = vendor

    def add_to(self, row: bytes, raw: RawLine) -> bytes:
        """Return a row with the fields of its line; a line that is not JSON has none."""
        try:
            line = load_json(raw.data, cache_strings="keys", in_slices=True)
        except ValueError:
            return row
        fields = self._fields_of(line) if isinstance(line, dict) else {}
        if not fields:
            return row
        printed = escape_separators(print_json(fields, inf_nan_mode="null"))
        return b"%s,%s\n" % (row.removesuffix(b"}\n"), printed[1:])

    def _fields_of(self, line: dict[str, Any]) -> dict[str, Any]:
        """Return the fields that the line had before it became a request."""
        found, body = line, line.get("body")
        if self._vendor == "chats" and isinstance(body, dict):
            found = body if line.keys() == _OF_CONVERTED_CHATS else {**body, **line}
        elif self._vendor not in {None, "no_url", "chats"}:
            own = {name: value for name, value in line.items() if name not in OF_REQUESTS}
            found = own | line.get(VENDOR_FIELDS, {})
        return {name: found[name] for name in self._names if name in found}

    def runner(self, run: RunLine) -> RunLine:
        """Return a runner of lines that adds the fields to the rows of another."""

        async def run_and_add(line: PlacedLine) -> LineResult:
            result, raw = await run(line), line.raw
            row = await in_thread_if_long(lambda _: self.add_to(result.row, raw), raw.data)
            return result._replace(row=row)

        return run_and_add
