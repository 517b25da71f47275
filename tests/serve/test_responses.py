"""`/v1/responses` with OpenAI's client: answers, streams, and stored responses."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest
from openai.types.responses import ResponseCustomToolCall, ResponseFunctionToolCall
from pydantic import BaseModel

from tidemill import demo
from tidemill.protocol.responses.request import LOGPROBS

BODY: dict[str, Any] = {
    "model": demo.NAME,
    "input": "What is 7 plus 5?",
    "max_output_tokens": 24,
    "temperature": 0,
}
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "strict": True,
}


class Sum(BaseModel):
    """A number as structured output."""

    sum: int


def test_a_response_is_the_chat_of_the_same_conversation(client: openai.OpenAI) -> None:
    """Text, usage and the parameters of the request are those of OpenAI's response."""
    chat = client.chat.completions.create(
        model=demo.NAME,
        messages=[
            {"role": "system", "content": "Answer in a sentence."},
            {"role": "user", "content": BODY["input"]},
        ],
        max_tokens=24,
        temperature=0,
    )
    response = client.responses.create(**BODY, instructions="Answer in a sentence.")
    assert response.output_text == chat.choices[0].message.content
    assert response.status == "completed"
    assert response.incomplete_details is None
    assert response.instructions == "Answer in a sentence."
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert type(response).model_validate(response.to_dict()) == response


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": 2},
        {"include": [LOGPROBS], "top_logprobs": 2},
    ],
    ids=["whole", "truncated", "logprobs"],
)
def test_the_events_of_a_stream_add_up_to_the_whole_response(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    """The last event has the response that a request without a stream gets."""
    whole = client.responses.create(**{**BODY, **fields})
    with client.responses.create(**{**BODY, **fields}, stream=True) as stream:
        events = [*stream]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    last = events[-1]
    assert last.type == f"response.{'incomplete' if 'max_output_tokens' in fields else 'completed'}"
    assert without_ids(last.response.to_dict()) == without_ids(whole.to_dict())
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    for event in events:
        assert type(event).model_validate(event.to_dict()) == event


def without_ids(value: Any) -> Any:
    """Return a body without IDs and times."""
    if isinstance(value, list):
        return [*map(without_ids, value)]
    if not isinstance(value, dict):
        return value
    kept = value.keys() - {"id", "call_id", "created_at"}
    return {name: without_ids(value[name]) for name in kept}


def test_a_parsed_response_has_the_form_of_a_class(client: openai.OpenAI) -> None:
    """`responses.parse` sends a strict schema as `text.format`."""
    parsed = client.responses.parse(**BODY, text_format=Sum)
    assert isinstance(parsed.output_parsed, Sum)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "add"}])
