"""Rows before they are durable, and those that need no engine."""

from __future__ import annotations

import json
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.batch.file.lines import RawLine, read_lines
from tidemill.batch.parts import FinishedRow
from tidemill.handler.worker.shard.rows import Unflushed, compact, print_unrun

LINE = b'{"custom_id":"a","url":"/v1/x","body":{}}'


def due_in(rows: Unflushed, now: float) -> float | None:
    """Return when they are due, at ten seconds or a hundred bytes."""
    return rows.due_in(now, flush_seconds=10, flush_bytes=100)


def test_rows_are_due_when_the_oldest_is_old_enough() -> None:
    """Later ones do not put it off."""
    rows = Unflushed()
    assert due_in(rows, 5) is None
    rows.add(FinishedRow(1, b"x" * 10, is_success=True), 5)
    rows.add(FinishedRow(2, b"x" * 10, is_success=True), 9)
    assert [due_in(rows, now) for now in (5, 9, 15, 99)] == [10, 6, 0, 0]


def test_rows_are_due_when_they_are_many() -> None:
    """They are flushed at once, however young they are."""
    rows = Unflushed()
    rows.add(FinishedRow(1, b"x" * 100, is_success=True), 5)
    assert due_in(rows, 5) == 0


def test_what_was_finished_during_a_write_waits_for_the_next() -> None:
    """Their age counts from the start of that write."""
    rows = Unflushed()
    for line in (1, 2):
        rows.add(FinishedRow(line, b"x" * 60, is_success=True), 5)
    rows.drop(1, 7)
    assert (len(rows), rows.num_bytes, rows.oldest_at) == (1, 60, 7)
    rows.drop(1, 8)
    assert (len(rows), rows.num_bytes, rows.oldest_at) == (0, 0, None)


def test_a_quarantined_line_says_why_it_was_not_run() -> None:
    """It gets a server error, with the same bytes in every run."""
    row = print_unrun(RawLine(7, LINE), is_quarantined=True)
    assert row is not None
    assert (row.line, row.is_success) == (7, False)
    shown = json.loads(row.row)
    assert shown["custom_id"] == "a"
    assert shown["response"]["status_code"] == 500
    assert shown["response"]["body"]["error"]["code"] == "engine_killed"
    assert row == print_unrun(RawLine(7, LINE), is_quarantined=True)


def test_a_quarantined_line_may_be_no_request_at_all() -> None:
    """Its row then has that error."""
    row = print_unrun(RawLine(7, b"{"), is_quarantined=True)
    assert row is not None
    assert json.loads(row.row)["error"]["code"] == "invalid_json_line"


def test_a_line_too_long_to_be_kept_needs_no_engine() -> None:
    """Its row is that of `tidemill run`; any other line is for the engine."""
    [long, other] = read_lines(BytesIO(LINE * 9 + b"\n" + LINE), max_line_bytes=100)
    row = print_unrun(long, is_quarantined=False)
    assert row is not None
    assert "too long" in json.loads(row.row)["error"]["message"]
    assert print_unrun(other, is_quarantined=False) is None


@pytest.mark.parametrize(
    ("lines", "text"), [([], ""), ([3], "3"), ([4, 1, 2, 3], "1-4"), ([1, 3, 4, 9], "1,3-4,9")]
)
def test_line_numbers_are_shown_in_short(lines: list[int], text: str) -> None:
    """They are in order, as ranges."""
    assert compact(lines) == text


@given(st.sets(st.integers(1, 60)))
def test_what_is_shown_in_short_says_it_all(lines: set[int]) -> None:
    """Every number can be read back."""
    pieces = [piece.split("-") for piece in compact(lines).split(",") if piece]
    assert {n for piece in pieces for n in range(int(piece[0]), int(piece[-1]) + 1)} == lines
