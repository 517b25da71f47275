"""Parameters that would change the result and are not served: refused by name, never ignored."""

from __future__ import annotations

from typing import Any

import pytest

from engine.protocol.chat import ChatCompletionRequest
from engine.protocol.completions import CompletionRequest
from engine.protocol.errors import RequestError
from engine.protocol.unsupported import GENERATION, refuse_unsupported

TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [TOOL]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}),
        ("structured_outputs", {"regex": "a"}),
        ("guided_json", {"type": "object"}),
        ("guided_choice", ["a"]),
        ("json_schema", "{}"),
        ("regex", "a+"),
        ("ebnf", 'root ::= "a"'),
        ("grammar", "x"),
        ("best_of", 2),
        ("use_beam_search", True),
        ("length_penalty", 1.2),
        ("suffix", "end"),
        ("bad_words", ["a"]),
        ("allowed_token_ids", [1]),
        ("logits_processors", ["x"]),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("truncate_prompt_tokens", 5),
        ("chat_template", "{{ messages }}"),
        ("prompt_embeds", "x"),
        ("lora_path", "x"),
        ("verbosity", "low"),
        ("return_tokens_as_token_ids", True),
    ],
)
def test_a_parameter_that_changes_the_result_is_named(name: str, value: object) -> None:
    """The error's `param` is the parameter, and the message says what may stand there."""
    with pytest.raises(RequestError) as caught:
        refuse_unsupported({name: value})
    assert caught.value.param == name
    assert caught.value.code == "unsupported_parameter"
    assert "null" in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        dict.fromkeys(GENERATION),
        {name: values[0] for name, values in GENERATION.items() if values},
        {"tool_choice": "none", "tools": [TOOL]},
        {"tool_choice": "auto", "tools": []},
        {"response_format": {"type": "text"}},
        {"use_beam_search": False, "length_penalty": 1.0, "suffix": ""},
        {"modalities": ["text"]},
        {"best_of": 1},
        {"best_of": 3, "n": 3},
        {"best_of": 1, "n": None},
    ],
)
def test_values_that_change_nothing_pass(body: dict[str, Any]) -> None:
    """Null, and the defaults that clients write out, are fine."""
    refuse_unsupported(body)


def test_no_parameter_is_both_served_and_refused() -> None:
    """A parameter that begins to work must leave the table."""
    served = ChatCompletionRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
    assert served & GENERATION.keys() == set()
