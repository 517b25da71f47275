"""Bodies of `/v1/embeddings`: every form of input, and its errors."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.embeddings import EmbeddingRequest, embedding_body
from tidemill.protocol.errors import RequestError
from tidemill.protocol.prompts import MAX_PROMPTS
from tidemill.protocol.validation import parse

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("value", "inputs"),
    [
        ("a text", ["a text"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_input_has_four_forms(value: object, inputs: list[Any]) -> None:
    """It is text or token IDs, single or several."""
    assert parse(EmbeddingRequest, {"input": value}).input == inputs


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "is required"),
        ({"input": None}, "input", "is required"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input.1", "must not be empty"),
        ({"input": [[]]}, "input.0", "must not be empty"),
        ({"input": [[5], "a"]}, "input.1", "a list of token IDs, like the first item; got 'a'"),
        ({"input": [[5], [6, True]]}, "input.1.1", "must be a token ID, like .* got true"),
        ({"input": [[[5]]]}, "input.0.0", "must be a token ID; got a list"),
        ({"input": [5, "a"]}, "input.1", "must be a token ID"),
        ({"input": ["a", "\ud800"]}, "input.1", "lone surrogates"),
        ({"input": ["a"] * (MAX_PROMPTS + 1)}, "input", "split the request"),
        ({"input": ["a"] * 10_000}, "input", "more than 2,048 .*; got 10,000"),
        ({"input": 5}, "input", "must be a string"),
        ({"input": ["a", 5]}, "input.1", "must be a string, like the first item; got 5"),
        ({"input": [1.5]}, "input.0", "must be a string"),
        ({"input": [True]}, "input.0", "must be a string"),
        ({"input": {"text": "a"}}, "input", "must be a string"),
        ({"input": "\ud800"}, "input", "lone surrogates"),
        ({"input": "a", "messages": MESSAGES}, "messages", "cannot be used together"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "is required"),
        ({"input": "a", "encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "encoding_format": 5}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": -8}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": "64"}, "dimensions", "integer"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "equal to -1"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side", "'left' or 'right'"),
        ({"input": "a", "normalize": 1}, "normalize", "boolean"),
        ({"input": "a", "normalize": True, "use_activation": False}, "normalize", "differ"),
        ({"input": "a", "prompt_name": 5}, "prompt_name", "string"),
        ({"input": [5], "prompt_name": "query"}, "prompt_name", "for text"),
        ({"messages": MESSAGES, "prompt_name": "query"}, "prompt_name", "for text"),
        (
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
            "cannot both be true",
        ),
        (
            {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs",
            "must not set `messages`",
        ),
    ],
)
def test_an_invalid_embedding_body_is_reported_with_its_field(
    body: dict[str, Any], param: str, words: str
) -> None:
    """There is one clear error for each."""
    with pytest.raises(RequestError, match=words) as caught:
        parse(EmbeddingRequest, body)
    assert (caught.value.param, caught.value.status_code) == (param, 400)


def test_fields_without_effect_are_accepted() -> None:
    """vLLM and OpenAI accept a user, a priority and a request ID."""
    body = {"input": "a", "user": "me", "priority": 3, "request_id": "x", "cache_salt": "y"}
    assert parse(EmbeddingRequest, body).input == ["a"]


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({}, None),
        ({"normalize": False}, False),
        ({"use_activation": True}, True),
        ({"normalize": True, "use_activation": True}, True),
    ],
)
def test_normalisation_has_two_names(fields: dict[str, bool], wanted: object) -> None:
    """They are vLLM's older name and its current one."""
    assert parse(EmbeddingRequest, {"input": "a", **fields}).wants_length_one is wanted


def test_the_body_lists_vectors_in_order() -> None:
    """It is OpenAI's body, with vLLM's ID and time."""
    vectors = [[0.5], "AAAAPw=="]
    body = embedding_body("embd-1", created=5, model="m", vectors=vectors, dtype=None, num_tokens=7)
    assert body["data"] == [
        {"object": "embedding", "index": 0, "embedding": [0.5]},
        {"object": "embedding", "index": 1, "embedding": "AAAAPw=="},
    ]
    assert body["usage"] == {"prompt_tokens": 7, "completion_tokens": 0, "total_tokens": 7}
    assert (body["id"], body["object"], body["created"], body["model"]) == (
        "embd-1",
        "list",
        5,
        "m",
    )
