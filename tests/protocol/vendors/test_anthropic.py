"""Anthropic's Messages API: requests as chats, and answers in its form."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.bodies import completion_body, usage_body
from tidemill.protocol.chat import ChatCompletionRequest, chat_choice, message_body
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import read_body
from tidemill.protocol.vendors.anthropic import chat_of_message, error_of_message
from tidemill.protocol.vendors.anthropic_answers import (
    message_error,
    message_of_chat,
)

TOOL = {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {}}}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a/b.png"}}
SHOWN_IMAGE = {"type": "image_url", "image_url": {"url": "http://a/b.png"}}


def chat_of(**fields: Any) -> dict[str, Any]:
    """Return the chat of a request, which is valid."""
    chat = chat_of_message({"messages": [{"role": "user", "content": "Hi"}], **fields})
    read_body(ChatCompletionRequest, chat)
    return chat


def test_all_parameters_have_their_names_in_a_chat() -> None:
    """Fields without an effect are left out, and unknown ones stay for the warning."""
    chat = chat_of(
        model="m",
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=3,
        stop_sequences=["x"],
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        metadata={"user_id": "u"},
        anthropic_version="bedrock-2023-05-31",
        thinking={"type": "disabled"},
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        seed=1,
    )
    assert chat == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "max_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "stop": ["x"],
        "reasoning_effort": "none",
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "f",
                    "description": "d",
                    "parameters": {"type": "object", "properties": {}},
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "parallel_tool_calls": False,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
        },
        "seed": 1,
    }


def test_a_conversation_with_calls_results_images_and_thoughts() -> None:
    """Each tool result is a separate message, and a final assistant's text is continued."""
    image = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    chat = chat_of(
        messages=[
            {"role": "user", "content": [{"type": "image", "source": image}, text("What?")]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    text("Let me see."),
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [text("42")]},
                    text("Go on."),
                ],
            },
            {"role": "assistant", "content": "It is"},
        ],
        tools=[TOOL],
    )
    assert chat["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                {"type": "text", "text": "What?"},
            ],
        },
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": 1}'},
                }
            ],
            "reasoning": "Hm.",
        },
        {"role": "tool", "content": "42", "tool_call_id": "t1"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "It is"},
    ]
    assert chat["continue_final_message"]


