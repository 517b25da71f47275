"""The body of a text completion: forms of a prompt, and refusals."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.completions import CompletionRequest
from tidemill.protocol.errors import RequestError
from tidemill.protocol.prompts import MAX_PROMPTS
from tidemill.protocol.validation import parse


def completion(**fields: Any) -> CompletionRequest:
    """Return the request of a completion body with these fields."""
    return parse(CompletionRequest, {"prompt": "a", **fields})


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (list(range(MAX_PROMPTS + 1)), [list(range(MAX_PROMPTS + 1))]),
    ],
)
def test_a_prompt_has_four_forms(prompt: object, prompts: list[object]) -> None:
    """Text, texts, token IDs and lists of token IDs become a list of prompts."""
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        {},
        "",
        [],
        [""],
        [[]],
        [1, "a"],
        ["a", None],
        [1.0, 2.0],
        [True],
        [[1], "a"],
        [[1, [2]]],
        [[True]],
        ["\ud800"],
        "\ud800",
        ["a"] * (MAX_PROMPTS + 1),
    ],
)
def test_an_invalid_prompt_is_refused(prompt: object) -> None:
    """Empty prompts, mixed lists and values of other types are errors of `prompt`."""
    with pytest.raises(RequestError) as caught:
        completion(prompt=prompt)
    assert (caught.value.param or "").split(".")[0] == "prompt"


def test_a_prompt_is_required() -> None:
    """It has no default."""
    with pytest.raises(RequestError, match="`prompt` is required"):
        parse(CompletionRequest, {})


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}])
def test_zero_tokens_are_allowed_when_the_prompt_is_scored(fields: dict[str, Any]) -> None:
    """`max_tokens: 0` is the usual way to score prompts."""
    assert completion(max_tokens=0, **fields).max_tokens == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": -2}, "logprobs"),
        ({"logprobs": 1, "logprob_start_len": 2}, "logprob_start_len"),
        ({"prompt": ["a"] * 100, "n": 128}, "n"),
    ],
)
def test_a_completion_value_out_of_range_is_refused_by_name(
    fields: dict[str, Any], param: str
) -> None:
    """The error names the field itself."""
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.param == param