def test_a_call_and_its_output_continue_a_conversation(client: openai.OpenAI, choice: Any) -> None:
    """Output items are input items of the next request, and a stream has the same call."""
    fields = {**BODY, "tools": [ADD], "tool_choice": choice, "max_output_tokens": 200}
    response = client.responses.create(**fields)
    [call] = response.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.name == "add"
    with client.responses.stream(**fields) as stream:
        final = stream.get_final_response()
    [streamed] = final.output
    assert isinstance(streamed, ResponseFunctionToolCall)
    assert (streamed.name, streamed.arguments) == (call.name, call.arguments)
    history = [
        {"role": "user", "content": BODY["input"]},
        *response.output,
        {"type": "function_call_output", "call_id": call.call_id, "output": "12"},
    ]
    answer = client.responses.create(**{**BODY, "input": history, "tools": [ADD]})
    assert answer.status == "completed"
    assert answer.output_text


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"conversation": "c"}, "conversation", "is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function'"),
        ({"store": "yes"}, "store", "must be a valid boolean"),
        ({"background": "yes"}, "background", "must be a valid boolean"),
        ({"max_tokens": 5}, "max_tokens", "use `max_output_tokens`"),
        ({"input": []}, "input", "must not be empty"),
        ({"input": [{"role": "user", "content": []}]}, "input.0.content", "must not be empty"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input", "must contain a message"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_video", "data": "f"}]}]},
            "input.0.content.0.type",
            "must be 'input_text', 'input_image', 'input_file' or 'input_audio'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input.0.content.0.file_id",
            "",
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "text.format.schema",
            "",
        ),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "must be"),
        ({"input": "word " * 5000}, "input", "tokens"),
    ],
)
def test_an_invalid_request_is_refused_by_the_name_of_its_field(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    """Errors of the chat have the names of the response's parameters."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", body={**BODY, **fields}, cast_to=object)
    assert caught.value.param == param
    assert message in caught.value.message
    assert "messages" not in caught.value.message


def test_a_background_response_is_polled_continued_and_deleted(client: openai.OpenAI) -> None:
    """It is the response of a plain request; an unknown one is a 404 with advice."""
    plain = client.responses.create(**BODY)
    response = client.responses.create(**BODY, background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    while response.status in {"queued", "in_progress"}:
        response = client.responses.retrieve(response.id)
    assert (response.status, response.output_text) == ("completed", plain.output_text)
    assert client.responses.cancel(response.id) == response
    items = client.responses.input_items.list(response.id)
    [item] = [dict[str, Any](item.to_dict()) for item in items]
    assert (item["type"], item["content"][0]["text"]) == ("message", BODY["input"])
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError, match="store: true"):
        client.responses.retrieve(response.id)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stored_response_is_continued_by_its_id(client: openai.OpenAI, *, stream: bool) -> None:
    """The next request has the same prompt as one that sends the whole conversation."""
    if stream:
        *_, last = client.responses.create(**BODY, store=True, stream=True)
        assert last.type == "response.completed"
        first = last.response
    else:
        first = client.responses.create(**BODY, store=True)
    again = {**BODY, "input": "And 7 plus 6?"}
    continued = client.responses.create(**again, previous_response_id=first.id)
    turns = [BODY["input"], first.output_text, again["input"]]
    roles = ("user", "assistant", "user")
    history: Any = [
        {"role": role, "content": text} for role, text in zip(roles, turns, strict=True)
    ]
    whole = client.responses.create(**{**BODY, "input": history})
    assert continued.previous_response_id == first.id
    assert continued.output_text == whole.output_text
    assert continued.usage == whole.usage


def test_an_earlier_item_may_be_sent_by_its_id(client: openai.OpenAI) -> None:
    """Stored or not; the AI SDK sends IDs unless `store` is false."""
    again = {"role": "user", "content": "And 7 plus 6?"}
    for fields in ({}, {"store": True}, {"stream": True}, {"store": False}):
        answer = client.responses.create(**{**BODY, **fields})
        first = [*answer][-1].response if "stream" in fields else answer
        [item] = first.output
        user = {"role": "user", "content": BODY["input"]}
        whole = client.responses.create(**{**BODY, "input": [user, item.to_dict(), again]})
        reference = {"type": "item_reference", "id": item.id}
        body = {**BODY, "input": [user, reference, again]}
        if fields.get("store") is False:
            with pytest.raises(openai.NotFoundError, match="Send the item itself"):
                client.responses.create(**body)
            continue
        named = client.responses.create(**body)
        assert (named.output_text, named.usage) == (whole.output_text, whole.usage)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "custom", "name": "code"},
        {
            "type": "custom",
            "name": "code",
            "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]{2}"},
        },
    ],
    ids=["text", "regex"],
)
def test_a_custom_tool_is_called_with_a_text(client: openai.OpenAI, tool: Any) -> None:
    """The call and its output continue the conversation."""
    choice: Any = {"type": "custom", "name": "code"}
    fields = {**BODY, "tools": [tool], "tool_choice": choice, "max_output_tokens": 300}
    response = client.responses.create(**fields)
    [call] = response.output
    assert isinstance(call, ResponseCustomToolCall)
    if "format" in tool:
        assert re.fullmatch("[0-9]{2}", call.input)
    with client.responses.stream(**fields) as stream:
        [streamed] = stream.get_final_response().output
    assert isinstance(streamed, ResponseCustomToolCall)
    assert streamed.input == call.input
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "12"}
    history: Any = [{"role": "user", "content": BODY["input"]}, call.to_dict(), output]
    answer = client.responses.create(**{**BODY, "input": history, "tools": [tool]})
    assert answer.status == "completed"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"background": True, "store": False}, "store", "remove `store: false`"),
        ({"background": True, "stream": True}, "stream", "poll the response"),
        ({"background": True, "input": []}, "input", "must not be empty"),
        ({"previous_response_id": 5}, "previous_response_id", "must be a string"),
        ({"previous_response_id": "resp_no"}, "previous_response_id", "No such response"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id", "No such item: x"),
        ({"input": [{"type": "item_reference"}]}, "input.0.id", "No such item: None"),
    ],
)
def test_a_response_that_cannot_be_stored_or_continued_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], param: str, message: str
) -> None:
    """Nothing is stored or run."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/responses", body={**BODY, **fields}, cast_to=object)
    assert caught.value.param == param
    assert message in caught.value.message
