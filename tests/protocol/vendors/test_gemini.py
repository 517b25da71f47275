"""Gemini's `generateContent`: requests as chats, and answers in its form."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.bodies import completion_body, usage_body
from tidemill.protocol.chat import ChatCompletionRequest, chat_choice, message_body
from tidemill.protocol.errors import RequestError
from tidemill.protocol.requests import read_body
from tidemill.protocol.vendors.gemini import (
    chat_of_contents,
    contents_error,
    contents_of_chat,
    error_of_contents,
)

USER = {"role": "user", "parts": [{"text": "Hi"}]}


def chat_of(**fields: Any) -> dict[str, Any]:
    """Return the chat of a request, which is valid."""
    chat = chat_of_contents({"contents": [USER], **fields})
    read_body(ChatCompletionRequest, chat)
    return chat


@pytest.mark.parametrize("is_snake", [False, True])
def test_all_parameters_have_their_names_in_a_chat(*, is_snake: bool) -> None:
    """Camel case and snake case are the same."""
    config: dict[str, Any] = {"temperature": 0, "topK": 3, "maxOutputTokens": 5, "seed": 1}
    config |= {"stopSequences": ["x"], "responseMimeType": "application/json"}
    schema = {
        "type": "OBJECT",
        "properties": {"type": {"type": "STRING", "nullable": True}},
        "propertyOrdering": ["type"],
    }
    config |= {"responseSchema": schema, "thinkingConfig": {"thinkingBudget": 0}}
    system = {"parts": [{"text": "Be brief."}]}
    declaration = {"name": "f", "description": "d", "parameters": {"type": "OBJECT"}}
    choice = {"mode": "ANY", "allowedFunctionNames": ["f"]}
    fields = {
        "systemInstruction": system,
        "generationConfig": config,
        "tools": [{"functionDeclarations": [declaration]}],
        "toolConfig": {"functionCallingConfig": choice},
        "safetySettings": [{}],
    }
    if is_snake:
        config["max_output_tokens"] = config.pop("maxOutputTokens")
        fields["system_instruction"] = fields.pop("systemInstruction")
        fields["generation_config"] = fields.pop("generationConfig")
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    named = {"type": "function", "function": {"name": "f"}}
    wanted = {"type": "object", "properties": {"type": {"type": ["string", "null"]}}}
    assert chat_of(**fields) == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ],
        "temperature": 0,
        "top_k": 3,
        "max_tokens": 5,
        "seed": 1,
        "stop": ["x"],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "response", "schema": wanted, "strict": True},
        },
        "reasoning_effort": "none",
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "required", "tools": [named]},
        },
    }


def test_a_conversation_with_calls_responses_images_and_thoughts() -> None:
    """Responses have the IDs of the calls of their function, in order."""
    call = {"functionCall": {"name": "f", "args": {"a": 1}}}
    response = {"functionResponse": {"name": "f", "response": {"b": 2}}}
    image = {"inlineData": {"mimeType": "image/png", "data": "AAAA"}}
    chat = chat_of(
        contents=[
            {"parts": [image, {"text": "What?"}]},
            {"role": "model", "parts": [{"text": "Hm.", "thought": True}, call, call]},
            {"role": "user", "parts": [response, response, {"text": "Go on."}]},
        ],
    )
    function = {"name": "f", "arguments": '{"a": 1}'}
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
            "content": None,
            "tool_calls": [
                {"id": "call_0", "type": "function", "function": function},
                {"id": "call_1", "type": "function", "function": function},
            ],
            "reasoning": "Hm.",
        },
        {"role": "tool", "tool_call_id": "call_0", "content": '{"b": 2}'},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"b": 2}'},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"contents": 3}, "messages"),
        ({"contents": [3]}, "messages.0"),
        ({"contents": [{"role": "user"}]}, "messages.0"),
        ({"contents": [{"parts": [{"executableCode": {}}]}]}, "messages.0.content"),
        ({"generationConfig": {"maxOutputTokens": "many"}}, "max_tokens"),
        ({"tools": [{"googleSearch": {}}]}, "tools.0"),
        ({"tools": [{"functionDeclarations": [{"name": "f"}], "googleSearch": {}}]}, "tools.0"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "text/x.enum"),
        ({"toolConfig": {"functionCallingConfig": {"mode": 3}}}, "tool_choice"),
        ({"toolConfig": {"functionCallingConfig": 3}}, "tool_choice"),
        ({"toolConfig": 3}, "tool_choice"),
        ({"tools": {"functionDeclarations": []}}, "tools"),
        ({"generationConfig": 3}, "generationConfig"),
        ({"generationConfig": {"thinkingConfig": 3}}, "thinkingConfig"),
        ({"generationConfig": {"responseMimeType": "image/png"}}, "response_format"),
        ({"generationConfig": {"responseModalities": ["IMAGE"]}}, "modalities"),
        ({"cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"contents": [{"parts": [{"text": "a", "inlineData": {}}]}]}, "messages.0.content"),
        ({"contents": [{"parts": [{"text": "a", "functionCall": {}}]}]}, "messages.0.content"),
    ],
)
def test_what_has_no_counterpart_is_named_by_the_chat(fields: dict[str, Any], words: str) -> None:
    """It is passed on as it is, so that no field is lost in silence."""
    with pytest.raises(Exception, match=words):
        chat_of(**fields)


def test_a_part_is_that_of_its_type() -> None:
    """A text may stand for a system instruction."""
    parts = [
        {"inlineData": {"mimeType": "audio/wav", "data": "AAAA"}},
        {"fileData": {"mimeType": "application/pdf", "fileUri": "s3://bucket/k"}},
        {"fileData": {"mimeType": "image/png", "fileUri": "s3://bucket/k"}},
    ]
    config = {"responseModalities": ["TEXT"], "responseMimeType": "text/plain"}
    chat = chat_of(
        contents=[{"parts": parts}], systemInstruction="Be brief.", generationConfig=config
    )
    system, user = chat["messages"]
    assert system == {"role": "system", "content": "Be brief."}
    assert [part["type"] for part in user["content"]] == ["audio_url", "file", "image_url"]
    assert chat.keys() == {"messages"}


def test_calls_without_ids_are_numbered_once() -> None:
    """An ID is not used again after its response."""
    call, response = {"functionCall": {"name": "f"}}, {"functionResponse": {"name": "f"}}
    chat = chat_of(contents=[{"role": "model", "parts": [call]}, {"parts": [response]}] * 2)
    first, _, second, last = chat["messages"]
    assert first["tool_calls"][0]["id"] != second["tool_calls"][0]["id"]
    assert last["tool_call_id"] == second["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"thinkingConfig": {"thinkingLevel": "LOW"}}, {"reasoning_effort": "low"}),
        ({"thinking_config": {"thinking_level": "high"}}, {"reasoning_effort": "high"}),
        ({"thinkingConfig": {"thinkingLevel": "THINKING_LEVEL_UNSPECIFIED"}}, {}),
        (
            {
                "responseMimeType": "text/x.enum",
                "responseSchema": {"type": "STRING", "enum": ["yes", "no"]},
            },
            {"structured_outputs": {"choice": ["yes", "no"]}},
        ),
    ],
)
def test_the_output_is_configured(config: dict[str, Any], found: dict[str, Any]) -> None:
    """By a level of thinking, or the choices of an enum."""
    assert chat_of(generationConfig=config) == {**chat_of(), **found}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        (
            {"type": "ARRAY", "min_items": "1", "items": {"type": "STRING", "max_length": 3}},
            {"type": "array", "minItems": 1, "items": {"type": "string", "maxLength": 3}},
        ),
        (
            {"any_of": [{"type": "STRING"}], "nullable": True},
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
        ),
        (
            {"type": "OBJECT", "properties": {"min_items": {"type": "STRING"}}},
            {"type": "object", "properties": {"min_items": {"type": "string"}}},
        ),
    ],
)
def test_a_schema_has_its_names_in_json_schema(schema: Any, found: Any) -> None:
    """Keywords may be in snake case and counts may be strings; names of properties stay."""
    chat = chat_of(generationConfig={"responseSchema": schema})
    assert chat["response_format"]["json_schema"]["schema"] == found


def test_an_answer_becomes_a_candidate() -> None:
    """Thoughts and calls are parts, truncated calls texts; thoughts are counted apart."""
    calls = [("t1", "f", '{"a": 1}'), ("t2", "f", '{"a": ')]
    message = message_body("Hi", reasoning="Hm.", calls=calls)
    choice = chat_choice(0, message, logprobs=None, finish_reason="length", stop_reason=None)
    body = completion_body(
        "chat.completion",
        "chatcmpl-7",
        created=1,
        model="m",
        choices=[choice],
        usage=usage_body(5, 3, reasoning_tokens=1),
    )
    call = {"functionCall": {"id": "t1", "name": "f", "args": {"a": 1}}}
    parts = [{"text": "Hm.", "thought": True}, {"text": "Hi"}, call, {"text": 'f {"a": '}]
    assert contents_of_chat(body) == {
        "candidates": [
            {
                "content": {"parts": parts, "role": "model"},
                "finishReason": "MAX_TOKENS",
                "index": 0,
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 5,
            "candidatesTokenCount": 2,
            "totalTokenCount": 8,
            "thoughtsTokenCount": 1,
        },
        "modelVersion": "m",
        "responseId": "chatcmpl-7",
    }


def test_errors_have_the_codes_of_grpc() -> None:
    """By the status."""
    assert [contents_error(status, "m")["code"] for status in (400, 404, 422, 500)] == [3, 5, 3, 13]


def test_an_error_has_the_names_and_places_of_the_request() -> None:
    """Parts that are not parts of the chat are counted."""
    text, bad = {"text": "Hi"}, {"x": 1}
    call = {"functionCall": {"name": "f"}}
    for fields, place in (
        ({"generationConfig": {"max_output_tokens": "x"}}, "generationConfig.maxOutputTokens"),
        ({"generationConfig": {"stopSequences": [5]}}, "generationConfig.stopSequences.0"),
        ({"contents": None}, "contents"),
        ({"systemInstruction": {"parts": [text]}, "contents": [5]}, "contents.0"),
        ({"systemInstruction": {"parts": [text, bad]}}, "systemInstruction.parts.1.type"),
        ({"contents": [{"role": "model", "parts": [text, call, bad]}]}, "contents.0.parts.2.type"),
    ):
        body = {"contents": [{"role": "user", "parts": [text]}], **fields}
        with pytest.raises(RequestError) as caught:
            read_body(ChatCompletionRequest, chat_of_contents(body))
        assert f"`{place}` " in error_of_contents(caught.value.message, body), fields
    assert error_of_contents("The engine failed.", {}) == "The engine failed."
