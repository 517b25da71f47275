"""Responses: a stream and a whole response have the same items, in the order of the output."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.endpoints.tool_models import GPT_OSS, HERMES, QWEN3, WEATHER, ToolScene
from tests.engine.scripted_model import CREATED
from tidemill.engine.endpoints import text_endpoints
from tidemill.engine.parsers.tool_calls import UNREAD
from tidemill.protocol.contract import Reply, StreamedReply
from tidemill.protocol.responses.request import LOGPROBS

URL = "/v1/responses"
PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
HARMONY_CALL = f"<|start|>assistant<|channel|>commentary to=functions.weather<|message|>{PARIS}"
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|>"
    f"{HARMONY_CALL}<|call|><|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Sunny."
)
FUNCTION: Any = WEATHER["function"]
TOOL = {"type": "function", **FUNCTION}
Body = dict[str, Any]


async def whole_and_events(scene: ToolScene, **fields: Any) -> tuple[Body, list[Body]]:
    """Return the whole response to a request, and the events of its stream."""
    body = {"input": "Weather?", "tools": [TOOL], **fields}
    whole = await scene.served.answer(URL, body, "req_1", CREATED)
    assert isinstance(whole, Reply)
    assert whole.status_code == 200, whole.body
    stream = await scene.served.answer(URL, body | {"stream": True}, "req_1", CREATED)
    assert isinstance(stream, StreamedReply)
    return whole.body, [event async for event in stream.chunks]


def shown(item: Body) -> tuple[str, str]:
    """Return the kind of an item, and its text or arguments."""
    if "arguments" in item:
        return item["type"], item["arguments"]
    [part] = item["content"]
    return item["type"], part["text"]


@pytest.mark.parametrize(
    ("template", "answer", "items"),
    [
        (HERMES, "Sunny.", [("message", "Sunny.")]),
        (HERMES, "", [("message", "")]),
        (HERMES, CALL, [("function_call", PARIS)]),
        (
            HERMES,
            f"I look. {CALL} Done.",
            [("message", "I look."), ("function_call", PARIS), ("message", "Done.")],
        ),
        (
            QWEN3,
            f"<think>\nHm.\n</think>\n\nI look. {CALL}",
            [("reasoning", "Hm."), ("message", "I look."), ("function_call", PARIS)],
        ),
        (
            GPT_OSS,
            HARMONY,
            [
                *(("reasoning", "Hm."), ("function_call", PARIS)),
                *(("reasoning", "More."), ("message", "Sunny.")),
            ],
        ),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"include": [LOGPROBS]}], ids=["text", "logprobs"])
async def test_the_events_of_a_stream_add_up_to_the_whole_response(
    template: str, answer: str, items: list[tuple[str, str]], fields: Body
) -> None:
    """Items have the order of the output, and deltas have all text and log-probabilities."""
    whole, events = await whole_and_events(ToolScene(answer, template), **fields)
    assert [*map(shown, whole["output"])] == items
    assert events[-1]["response"] == whole
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]
    for place, item in enumerate(whole["output"]):
        own = [event for event in events if event.get("output_index") == place]
        deltas = [event for event in own if event["type"].endswith(".delta")]
        assert "".join(event["delta"] for event in deltas) == shown(item)[1]
        if item["type"] == "message":
            logprobs = item["content"][0]["logprobs"]
            assert [each for event in deltas for each in event["logprobs"]] == logprobs
            tokens = "".join(each["token"] for each in logprobs)
            assert tokens.strip() == (shown(item)[1] if fields else "")
            [added] = [event for event in own if event["type"] == "response.content_part.added"]
            assert (added["part"]["text"], added["part"]["logprobs"]) == ("", [])


async def test_a_truncated_response_has_a_warning_and_an_incomplete_item() -> None:
    """A call that is cut off stays text, as in a chat."""
    scene = ToolScene(CALL)
    size = len(scene.generator.token_ids) - 20
    whole, events = await whole_and_events(scene, max_output_tokens=size)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"] == whole
    assert whole["warnings"] == [UNREAD]
    [item] = whole["output"]
    assert item["status"] == "incomplete"
    assert shown(item)[1].startswith("<tool_call>")


def test_a_verified_response_has_its_verdict() -> None:
    """`--proof-rows` adds the verdict of the chat."""
    scene = ToolScene('{"a": 1}')
    *_, responses = text_endpoints(scene.model, seed=7, verifies=True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    body = scene.reply(responses, {"input": "Hi", "text": text}).body
    [verdict] = body["tidemill"]["proof"]
    assert verdict["holds"] is True
