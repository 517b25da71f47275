"""Tools with OpenAI's client: required calls, whole and streamed, and their results."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tidemill import demo


class Weather(BaseModel):
    """The arguments of a tool."""

    unit: Literal["celsius", "fahrenheit"]
    is_wet: bool


TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {**Weather.model_json_schema(), "additionalProperties": False},
            "strict": True,
        },
    }
    for name in ("weather", "tide")
]
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "tide"}}
CHAT: dict[str, Any] = {
    "model": demo.NAME,
    "messages": [{"role": "user", "content": "Is it wet?"}],
    "max_tokens": 300,
    "temperature": 0,
    "tools": TOOLS,
}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any of them", "one of them"])
def test_a_required_call_is_made(client: openai.OpenAI, choice: Any) -> None:
    """It has the tool's name, arguments of the schema, and no other content."""
    [answer] = client.chat.completions.create(**CHAT, tool_choice=choice).choices
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls
    for call in answer.message.tool_calls:
        assert call.type == "function"
        assert call.function.name in (("tide",) if choice is NAMED else ("weather", "tide"))
        Weather.model_validate_json(call.function.arguments)
    assert not (answer.message.content or "").strip()


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any of them", "one of them"])
def test_a_streamed_call_is_the_same_call(client: openai.OpenAI, choice: Any) -> None:
    """Its name and ID come once and first, its arguments in parts."""
    [whole] = client.chat.completions.create(**CHAT, tool_choice=choice).choices
    names: dict[int, list[str]] = defaultdict(list)
    arguments: dict[int, str] = defaultdict(str)
    reasons = []
    for chunk in client.chat.completions.create(**CHAT, tool_choice=choice, stream=True):
        for choice_delta in chunk.choices:
            reasons += [choice_delta.finish_reason] if choice_delta.finish_reason else []
            for call in choice_delta.delta.tool_calls or []:
                assert call.function is not None
                if call.function.name:
                    assert call.id
                    names[call.index].append(call.function.name)
                arguments[call.index] += call.function.arguments or ""
    assert reasons == ["tool_calls"]
    calls = whole.message.tool_calls or []
    joined = [(names[place], json.loads(arguments[place])) for place in sorted(arguments)]
    assert joined == [
        ([call.function.name], json.loads(call.function.arguments))
        for call in calls
        if call.type == "function"
    ]


def test_parallel_calls_can_be_disabled(client: openai.OpenAI) -> None:
    """With `parallel_tool_calls` false there is only one."""
    request = {**CHAT, "tool_choice": "required", "parallel_tool_calls": False}
    [answer] = client.chat.completions.create(**request).choices
    assert len(answer.message.tool_calls or []) == 1


def test_arguments_are_parsed_into_a_pydantic_model(client: openai.OpenAI) -> None:
    """The client's own helper for tools does it."""
    request = {**CHAT, "tools": [openai.pydantic_function_tool(Weather, name="weather")]}
    [answer] = client.chat.completions.parse(**request, tool_choice="required").choices
    [call] = answer.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_a_conversation_continues_after_a_call(client: openai.OpenAI) -> None:
    """The tool's result is sent back with the call's ID, and the model answers."""
    [first] = client.chat.completions.create(**CHAT, tool_choice=NAMED).choices
    [call] = (first.message.tool_calls or [])[:1]
    messages = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": '{"is_wet": true}'},
    ]
    [second] = client.chat.completions.create(
        **{**CHAT, "messages": messages, "max_tokens": 16}
    ).choices
    assert second.finish_reason in ("stop", "length")


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_an_answer_without_a_call_is_an_answer(client: openai.OpenAI, choice: str) -> None:
    """Without a call, the text is the content."""
    request = {**CHAT, "messages": [{"role": "user", "content": "What is 7 plus 5?"}]}
    [answer] = client.chat.completions.create(
        **{**request, "tool_choice": choice, "max_tokens": 24}
    ).choices
    assert answer.message.tool_calls is None
    assert answer.message.content


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "none"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ],
    ids=["a name twice", "no such tool", "no such choice", "no tools", "no function", "no name"],
)
def test_invalid_tools_are_a_400(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    """The error names the parameter."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**CHAT, **fields})
    assert (caught.value.param or "").startswith(param)
