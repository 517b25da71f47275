"""Custom tools in chats: an input in place of arguments, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion

from tests.engine.endpoints.tool_models import HERMES, WEATHER, ToolScene
from tidemill.protocol.chat import ChatCompletionRequest
from tidemill.protocol.contract import StreamedReply
from tidemill.protocol.custom_tools import InputStream, arguments_of, input_of
from tidemill.protocol.errors import RequestError
from tidemill.protocol.validation import parse

USER = {"role": "user", "content": "Weather?"}
TOOL: dict[str, Any] = {"type": "custom", "custom": {"name": "code", "description": "Runs code."}}
CHATS = "/v1/chat/completions"


def regex(definition: object, syntax: str = "regex") -> dict[str, Any]:
    """Return a custom tool with a grammar."""
    grammar = {"syntax": syntax, "definition": definition}
    given = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": {"name": "code", "format": given}}


def calls_of(*calls: tuple[str, str]) -> str:
    """Return an answer with these calls."""
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


async def streamed(scene: ToolScene, **body: Any) -> list[dict[str, Any]]:
    """Return the tool calls of a stream, put together by their numbers."""
    sent = {"messages": [USER], **body, "stream": True}
    reply = await scene.served.answer(CHATS, sent, "req_1", 0)
    assert isinstance(reply, StreamedReply)
    calls: dict[int, dict[str, Any]] = {}
    num_pieces = 0
    async for chunk in reply.chunks:
        for choice in chunk["choices"]:
            for piece in choice["delta"].get("tool_calls", ()):
                num_pieces += 1
                index = piece.pop("index")
                if index not in calls:
                    calls[index] = piece
                    continue
                kind = next(iter(piece))
                field = {"custom": "input", "function": "arguments"}[kind]
                calls[index][kind][field] += piece[kind][field]
    assert num_pieces > len(calls)
    return [*calls.values()]


@pytest.mark.parametrize(
    ("written", "text"),
    [
        (arguments_of('print("é")\n' * 3), 'print("é")\n' * 3),
        ('{"input": "a\\ud83d\\ude00\\u00e9b"}', "a😀éb"),
        ('{"city": 5}', '{"city": 5}'),
        ('{"input": "a\\ud800 and the rest"}', "a\ufffd and the rest"),
        ('{"input": "a\n\\d+\\u12"}', "a\n\\d+\\u12"),
    ],
    ids=["text", "escapes", "others", "surrogate", "not JSON"],
)
async def test_a_call_has_its_input(written: str, text: str) -> None:
    """A stream has the same calls, next to those of functions."""
    weather = ("weather", '{"city": "Paris"}')
    scene = ToolScene(calls_of(("code", written), weather, ("code", written)), HERMES)
    fields: dict[str, Any] = {"tools": [WEATHER, TOOL]}
    choice = scene.choice(**fields)
    calls = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["type"] for call in calls] == ["custom", "function", "custom"]
    for call in (calls[0], calls[2]):
        assert call["custom"] == {"name": "code", "input": text}
    shown = [{**call, "id": "c"} for call in await streamed(scene, **fields)]
    assert shown == [{**call, "id": "c"} for call in calls]
    ChatCompletion.model_validate(scene.chat(**fields), strict=True)


def test_earlier_calls_and_tools_are_those_of_functions_in_the_prompt() -> None:
    """A model knows only functions."""
    scene = ToolScene("Done.", HERMES)
    custom = {"name": "code", "input": 'say "a"'}
    turns = [
        {"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom", "custom": custom}]},
        {"role": "tool", "tool_call_id": "c1", "content": "a"},
    ]
    prompt = scene.prompt(messages=[USER, *turns], tools=[TOOL])
    assert 'TOOL {"type": "function", "function": {"name": "code", "description": "Runs' in prompt
    assert r'"arguments": {"input": "say \"a\""}' in prompt


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "custom": {"name": "code"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "required",
                "tools": [{"type": "custom", "custom": {"name": "code"}}],
            },
        },
    ],
)
def test_a_choice_may_name_a_custom_tool(choice: dict[str, Any]) -> None:
    """Its input then matches its regular expression."""
    body = {"messages": [USER], "tools": [WEATHER, regex(r"a+")], "tool_choice": choice}
    request = parse(ChatCompletionRequest, body)
    [tool] = request.callable_tools
    assert request.needs_call
    assert tool.function.strict
    assert tool.arguments_schema()["properties"]["input"]["pattern"] == "^(?:a+)$"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0.custom"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools.0.custom.name"),
        ({"tools": [{"type": "other"}]}, "tools.0.type"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "x"}}}]},
            "tools.0.custom.format.type",
        ),
        (
            {"tools": [regex("start: /a/", "lark")]},
            "tools.0.custom.format.grammar.syntax",
        ),
        ({"tools": [regex("(a")]}, "tools.0.custom.format.grammar.definition"),
        ({"tools": [regex(r"(a)\1")]}, "tools.0.custom.format.grammar.definition"),
        ({"tools": [TOOL, TOOL]}, "tools.1.custom.name"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "b"}}},
            "tool_choice.custom.name",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom"}]}]},
            "messages.0.tool_calls.0.custom",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"type": "custom", "custom": {"name": "", "input": "a"}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.custom.name",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"type": "custom", "custom": {"name": "a", "input": 5}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.custom.input",
        ),
    ],
)
def test_a_wrong_field_is_named(wrong: dict[str, Any], param: str) -> None:
    """The error has the path that the client sent."""
    with pytest.raises(RequestError) as caught:
        parse(ChatCompletionRequest, {"messages": [USER], **wrong})
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message


_PIECES = st.sampled_from(
    [
        *('{"input": "', '"}', '"', "\\", "\\n", "\\q", "\n", "é", "ab", "\\u", "\\u12", "\\u00e9"),
        *("\\ud83d", "\\uDE00", "\\ud83d\\ude00", ', "input": "b"', '{"x": 1, "input": "c"}', " "),
    ]
)


@given(st.sampled_from(["", '{"input": "']), st.lists(_PIECES, max_size=12).map("".join))
def test_an_input_is_the_same_however_it_is_cut(beginning: str, rest: str) -> None:
    """The output of a model need not be JSON."""
    arguments = beginning + rest
    whole = input_of(arguments)
    for cut in range(len(arguments) + 1):
        stream = InputStream()
        assert stream.add(arguments[:cut]) + stream.add(arguments[cut:]) + stream.end() == whole
    stream = InputStream()
    assert "".join([*map(stream.add, arguments), stream.end()]) == whole
    whole.encode()


@pytest.mark.parametrize("written", ['{"input": "\\ud83d', "[", " "])
def test_a_long_call_is_read_in_linear_time(written: str) -> None:
    """Only an escape that may continue is held, and the beginning is matched only at first."""
    stream, held = InputStream(), [0]
    stream.add(written)
    for _ in range(3_000):
        stream.add("\\ud83d" if "input" in written else " ")
        held.append(len(stream._open) + len(stream._before) * stream._may_begin)
    assert max(held) <= 300


@given(st.text(), st.integers(1, 5), st.sampled_from(["ascii", "utf-8"]))
def test_pieces_of_an_input_are_the_input(text: str, size: int, letters: str) -> None:
    """Escapes may be cut anywhere."""
    arguments = json.dumps({"input": text}, ensure_ascii=letters == "ascii")
    stream = InputStream()
    pieces = [arguments[start : start + size] for start in range(0, len(arguments), size)]
    assert "".join([*map(stream.add, pieces), stream.end()]) == text == input_of(arguments)
