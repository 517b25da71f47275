"""Errors of one kind are reported once, with their number."""

from __future__ import annotations

from tidemill.offline.console.error_summary import ErrorSummary, sentences_by_line


def test_messages_that_differ_in_values_are_of_one_kind() -> None:
    """The most frequent kind comes first, with the words of its first line in the file."""
    kinds = ErrorSummary()
    kinds.add("`stop` is odd.", 1)
    # Rows end in any order.
    for line, value in ((4, "7"), (2, "'a'"), (3, "'b'")):
        kinds.add(f"`top_k` must be an integer; got {value}.", line)
    kinds.add("The model `a1` does not exist.", 5)
    kinds.add("The model `a2` does not exist.", 6)
    assert kinds.count == 6
    assert kinds.sentences() == [
        "  3 × `top_k` must be an integer; got 'a', and similar ones (first: line 2)",
        "  1 × `stop` is odd. (line 1)",
        "  1 × The model `a1` does not exist. (line 5)",
        "  1 × The model `a2` does not exist. (line 6)",
    ]


def test_rare_kinds_are_counted_together() -> None:
    """A hundred kinds are remembered and ten shown, however many there are."""
    kinds = ErrorSummary()
    for number in range(500):
        kinds.add(f"`{number}` is wrong.")
    assert len(kinds.sentences()) == 11
    assert kinds.sentences()[-1] == "  490 × other errors"
    assert len(kinds._counter._kinds) == 100


def test_what_a_file_holds_moves_no_cursor() -> None:
    """Messages quote what others wrote."""
    kinds = ErrorSummary()
    kinds.add("`\x1b[2J` is wrong.", 1)
    assert "\x1b" not in kinds.sentences()[0]
    assert "\x1b" not in sentences_by_line([(1, "\x1b[2J")])[0]


def test_every_line_of_a_message_is_named() -> None:
    """A message about the whole file has no number."""
    errors = [(7, "`url` is missing"), (None, "More."), (3, "not JSON"), (1, "`url` is missing")]
    assert sentences_by_line(errors) == [
        "  2 × `url` is missing: lines 1, 7",
        "  line 3: not JSON",
        "  More.",
    ]


def test_lines_in_a_row_are_named_as_a_range() -> None:
    """A file of fifty bad lines is not a list of fifty numbers."""
    errors: list[tuple[int | None, str]] = [(number, "Bad.") for number in (*range(1, 51), 53, 54)]
    assert sentences_by_line(errors, "element") == ["  52 × Bad.: elements 1–50, 53, 54"]
