"""The display of rows: texts, scores, rankings, and the first values of vectors."""

from __future__ import annotations

import struct
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from examples.show import answered, prompt_of, table

NUMBERS = [0.25, -0.5, 1.0, 2.0]
RANKED = {"index": 1, "relevance_score": 0.75, "document": {"text": "The ebb"}}


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"choices": [{"message": {"content": "Paris"}}]}, ["Paris"]),
        ({"choices": [{"text": " flows"}]}, [" flows"]),
        ({"data": [{"embedding": NUMBERS}]}, ["[0.2500, -0.5000, 1.0000, …] of 4 dimensions"]),
        (
            {"data": [{"embedding": b64encode(struct.pack("<4f", *NUMBERS)).decode()}]},
            ["[0.2500, -0.5000, 1.0000, …] of 4 dimensions"],
        ),
        ({"data": [{"score": 0.5}, {"score": 0.25}]}, ["0.500", "0.250"]),
        ({"results": [RANKED]}, ["0.750  The ebb"]),
        ({"results": [{"index": 1, "relevance_score": 0.75}]}, ["0.750  document 1"]),
        ({"text": "two four seven"}, ["two four seven"]),
    ],
)
def test_a_row_is_shown_as_people_read_it(body: dict[str, Any], shown: list[str]) -> None:
    """The URL of the request does not matter."""
    assert answered({"response": {"status_code": 200, "body": body}, "error": None}) == shown


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ({"messages": [{"role": "user", "content": "Hello"}]}, "Hello"),
        ({"input": ["a", "b"]}, "['a', 'b']"),
        ({"query": "water", "documents": ["x"]}, "water"),
        (
            {"file_url": "data:audio/wav;base64," + "A" * 500},
            "data:audio/wav;base64," + "A" * 78 + "…",
        ),
    ],
)
def test_a_request_is_shown_by_its_text(body: dict[str, Any], shown: str) -> None:
    """A recording of megabytes is not shown."""
    assert prompt_of(body) == shown


def test_results_are_shown_as_a_table(tmp_path: Path) -> None:
    """A long message is shortened in the middle; IDs, raw answers and token counts are omitted."""
    path = tmp_path / "messages.output.csv"
    message = f"Hi, Ana here.{' Well' * 40}\nCall me in Porto."
    path.write_text(f'id,message,text,name,city,usage\nm1,"{message}","{{}}",Ana,Porto,"{{}}"\n')
    head, rule, row = table(str(path))
    assert head.split() == ["message", "name", "city"]
    assert set(rule) == {"-", " "}
    assert row.startswith("Hi, Ana here. Well")
    assert row.endswith("Call me in Porto.  Ana   Porto")
