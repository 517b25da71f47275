"""Result rows in the order of a table's rows."""

from __future__ import annotations

import json

from tidemill.batch.file.lines import RawLine
from tidemill.batch.table.result_rows import in_order


def test_rows_are_in_the_order_of_their_requests() -> None:
    """They are successes, failures, invalid lines, and error rows for lines that did not run."""
    lines = [b'{"custom_id": "%d", "url": "u", "body": {}}' % number for number in range(4)]
    lines[2] = b'{"custom_id": "2", "row_error": {"message": "no cell", "column": "c"}}'
    files = [[b'{"custom_id": "3"}\n'], [b'{"custom_id": "0"}\n']]
    raw = [RawLine(number, line) for number, line in enumerate(lines, 1)]
    first, second, third, fourth = map(json.loads, in_order(raw, files))
    assert (first, fourth) == ({"custom_id": "0"}, {"custom_id": "3"})
    assert second["error"]["message"].startswith("This row did not run")
    assert third["error"]["message"] == "Row 3: no cell"
