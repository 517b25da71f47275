"""Formatting of numbers and times."""

from __future__ import annotations

import pytest

from tidemill.dashboard import render
from tidemill.dashboard.failures import first_sentence
from tidemill.dashboard.names import batch_name
from tidemill.dashboard.row_view import row_view
from tidemill.dashboard.rows_page import RowLinks


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (950, "950"),
        (9999, "9,999"),
        (12345, "12.3k"),
        (999499, "999k"),
        (4560000, "4.56M"),
        (1500000000, "1.5G"),
    ],
)
def test_large_numbers_are_short(number: int, text: str) -> None:
    """About three digits, so that a column of them can be compared at a glance."""
    assert render.short(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.6, "1 min"),
        (75, "1 min 15 s"),
        (3600, "1 h"),
        (3661, "1 h 1 min"),
        (90000, "1 d 1 h"),
        (-5, "0 s"),
    ],
)
def test_time_spans_have_two_units(seconds: float, text: str) -> None:
    """The two largest units that are not zero are shown, in descending order."""
    assert render.duration(seconds) == text


@pytest.mark.parametrize(
    ("cost", "text"),
    [(None, "–"), (0, "–"), (0.00001, "< 0.0001"), (0.0123, "0.0123"), (1234.5, "1,234.50")],
)
def test_costs(cost: float | None, text: str) -> None:
    """There is no cost without a price or GPU time; a tiny cost is not shown as zero."""
    assert render.money(cost) == text


def test_backticks_are_code_and_the_rest_is_escaped() -> None:
    """A single backtick is unchanged."""
    text = "`a<b>` is not `c` <i>`"
    assert render.with_code(text) == ("<code>a&lt;b&gt;</code> is not <code>c</code> &lt;i&gt;`")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.00"), (1, "< 0.01"), (5400, "1.50"), (4_500_000, "1,250.0")]
)
def test_gpu_time_is_in_hours(seconds: float, text: str) -> None:
    """A short time is not shown as zero."""
    assert render.hours(seconds) == text


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("", ""),
        ("No model `x.y`. Use another.", "No model `x.y`."),
        ("One\nline\tof it", "One line of it"),
        ("word " * 100, f"{'word ' * 31}word…"),
    ],
)
def test_the_list_shows_one_sentence_of_an_error(message: str, sentence: str) -> None:
    """It is on one line and has a bounded length."""
    assert first_sentence(message) == sentence


@pytest.mark.parametrize(
    ("input_file_id", "filename", "name"),
    [
        ("file-1", "reviews.csv.jsonl", "reviews.csv"),
        ("file-1", "chats.jsonl", "chats.jsonl"),
        ("file-1", None, "file-1"),
        ("s3://b/input/lab/reviews.parquet", None, "lab/reviews.parquet"),
        ("", None, "erased"),
    ],
)
def test_a_batch_is_named_after_its_file(
    input_file_id: str, filename: str | None, name: str
) -> None:
    """The requests of a table have the table's name."""
    assert batch_name(input_file_id, filename) == name


def test_a_moment_is_put_into_the_readers_zone_by_the_page() -> None:
    """The element holds the time itself, and words for who runs no script."""
    text = '<time datetime="2026-01-02T03:04:05Z">2026-01-02 03:04 UTC</time>'
    assert render.moment(1_767_323_045) == text
    assert render.moment(None) == "–"


def test_the_error_of_a_row_is_shown_with_code() -> None:
    """An answer between backticks is shown as it is."""
    body = '{{"custom_id": "a", "response": {{"status_code": {}, "body": {}}}}}'
    failed = body.format(400, '{"error": {"message": "`n` must be <1>."}}')
    answered = body.format(200, '{"choices": [{"message": {"content": "`n`"}}]}')
    rows = [row_view(line, each.encode(), None) for line, each in enumerate((failed, answered))]
    page = render.render("row_list.html", rows=rows, links=RowLinks.of_batch("batch_1"))
    assert "<code>n</code> must be &lt;1&gt;." in page
    assert '<div class="text" dir="auto">`n`</div>' in page