def test_either_name_of_the_format_goes_with_an_effort() -> None:
    """The old name of the format counts if the new one is missing."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    chats = [
        chat_of(output_format=form, output_config={"effort": "low"}),
        chat_of(output_config={"format": form, "effort": "low"}),
    ]
    assert chats[0] == chats[1]
    assert chats[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert chats[0]["reasoning_effort"] == "low"


def test_disabled_thinking_wins_over_an_effort() -> None:
    """The effort is that of the whole answer."""
    chat = chat_of(thinking={"type": "disabled"}, output_config={"effort": "high"})
    assert chat["reasoning_effort"] == "none"


def test_a_message_is_one_answer_without_log_probabilities() -> None:
    """Fields of a chat for more are left out."""
    assert chat_of(n=2, best_of=2, logprobs=True, top_logprobs=3) == chat_of()


def test_a_document_has_its_title_and_context() -> None:
    """They precede its text."""
    source = {"type": "text", "media_type": "text/plain", "data": "Text."}
    document = {"type": "document", "source": source, "title": "Title", "context": "From a book."}
    chat = chat_of(messages=[{"role": "user", "content": [document]}])
    assert chat["messages"][0]["content"] == "Title\n\nFrom a book.\n\nText."


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ("No file.", "Error: No file."),
        (None, "Error: "),
        ([{"type": "text", "text": "No."}], "Error: No."),
        ([IMAGE], [{"type": "text", "text": "Error:"}, SHOWN_IMAGE]),
    ],
)
def test_a_failed_tool_result_is_marked(content: Any, shown: Any) -> None:
    """A chat has no field for it."""
    result = {"type": "tool_result", "tool_use_id": "t", "content": content, "is_error": True}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    chat = chat_of(
        messages=[{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}],
        tools=[TOOL],
    )
    assert chat["messages"][-1]["content"] == shown


def text(content: str) -> dict[str, str]:
    """Return a block of text."""
    return {"type": "text", "text": content}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": "Hi"}, "messages"),
        ({"messages": [3]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": [None]}]}, "messages.0.content"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": 3}, "tools"),
        ({"tool_choice": 3, "tools": [TOOL]}, "tool_choice"),
        ({"system": 3}, "messages.0.content"),
        ({"thinking": {"type": "yes"}}, "thinking_token_budget"),
        ({"thinking": 5}, "thinkingConfig"),
        ({"stop_sequences": [3]}, "stop"),
    ],
)
def test_what_has_no_counterpart_is_named_by_the_chat(fields: dict[str, Any], words: str) -> None:
    """It is passed on as it is, so that no field is lost in silence."""
    with pytest.raises(Exception, match=words):
        chat_of(**fields)


def completion(**fields: Any) -> dict[str, Any]:
    """Return a chat completion."""
    message = message_body(
        fields.get("content", "Hi"),
        reasoning=fields.get("reasoning"),
        calls=fields.get("calls", []),
    )
    choice = chat_choice(
        0,
        message,
        logprobs=None,
        finish_reason=fields.get("finish_reason", "stop"),
        stop_reason=fields.get("stop_reason"),
    )
    usage = usage_body(5, 3, cached_tokens=2)
    return completion_body(
        "chat.completion", "chatcmpl-7", created=1, model="m", choices=[choice], usage=usage
    )


def test_an_answer_becomes_a_message() -> None:
    """Cached tokens are not among the input tokens."""
    calls = [("t1", "f", '{"a": 1}')]
    body = completion(reasoning="Hm.", calls=calls, finish_reason="tool_calls")
    assert message_of_chat(body) == {
        "id": "msg_7",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "Hi"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 3,
        },
    }


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({}, "end_turn", None),
        ({"stop_reason": 7}, "end_turn", None),
        ({"stop_reason": "x"}, "stop_sequence", "x"),
        ({"finish_reason": "length"}, "max_tokens", None),
    ],
)
def test_stop_reasons(fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    """A stop token has no name; a stop sequence has one."""
    message = message_of_chat(completion(**fields))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("arguments", ['{"a": 1, "b": [2', '{"a": NaN}', "[1]", "nonsense"])
@pytest.mark.parametrize(
    ("finish_reason", "stop_reason"), [("tool_calls", "end_turn"), ("length", "max_tokens")]
)
def test_a_call_without_a_complete_object_is_a_text(
    arguments: str, finish_reason: str, stop_reason: str
) -> None:
    """No client runs a tool with a part of its arguments."""
    calls = [("t1", "f", arguments)]
    message = message_of_chat(completion(calls=calls, finish_reason=finish_reason))
    assert message["content"][1:] == [{"type": "text", "text": f"f {arguments}"}]
    assert message["stop_reason"] == stop_reason


def test_a_valid_call_before_an_invalid_one_is_used() -> None:
    """Each call is a separate block."""
    calls = [("t1", "f", ""), ("t2", "f", "{")]
    message = message_of_chat(completion(calls=calls, finish_reason="tool_calls"))
    assert message["content"][1:] == [
        {"type": "tool_use", "id": "t1", "name": "f", "input": {}},
        {"type": "text", "text": "f {"},
    ]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (422, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_types(status: int, kind: str) -> None:
    """By the status."""
    error = {"type": kind, "message": "m"}
    assert message_error(status, "m", "r") == {"type": "error", "error": error, "request_id": "r"}


def test_a_pdf_is_a_file() -> None:
    """It is given as base64 or as a URL."""
    data = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    sources = (data, {"type": "url", "url": "https://a.example/b.pdf"})
    blocks = [{"type": "document", "source": source} for source in sources]
    chat = chat_of(messages=[{"role": "user", "content": blocks}])
    assert [part["file"] for part in chat["messages"][0]["content"]] == [
        {"file_data": "data:application/pdf;base64,JVBERi0="},
        {"file_url": "https://a.example/b.pdf"},
    ]


def test_an_error_of_a_chat_names_the_field_of_its_message() -> None:
    """A system prompt, tool results and calls are not counted as in a chat."""
    text, bad = {"type": "text", "text": "a"}, {"type": "smell"}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [bad]}
    call = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    for fields, place in (
        ({"system": "s", "messages": [user(text, bad)]}, "messages.0.content.1.type"),
        ({"system": [bad]}, "system.0.type"),
        ({"system": 5}, "system"),
        ({"messages": [user(result)]}, "messages.0.content.0.content.0.type"),
        ({"messages": [user(result | {"content": "r"}, bad)]}, "messages.0.content.1.type"),
        (
            {"messages": [{"role": "assistant", "content": [call, bad]}]},
            "messages.0.content.1.type",
        ),
        ({"system": "s", "messages": [{"role": "user"}]}, "messages.0.content"),
        ({"system": "s", "messages": [5]}, "messages.0"),
        ({"stop_sequences": [5]}, "stop_sequences.0"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": 5}, "thinking"),
        ({"output_config": 5}, "output_config.format"),
        ({"messages": None}, "messages"),
    ):
        body = {"messages": [user(text)], **fields}
        with pytest.raises(RequestError) as caught:
            read_body(ChatCompletionRequest, chat_of_message(body))
        assert f"`{place}` " in error_of_message(caught.value.message, body), fields
    assert error_of_message("`messages.9` is bad.", {}) == "`messages.9` is bad."
    assert error_of_message("`messages.1` is bad.", None) == "`messages.1` is bad."


def user(*blocks: dict[str, Any]) -> dict[str, Any]:
    """Return a message with these blocks."""
    return {"role": "user", "content": [*blocks]}
