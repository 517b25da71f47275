"""Bodies of `/v1/score` and `/v1/rerank`: every pair of names, and their errors."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import read_score
from tidemill.protocol.scoring import (
    MAX_TEXTS,
    RerankRequest,
    ScoreRequest,
    rerank_body,
    score_body,
)
from tidemill.protocol.validation import parse


@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")],
)
@pytest.mark.parametrize(
    ("first", "second", "sides"),
    [
        ("a", "b", (["a"], ["b"])),
        ("a", ["b", "c"], (["a"], ["b", "c"])),
        (["a", "b"], ["c", "d"], (["a", "b"], ["c", "d"])),
        ({"text": "a"}, [{"text": "b", "id": 5}, "c"], (["a"], ["b", "c"])),
    ],
)
def test_two_sides_have_four_pairs_of_names(
    names: tuple[str, str], first: object, second: object, sides: tuple[list[str], list[str]]
) -> None:
    """They are one to one, one to many, and pairs of equal numbers."""
    request = parse(ScoreRequest, dict(zip(names, (first, second), strict=True)))
    assert (request.names, request.sides) == (names, sides)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "text_1", "requires two sides"),
        ({"text_1": "a"}, "text_1", "requires two sides"),
        ({"text_1": "a", "data_2": "b"}, "text_1", "requires two sides"),
        ({"text_1": "a", "text_2": "b", "items": "c"}, "text_1", "requires two sides"),
        ({"text_1": ["a", "b"], "text_2": "c"}, "text_1", "both the same number"),
        ({"queries": ["a", "b"], "items": ["c"] * 3}, "queries", "both the same number"),
        ({"text_1": "", "text_2": "b"}, "text_1", "must not be empty"),
        ({"text_1": "a", "text_2": []}, "text_2", "must not be empty"),
        ({"text_1": "a", "text_2": ["b", ""]}, "text_2.1", "must not be empty"),
        ({"text_1": "a", "text_2": ["b", 5]}, "text_2.1", "must be a string or .* got 5"),
        ({"text_1": "a", "text_2": ["b", "\ud800"]}, "text_2.1", "lone surrogates"),
        ({"text_1": "a", "text_2": 5}, "text_2", "or a list of either; got 5"),
        ({"text_1": "a", "text_2": {"content": []}}, "text_2", "must be a string"),
        ({"text_1": "a", "text_2": "\ud800"}, "text_2", "lone surrogates"),
        ({"text_1": "a", "text_2": ["b"] * 10_000}, "text_2", "must not have more than 2,048"),
        ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1}, "max_tokens_per_doc", "equal"),
        ({"query": "a"}, "documents", "is required"),
        ({"query": "a", "documents": "b", "text_1": "c", "text_2": "d"}, "text_1", "and `query`"),
        ({"query": "a", "documents": []}, "documents", "must not be empty"),
        ({"query": ["a"], "documents": ["b"]}, "query", r'must be a string or .*"}; got a list'),
        ({"query": "", "documents": ["b"]}, "query", "must not be empty"),
        ({"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "greater than or equal to 0"),
        ({"query": "a", "documents": ["b"], "top_n": "1"}, "top_n", "integer"),
        ({"query": "a", "documents": ["b"], "return_documents": 1}, "return_documents", "boolean"),
    ],
)
def test_an_invalid_scoring_body_is_reported_with_its_field(
    body: dict[str, Any], param: str, words: str
) -> None:
    """There is one clear error for each."""
    with pytest.raises(RequestError, match=words) as caught:
        read_score(body)
    assert (caught.value.param, caught.value.status_code) == (param, 400)


def test_many_texts_are_accepted_up_to_a_limit() -> None:
    """One more is refused, and the message says what to do."""
    body = {"query": "a", "documents": ["b"] * MAX_TEXTS}
    assert len(parse(RerankRequest, body).documents) == MAX_TEXTS
    with pytest.raises(RequestError, match="split the request"):
        parse(RerankRequest, {"query": "a", "documents": ["b"] * (MAX_TEXTS + 1)})


def test_a_body_with_a_query_is_a_rerank_request() -> None:
    """openai-batch sends it to the score URL."""
    assert isinstance(read_score({"query": "a", "documents": "b"}), RerankRequest)
    assert isinstance(read_score({"queries": "a", "documents": "b"}), ScoreRequest)


@pytest.mark.parametrize(
    ("top_n", "order"),
    [(None, [2, 0, 3, 1]), (0, [2, 0, 3, 1]), (2, [2, 0]), (4, [2, 0, 3, 1]), (9, [2, 0, 3, 1])],
)
def test_the_highest_score_is_first_and_ties_keep_their_order(
    top_n: int | None, order: list[int]
) -> None:
    """`top_n` 0 or above the count returns all of them."""
    request = parse(RerankRequest, {"query": "a", "documents": list("bcde"), "top_n": top_n})
    body = rerank_body(
        "rerank-1", model="m", scores=[0.5, 0.25, 1.0, 0.5], request=request, num_tokens=9
    )
    assert [result["index"] for result in body["results"]] == order
    assert body["results"][0] == {
        "index": 2,
        "document": {"text": "d"},
        "relevance_score": 1.0,
    }
    assert body["usage"] == {"prompt_tokens": 9, "total_tokens": 9}


def test_documents_can_be_left_out() -> None:
    """The index identifies the document."""
    request = parse(RerankRequest, {"query": "a", "documents": "b", "return_documents": False})
    body = rerank_body("rerank-1", model="m", scores=[0.5], request=request, num_tokens=3)
    assert body["results"] == [{"index": 0, "relevance_score": 0.5}]


def test_scores_are_listed_in_the_order_of_their_pairs() -> None:
    """vLLM has the same order."""
    body = score_body("score-1", created=5, model="m", scores=[0.25, 0.5], num_tokens=7)
    assert body["data"] == [
        {"index": 0, "object": "score", "score": 0.25},
        {"index": 1, "object": "score", "score": 0.5},
    ]
    assert (body["object"], body["usage"]["total_tokens"]) == ("list", 7)
