"""Answers of every endpoint, and how two of them differ."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from tidemill.batch.file.answers import (
    NumberDifference,
    TextDifference,
    answer_of,
    difference_between,
)


def chat(text: str | None, **message: Any) -> dict[str, Any]:
    """Return a body of a chat."""
    choice = {"index": 0, "message": {"content": text, **message}, "finish_reason": "stop"}
    return {"id": "1", "created": 2, "choices": [choice], "usage": {"completion_tokens": 3}}


def call(number: str) -> dict[str, Any]:
    """Return a tool call with a given ID."""
    return {"id": number, "type": "function", "function": {"name": "f", "arguments": "{}"}}


def vectors(*items: object) -> dict[str, Any]:
    """Return a body of embeddings."""
    return {"data": [{"index": i, "embedding": item} for i, item in enumerate(items)]}


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (chat("x"), chat("x") | {"id": "2", "created": 5}),
        (chat(None, tool_calls=[call("1")]), chat(None, tool_calls=[call("2")])),
        (chat("x", reasoning_content="hm"), chat("x")),
        ({"choices": [{"text": "x"}]}, {"choices": [{"text": "x", "logprobs": None}]}),
        ({"text": "x", "duration": 1}, {"text": "x"}),
        (vectors([1.0, 2.0]), {"data": vectors([1.0, 2.0])["data"], "model": "m"}),
        (
            vectors([1, -2]),
            vectors(base64.b64encode(b"\x01\xfe").decode()) | {"output_dtype": "int8"},
        ),
        (vectors([0.5, 2]), vectors(base64.b64encode(struct.pack("<2f", 0.5, 2)).decode())),
        (
            {"results": [{"index": 1, "relevance_score": 0.1}, {"index": 0, "relevance_score": 2}]},
            {"results": [{"index": 0, "relevance_score": 2}, {"index": 1, "relevance_score": 0.1}]},
        ),
        (
            {"output": [{"content": [{"text": "x"}], "id": "1"}]},
            {"output": [{"content": [{"text": "x"}]}]},
        ),
        ({"other": [1], "id": "a"}, {"other": [1], "id": "b"}),
        ({"choices": []}, {"choices": [None]}),
    ],
)
def test_what_says_nothing_about_the_answer_is_not_compared(
    a: dict[str, Any], b: dict[str, Any]
) -> None:
    """Ids, times, forms of a vector, and the order of items with an index."""
    assert difference_between(answer_of(a), answer_of(b)) is None


def test_a_truncated_response_has_the_finish_reason_of_a_chat() -> None:
    """So its row counts as truncated; other responses have their status."""
    response: dict[str, Any] = {"output": [], "status": "incomplete"}
    assert answer_of(response).finish_reasons == ("incomplete",)
    response["incomplete_details"] = {"reason": "max_output_tokens"}
    assert answer_of(response).finish_reasons == ("length",)


def test_a_call_of_a_custom_tool_is_compared_by_its_input() -> None:
    """Its IDs are not compared."""
    item = {"type": "custom_tool_call", "name": "f", "input": "a", "id": "1", "call_id": "2"}
    answers = [answer_of({"output": [item | more]}) for more in ({}, {"id": "3"}, {"input": "b"})]
    assert difference_between(*answers[:2]) is None
    assert difference_between(*answers[1:]) is not None


def test_decisions_are_read_as_lines_and_compared_by_their_probabilities() -> None:
    """Both formats are known; malformed answers are compared as JSON."""
    predicate = {"type": "predicate", "name": "city", "probability": 0.25}
    shares = [{"value": True, "probability": 0.75}, {"value": "true", "probability": 0.25}]
    choice = {"type": "choice", "name": None, "choice": True, "probabilities": shares}
    one = answer_of({"answers": [predicate, choice, {"type": "refusal", "name": "x"}]})
    assert one.texts == ("city: no (0.750)\n1: true (0.750)\nx: refusal",)
    other = answer_of({"answers": [predicate | {"probability": 0.5}, choice, {"type": "refusal"}]})
    difference = difference_between(one, other)
    assert isinstance(difference, NumberDifference)
    assert difference.max_abs == 0.25
    tone = {"type": "score", "probabilities": {"0": 0.2, "1": 0.8}, "legend": {}}
    assert answer_of({"answers": {"tone": tone}}).texts == ("tone: 1 (0.800)",)
    assert answer_of({"answers": [7]}).texts == ('{"answers": [7]}',)


@pytest.mark.parametrize(
    ("a", "b", "position"),
    [
        (chat("same, then a"), chat("same, then b"), 11),
        (chat("short"), chat("short and more"), 5),
        (chat("x"), chat("x", tool_calls=[call("1")]), 1),
        ({"text": "é" * 5000}, {"text": "é" * 4999 + "e"}, 4999),
        ({"other": 1}, {"other": 2}, len('{"other": ')),
        (chat(""), vectors([1.0]), 0),
        (vectors([1.0, None]), vectors([1.0, 2.0]), 0),
    ],
)
def test_texts_differ_from_a_character_on(
    a: dict[str, Any], b: dict[str, Any], position: int
) -> None:
    """The position is 0-based."""
    found = difference_between(answer_of(a), answer_of(b))
    assert isinstance(found, TextDifference)
    assert found[:2] == (0, position)


def test_the_first_choice_that_differs_is_named() -> None:
    """One that the other side lacks, too."""
    texts = [{"choices": [{"text": text} for text in texts]} for texts in ("ab", "ac", "abc")]
    a, b, c = map(answer_of, texts)
    assert difference_between(a, b) == TextDifference(1, 0, "b", "c")
    assert difference_between(a, c) == TextDifference(2, 0, "", "c")


def test_numbers_differ_by_an_amount_and_an_angle() -> None:
    """The largest gap of all, the least cosine of two vectors; shapes may differ as well."""
    a, b = answer_of(vectors([1, 0], [0.0, 1.0])), answer_of(vectors([1, 0], [1.0, 0.0]))
    assert difference_between(a, b) == NumberDifference(1.0, 0.0)
    assert difference_between(a, answer_of(vectors([1, 0]))) == NumberDifference(None, None)
    scores = [answer_of({"data": [{"index": 0, "score": score}]}) for score in (0.5, 0.25)]
    assert difference_between(*scores) == NumberDifference(0.25, None)
