"""Lines of a cascade as the second model gets them, and rows with the IDs of the original lines."""

from __future__ import annotations

from pydantic_core import from_json, to_json

from tidemill.batch.file.decided_row import DecidedRow
from tidemill.batch.file.escalated_line import escalated_line
from tidemill.batch.file.lines import RawLine
from tidemill.batch.file.rows import row_id_of

BODY = {"model": "small", "input": "x", "questions": [], "debias": 4}
RAW = RawLine(7, to_json({"custom_id": "a", "url": "/v1/decisions", "body": BODY}))


def test_a_line_names_the_second_model_and_its_way_to_decide() -> None:
    """A chat shows the options once; a decision keeps all other fields."""
    decided = escalated_line(RAW, "decision", "large")
    assert from_json(decided.data)["body"] == {**BODY, "model": "large"}
    marked = RawLine(7, b"\xef\xbb\xbf" + RAW.data)  # as in files that were joined
    assert escalated_line(marked, "decision", "large").data == decided.data
    chat = escalated_line(RAW, "chat")
    body = {name: value for name, value in BODY.items() if name != "debias"}
    assert from_json(chat.data)["body"] == {**body, "decide_by": "chat"}
    assert (chat.number, from_json(chat.data)["custom_id"]) == (7, "a")


def test_its_row_gets_the_id_of_the_original_line() -> None:
    """The row of another line is unchanged."""
    line = escalated_line(RAW, "chat")
    response = {"status_code": 200, "request_id": line.digest, "body": {"answers": []}}
    row = DecidedRow.parse(to_json({"id": row_id_of(line.digest), "response": response}))
    assert row.of_line(line, RAW).row_id == row_id_of(RAW.digest)
    other = RawLine(8, RAW.data)
    assert row.of_line(escalated_line(other, "chat"), other).data == row.data
