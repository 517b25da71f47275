"""Requests for responses: the chats that answer them, and errors with the client's names."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tidemill.protocol.custom_tools import input_of
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import check_request
from tidemill.protocol.responses.request import ResponsesRequest
from tidemill.protocol.routes import RESPONSES

USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "1"}
TOOL = {"type": "function", "name": "f"}
IMAGE = {"type": "input_image", "image_url": "https://example.com/a.png"}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


CUSTOM = {"type": "custom", "name": "f"}


def custom(syntax: str, definition: str) -> dict[str, Any]:
    """Return a custom tool with a grammar."""
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {**CUSTOM, "format": grammar}


def nested(depth: int) -> dict[str, Any]:
    """Return an object of this depth."""
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def reasoning(text: str) -> dict[str, Any]:
    """Return an item of reasoning."""
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def answer(text: str) -> dict[str, Any]:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": [{"type": "output_text", "text": text}]}


def parsed(**fields: Any) -> ResponsesRequest:
    """Return a request."""
    request = check_request(RESPONSES.name, {"input": "Hi", **fields}, None)
    assert isinstance(request, ResponsesRequest)
    return request


def error_of(**fields: Any) -> RequestError:
    """Return the error of a request."""
    with pytest.raises(RequestError) as caught:
        parsed(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([reasoning("a"), answer("b"), CALL], [{"reasoning": "a", "content": "b"}]),
        ([reasoning("a"), CALL, answer("b")], [{"reasoning": "a", "content": "b"}]),
        ([answer("a"), CALL, answer("b")], [{"content": "a\nb"}]),
        ([reasoning("a"), reasoning("b"), CALL], [{"reasoning": "a\nb"}]),
        ([reasoning("a"), CALL, reasoning("b")], [{"reasoning": "a\nb"}]),
        (
            [{"role": "assistant", "content": [IMAGE]}, CALL, answer("b")],
            [
                {
                    "content": [
                        {"type": "image_url", "image_url": {"url": IMAGE["image_url"]}},
                        {"type": "text", "text": "b"},
                    ]
                }
            ],
        ),
        ([answer("a"), answer("b"), CALL], [{"content": "a"}, {"content": "b"}]),
    ],
)
def test_items_before_an_output_are_one_turn(
    items: list[dict[str, Any]], turns: list[dict[str, Any]]
) -> None:
    """An output follows the turn with its call, wherever text and reasoning are."""
    user, *shown, output = parsed(input=[USER, *items, OUTPUT])._messages.messages
    assert (user["role"], output) == ("user", {"role": "tool", "tool_call_id": "c", "content": "1"})
    assert shown.pop() == {"role": "assistant", "tool_calls": [CHAT_CALL], **turns.pop()}
    assert shown == [{"role": "assistant", **turn} for turn in turns]


@pytest.mark.parametrize(
    ("metadata", "param"),
    [
        ({"a": 1}, "metadata.a"),
        ({"a": {"b": "c"}}, "metadata.a"),
        ({"a": "b" * 513}, "metadata.a"),
        ({"a" * 65: "b"}, f"metadata.{'a' * 65}"),
        ({str(number): "b" for number in range(17)}, "metadata"),
    ],
)
def test_metadata_has_the_limits_of_openais(metadata: dict[str, Any], param: str) -> None:
    """A response repeats it, so it is neither large nor nested."""
    assert error_of(metadata=metadata).param == param
    assert parsed(metadata={"a" * 64: "b" * 512}).metadata == {"a" * 64: "b" * 512}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": [{**TOOL, "x": math.nan}]}, "tools", "NaN"),
        ({"text": {"format": {"type": "text", "x": math.inf}}}, "text.format", "infinity"),
        ({"service_tier": "gold"}, "service_tier", "must be 'auto'"),
        ({"questions": []}, "questions", "is not supported"),
        ({"tools": [{"type": "mcp", "name": "f"}]}, "tools.0.type", "other tools are not"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name", "is required"),
        ({"tools": [custom("lark", "start: /a/")]}, "tools.0.format.syntax", "must be 'regex'"),
        ({"tools": [custom("regex", "")]}, "tools.0.format.definition", "a regular expression"),
        ({"tools": [custom("regex", "a)|(b")]}, "tools.0.format.definition", "unmatched"),
        ({"tools": [custom("regex", "(a")]}, "tools.0.format.definition", "unmatched"),
        ({"tools": [custom("regex", "a\\")]}, "tools.0.format.definition", "expression"),
        ({"tools": [{**CUSTOM, "format": 5}]}, "tools.0.format", "must be an object"),
        ({"tools": [{**CUSTOM, "format": {}}]}, "tools.0.format.type", "'text' or 'grammar'"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "g"}],
                },
            },
            "tool_choice.tools.0.name",
            "got 'g'",
        ),
        ({"tool_choice": nested(300)}, "tool_choice", "nested too deeply"),
        ({"tool_choice": nested(9_000)}, "tool_choice", "nested too deeply"),
        ({"tools": [TOOL], "tool_choice": {}}, "tool_choice.type", "type` is required."),
        ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice", '{"type": "function", "name": …}'),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input.0.content.0.file_id",
            "send an `image_url`",
        ),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, "input.1.type", "send the item"),
    ],
)
def test_an_error_has_the_names_and_the_forms_of_responses(
    fields: dict[str, Any], param: str, message: str
) -> None:
    """Advice can be followed: it has no form of chats."""
    error = error_of(**fields)
    assert error.param == param
    assert message in error.message


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "f"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "f"}]},
    ],
)
def test_a_custom_tool_is_a_function_with_one_text(choice: dict[str, Any]) -> None:
    """A regular expression constrains the text; earlier calls have the same form."""
    call = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": 'a "b"'}
    output = {**OUTPUT, "type": "custom_tool_call_output"}
    tools = [custom("regex", r"a|[)]\)(b)"), {**TOOL, "name": "g"}]
    request = parsed(input=[USER, call, output], tools=tools, tool_choice=choice)
    [tool] = request.chat.callable_tools
    schema = tool.arguments_schema()
    assert (schema["required"], tool.function.strict) == (["input"], True)
    assert schema["properties"]["input"] == {"type": "string", "pattern": r"^(?:a|[)]\)(b))$"}
    _, message, _ = request.chat.messages
    assert message.tool_calls is not None
    assert message.tool_calls[0].function.arguments == {"input": 'a "b"'}
    assert request.custom_tools == {"f"}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\"b', 'a\n"b'),
        ('{"input": "a\\', "a"),
        ('{"inp', ""),
        ('{"a": 1', '{"a": 1'),
    ],
)
def test_a_truncated_call_of_a_custom_tool_has_the_beginning_of_its_input(
    arguments: str, text: str
) -> None:
    """The JSON around the text is ours: no client expects it."""
    assert input_of(arguments) == text


def test_a_long_turn_is_joined_in_one_pass() -> None:
    """Ten thousand items of one turn are one message."""
    items = [each for number in range(5_000) for each in (answer(str(number)), reasoning("a"))]
    [user, turn, _] = parsed(input=[USER, CALL, *items, OUTPUT])._messages.messages
    assert user == USER
    assert turn["content"].split("\n") == [str(number) for number in range(5_000)]
    assert turn["reasoning"] == "\n".join("a" * 5_000)


def test_parts_of_joined_items_have_their_own_places() -> None:
    """Errors of the chat, and images, are reported at the client's items."""
    output = {**OUTPUT, "output": [IMAGE]}
    request = parsed(input=[USER, reasoning("a"), answer("b"), CALL, output, USER])
    places = {
        "messages.0.content": "input.0.content",
        "messages.1.content.3.text": "input.2.content.3.text",
        "messages.1.tool_calls.0.function.arguments": "input.3.arguments",
        "messages.2.content.0.image_url": "input.4.output.0.image_url",
        "messages.3.content": "input.5.content",
        "messages": "input",
    }
    for chat, own in places.items():
        with pytest.raises(RequestError) as caught, request.own_names():
            raise RequestError(f"`{chat}` is wrong.", param=chat)
        assert (caught.value.param, caught.value.message) == (own, f"`{own}` is wrong.")
    assert request.images() == [("input.4.output.0", IMAGE["image_url"], None, False, False)]
    assert parsed(input=[{"role": "user", "content": "x" * 9}]).images() == []


def test_a_file_is_a_document_of_the_chat() -> None:
    """Its pages are selected by the part."""
    url = "https://example.com/a.pdf"
    part = {"type": "input_file", "file_url": url, "filename": "a.pdf", "pages": "2-3"}
    request = parsed(
        input=[{"role": "user", "content": [part, {"type": "input_text", "text": "?"}]}]
    )
    assert request.images() == [("input.0.content.0", url, "2-3", True, False)]
    [(place, document)] = request.chat.messages[0].media()
    assert (place, document.url, document.pages) == (0, url, "2-3")
