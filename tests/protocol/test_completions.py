"""The body of a text completion: the forms of a prompt, and what is refused."""

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
    """Text, texts, tokens, and lists of tokens become a list of prompts."""
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
def test_what_is_no_prompt_is_refused(prompt: object) -> None:
    """Empty prompts, mixed lists and values of other types are faults of `prompt`."""
    with pytest.raises(RequestError) as caught:
        completion(prompt=prompt)
    assert (caught.value.param or "").split(".")[0] == "prompt"


def test_a_prompt_is_required() -> None:
    """A body without one is no completion."""
    with pytest.raises(RequestError, match="`prompt` is required"):
        parse(CompletionRequest, {})


@pytest.mark.parametrize("fields", [{"echo": True}, {"prompt_logprobs": 0}])
def test_no_new_token_is_legal_when_the_prompt_is_scored(fields: dict[str, Any]) -> None:
    """`max_tokens: 0` is how prompts are scored."""
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
def test_a_value_out_of_bounds_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """The error names the field itself."""
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.param == param
