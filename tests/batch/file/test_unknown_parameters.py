"""Unknown parameters of a file are counted within bounds, whatever its bodies contain."""

from __future__ import annotations

import time

from tidemill.batch.file.unknown_parameters import (
    MAX_LISTED,
    MAX_NAMES,
    UnknownParameter,
    UnknownParameters,
    sentences,
)

CHAT, VECTORS = "/v1/chat/completions", "/v1/embeddings"


def test_names_are_counted_by_endpoint_with_their_first_line() -> None:
    """Each has a sentence; the most frequent comes first."""
    unknown = UnknownParameters()
    unknown.add(VECTORS, {"input": "x", "max_tokens": 1}, 2)
    for line in (3, 5):
        unknown.add("/chat/completions", {"temprature": 1, "temperature": 1}, line)
    words = f"  `temprature` in 2 elements (first: element 3) is not a parameter of {CHAT}; "
    assert sentences(unknown, "element") == [
        f"{words}did you mean `temperature`?",
        "  `max_tokens` in 1 element (element 2) is not a parameter of /v1/embeddings",
    ]


def test_counts_of_ranges_are_merged_as_if_one_had_read_all() -> None:
    """Line numbers are those of the file; the first line with the name counts."""
    whole, first, second = UnknownParameters(), UnknownParameters(), UnknownParameters()
    for line in range(1, 7):
        body = {"a": 1} if line % 2 else {"b": 1}
        whole.add(CHAT, body, line)
        (first if line <= 3 else second).add(CHAT, body, line - (0 if line <= 3 else 2))
    first.merge(second, 2)
    assert first == whole
    assert [each.first_line for each in whole.most_frequent()] == [1, 2]


def test_ten_thousand_names_are_counted_up_to_a_hundred() -> None:
    """The others are one number; only some are listed, and it takes no time."""
    unknown = UnknownParameters()
    started = time.perf_counter()
    for line in (1, 2):
        unknown.add(CHAT, {f"name {number}": 1 for number in range(10_000)}, line)
    listed = sentences(unknown)
    assert time.perf_counter() - started < 2
    assert len(unknown.found) == MAX_NAMES
    assert unknown.num_others == 2 * (10_000 - MAX_NAMES)
    assert len(listed) == MAX_LISTED + 1
    assert listed[-1] == f"  {2 * (10_000 - MAX_LISTED):,} × other names"


def test_a_name_is_cut_and_has_no_control_characters() -> None:
    """It may be a megabyte, move a cursor or reverse the text; printable letters stay."""
    unknown = UnknownParameters()
    names = ("x" * 2**20, "\x1b[31m" * 2**18, "\n\u202e", "\ud800", "température")
    escapes = r"\x1b[31m" * 9
    unknown.add(CHAT, dict.fromkeys(names), 1)
    listed = unknown.most_frequent()
    assert [each.name for each in listed] == [
        f"{'x' * 64}…",
        f"{escapes[:64]}…",
        r"\n\u202e",
        r"\ud800",
        "température",
    ]
    assert listed[-1] == UnknownParameter("température", CHAT, 1, 1, "temperature")
