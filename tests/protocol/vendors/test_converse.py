"""Bedrock's Converse form: requests as chats, and answers in it."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.protocol.bodies import completion_body, usage_body
from tidemill.protocol.chat import ChatCompletionRequest, chat_choice, message_body
from tidemill.protocol.errors import RequestError
from tidemill.protocol.fetched_urls import fetched_urls
from tidemill.protocol.requests import read_body
from tidemill.protocol.vendors.converse import (
    chat_of_converse,
    converse_of_chat,
    error_of_converse,
    is_converse,
)

USE: dict[str, Any] = {"toolUse": {"toolUseId": "t1", "name": "f", "input": {"a": 1}}}
TEXT: dict[str, Any] = {"text": "Hi"}
IMAGE: dict[str, Any] = {"image": {"format": "png", "source": {"bytes": "AAAA"}}}
SPEC = {"toolSpec": {"name": "f", "inputSchema": {"json": {"type": "object"}}}}
BODY: dict[str, Any] = {
    "schemaVersion": "messages-v1",
    "system": [{"text": "Be brief."}],
    "messages": [
        {
            "role": "user",
            "content": [IMAGE, TEXT],
        },
        {"role": "assistant", "content": [USE]},
        {
            "role": "user",
            "content": [{"toolResult": {"toolUseId": "t1", "content": [{"json": {"b": 2}}]}}],
        },
    ],
    "inferenceConfig": {"maxTokens": 5, "topP": 0.5, "stopSequences": ["x"]},
    "toolConfig": {
        "tools": [SPEC],
        "toolChoice": {"any": {}},
    },
}


def test_a_request_becomes_a_chat() -> None:
    """Parts, parameters and tools have their names in a chat."""
    chat = chat_of_converse(BODY)
    read_body(ChatCompletionRequest, chat)
    function = {"name": "f", "arguments": '{"a": 1}'}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    calls = [{"id": "t1", "type": "function", "function": function}]
    assert chat == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [image, {"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "content": '{"b": 2}', "tool_call_id": "t1"},
        ],
        "max_tokens": 5,
        "top_p": 0.5,
        "stop": ["x"],
        "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        ],
        "tool_choice": "required",
    }


def test_a_failed_tool_result_is_marked() -> None:
    """Its text begins with the word, like that of Anthropic's."""
    failed = {"toolUseId": "t1", "content": [{"text": "No."}], "status": "error"}
    messages = [*BODY["messages"][:2], {"role": "user", "content": [{"toolResult": failed}]}]
    chat = chat_of_converse({**BODY, "messages": messages})
    assert chat["messages"][-1]["content"] == "Error: No."


def test_the_form_is_detected_by_its_fields() -> None:
    """Parts of the other forms have a type."""
    text = {"role": "user", "content": [{"text": "Hi"}]}
    assert is_converse({"messages": [text]})
    assert is_converse({"messages": [], "inferenceConfig": {}})
    assert not is_converse({"messages": [{**text, "content": [{"type": "text", "text": "Hi"}]}]})
    assert not is_converse({"messages": [{**text, "content": "Hi"}]})


def test_an_answer_has_its_form() -> None:
    """Reasoning, text and calls are parts."""
    message = message_body("Hi", reasoning="Hm.", calls=[("t1", "f", '{"a": 1}')])
    choice = chat_choice(0, message, logprobs=None, finish_reason="tool_calls", stop_reason=None)
    body = completion_body(
        "chat.completion", "c-7", created=1, model="m", choices=[choice], usage=usage_body(5, 3)
    )
    reasoning = {"reasoningContent": {"reasoningText": {"text": "Hm."}}}
    content = [reasoning, {"text": "Hi"}, USE]
    assert converse_of_chat(body) == {
        "output": {"message": {"role": "assistant", "content": content}},
        "stopReason": "tool_use",
        "usage": {"inputTokens": 5, "outputTokens": 3, "totalTokens": 8},
    }


def test_media_in_s3_are_urls() -> None:
    """An image may lack its format there."""
    location = {"s3Location": {"uri": "s3://b/k", "bucketOwner": "1"}}
    parts = [
        {"text": "Look"},
        {"image": {"format": "png", "source": location}},
        {"document": {"format": "pdf", "name": "n", "source": location}},
    ]
    chat = chat_of_converse(
        {"messages": [{"role": "user", "content": parts}], "inferenceConfig": {}}
    )
    _, image, document = chat["messages"][0]["content"]
    assert image == {"type": "image_url", "image_url": {"url": "s3://b/k"}}
    assert document["type"] == "file"
    assert fetched_urls(chat) == {
        "messages.0.content.1": "s3://b/k",
        "messages.0.content.2": "s3://b/k",
    }


def chat_of(*parts: Any, **fields: Any) -> dict[str, Any]:
    """Return the chat of a message with these parts, which is valid."""
    body = {"messages": [{"role": "user", "content": [*parts]}], **fields}
    assert is_converse(body)
    chat = chat_of_converse(body)
    read_body(ChatCompletionRequest, chat)
    return chat


@pytest.mark.parametrize(
    ("parts", "fields", "words"),
    [
        ([TEXT], {"inferenceConfig": 5}, "inferenceConfig"),
        ([TEXT], {"toolConfig": 5}, "tools"),
        ([TEXT], {"toolConfig": {"tools": [SPEC], "toolChoice": "any"}}, "tool_choice"),
        ([TEXT], {"additionalModelRequestFields": 5}, "additionalModelRequestFields"),
        ([TEXT], {"guardrailConfig": {"guardrailIdentifier": "g"}}, "guardrailConfig"),
        ([TEXT], {"outputConfig": {"textFormat": {"type": "json_schema"}}}, "outputConfig"),
        ([TEXT], {"promptVariables": {"a": {"text": "b"}}}, "promptVariables"),
        ([TEXT | IMAGE], {}, "messages.0.content.0"),
        ([TEXT, {"video": {}}], {}, "messages.0.content.1"),
    ],
)
def test_what_has_no_counterpart_is_named_by_the_chat(
    parts: list[Any], fields: dict[str, Any], words: str
) -> None:
    """It is passed on as it is, so that no field is lost in silence."""
    with pytest.raises(RequestError, match=words):
        chat_of(*parts, **fields)


def test_a_message_may_begin_with_an_image_or_a_recording() -> None:
    """Marks of a cache change no answer."""
    recording = {"format": "wav", "source": {"bytes": "AAAA"}}
    mark = {"cachePoint": {"type": "default"}}
    chat = chat_of(IMAGE, {"audio": recording}, TEXT, mark, system=[TEXT, mark])
    system, user = chat["messages"]
    assert system["content"] == "Hi"
    assert [part["type"] for part in user["content"]] == ["image_url", "input_audio", "text"]
    location = {"s3Location": {"uri": "s3://bucket/k"}}
    chat = chat_of({"audio": {"format": "wav", "source": location}})
    assert fetched_urls(chat) == {"messages.0.content.0": "s3://bucket/k"}


def form_of(schema: str) -> dict[str, Any]:
    """Return the format of an output with this schema."""
    return {"type": "json_schema", "structure": {"jsonSchema": {"name": "n", "schema": schema}}}


def test_the_format_and_the_effort_of_the_output_are_those_of_the_chat() -> None:
    """The schema is a text; a tool's arguments may be strict."""
    config = {"textFormat": form_of('{"type": "object"}'), "effort": "low"}
    spec = {"toolSpec": {**SPEC["toolSpec"], "strict": True}}
    chat = chat_of(TEXT, outputConfig=config, toolConfig={"tools": [spec]})
    assert chat["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert chat["reasoning_effort"] == "low"
    assert chat["tools"][0]["function"]["strict"] is True
    assert "response_format" not in chat_of(TEXT, outputConfig={"textFormat": None})


def test_an_error_has_the_names_and_places_of_the_request() -> None:
    """The system's message is not counted."""
    for fields, place in (
        ({"inferenceConfig": {"maxTokens": "x"}}, "inferenceConfig.maxTokens"),
        ({"inferenceConfig": {"stopSequences": [5]}}, "inferenceConfig.stopSequences.0"),
        ({"toolConfig": {"tools": [5]}}, "toolConfig.tools.0"),
        ({"outputConfig": {"effort": 5}}, "outputConfig.effort"),
        (
            {"outputConfig": {"textFormat": form_of("{")}},
            "outputConfig.textFormat.structure.jsonSchema.schema",
        ),
        ({"system": [TEXT], "messages": [{"role": "user"}]}, "messages.0.content"),
        (
            {"system": [TEXT], "messages": [{"role": "user", "content": [TEXT, {"video": {}}]}]},
            "messages.0.content.1.type",
        ),
    ):
        body = {"messages": [{"role": "user", "content": [TEXT]}], **fields}
        with pytest.raises(RequestError) as caught:
            read_body(ChatCompletionRequest, chat_of_converse(body))
        assert f"`{place}` " in error_of_converse(caught.value.message, body), fields


def test_additional_fields_are_those_of_the_request() -> None:
    """Amazon's models have further parameters in them."""
    extra = {"inferenceConfig": {"topK": 3}, "min_p": 0.5}
    config = {"maxTokens": 5}
    same = {"requestMetadata": {"a": "b"}, "performanceConfig": {"latency": "optimized"}}
    chat = chat_of(TEXT, inferenceConfig=config, additionalModelRequestFields=extra, **same)
    assert not chat.keys() & same.keys()
    assert (chat["max_tokens"], chat["top_k"], chat["min_p"]) == (5, 3, 0.5)
