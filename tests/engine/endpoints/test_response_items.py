"""Responses: a stream and a whole response have the same items, in the order of the output."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.endpoints.tool_models import GPT_OSS, HERMES, QWEN3, WEATHER, ToolScene
from tests.engine.scripted_model import METADATA, Finished
from tidemill.engine.endpoints import text_endpoints
from tidemill.engine.endpoints.responses import Responses
from tidemill.engine.loop.core import StepOutput
from tidemill.engine.parsers.registry import select_parsers
from tidemill.engine.parsers.tool_calls import INCOMPLETE
from tidemill.engine.scheduling.token_logprobs import NO_LOGPROBS
from tidemill.protocol.responses.request import LOGPROBS
from tidemill.protocol.stream import StreamOptions

PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
HARMONY_CALL = f"<|start|>assistant<|channel|>commentary to=functions.weather<|message|>{PARIS}"
HARMONY = (
    "<|channel|>analysis<|message|>Hm.<|end|>"
    f"{HARMONY_CALL}<|call|><|start|>assistant<|channel|>analysis<|message|>More.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Sunny."
)
FUNCTION: Any = WEATHER["function"]
HARMONY_PARTS = [
    *("<|channel|>analysis<|message|>", "<|channel|>final<|message|>", "<|start|>assistant"),
    *("<|channel|>commentary to=functions.weather<|message|>", PARIS, "<|call|>", "<|end|>"),
    *("Hm.", "🙂", "\n"),
]
LISTED = st.just([LOGPROBS])
TOOL = {"type": "function", **FUNCTION}
Body = dict[str, Any]


def whole_and_events(
    template: str, answer: str, fields: Body, sizes: Sequence[int] = (1,)
) -> tuple[Body, list[Body]]:
    """Return the whole response, and the events of a stream in pieces of these sizes."""
    scene = ToolScene(answer, template)
    responses = text_endpoints(scene.model, seed=7, parsers=select_parsers(template))[-1]
    assert isinstance(responses, Responses)
    prepared = responses.prepare({"input": "Weather?", "tools": [TOOL], **fields}, METADATA)
    [result] = scene.generator.results(prepared.requests)
    stream, events, start = responses.stream(prepared, StreamOptions()), list[Body](), 0
    for size in cycle(sizes):
        end = min(start + size, len(result.token_ids))
        is_last = end == len(result.token_ids)
        logprobs = (result.logprobs or NO_LOGPROBS).part(start, end)
        tokens = result.token_ids[start:end]
        output = StepOutput(Finished(result), tokens, is_last, logprobs, NO_LOGPROBS)
        events += stream.add(0, output, result if is_last else None)
        start = end
        if is_last:
            break
    return responses.finish(prepared, [result]).body, [*events, *stream.end()]


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
def test_the_events_of_a_stream_add_up_to_the_whole_response(
    template: str, answer: str, items: list[tuple[str, str]], fields: Body
) -> None:
    """Items have the order of the output, and deltas have all text and log-probabilities."""
    whole, events = whole_and_events(template, answer, fields)
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


@given(
    st.lists(st.sampled_from(HARMONY_PARTS), max_size=9),
    st.lists(st.integers(1, 5), min_size=1),
    st.fixed_dictionaries({"max_output_tokens": st.integers(1, 60)}, optional={"include": LISTED}),
)
def test_a_stream_in_pieces_of_any_size_has_the_whole_response(
    parts: list[str], sizes: list[int], fields: Body
) -> None:
    """Truncated and malformed outputs give the same response, too."""
    whole, events = whole_and_events(GPT_OSS, "".join(parts), fields, sizes)
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[-1]["response"] == whole


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"input": "a\\n\\"b\\""}', 'a\n"b"'),
        ('{"city": 5}', '{"city": 5}'),
        ('{"input": "\\ud800"}', "\ufffd"),
    ],
    ids=["text", "others", "surrogate"],
)
def test_a_call_of_a_custom_tool_has_its_input(written: str, text: str) -> None:
    """Other arguments are the input themselves; half a surrogate pair is replaced."""
    tools = [{"type": "custom", "name": "weather"}]
    whole, events = whole_and_events(HERMES, CALL.replace(PARIS, written), {"tools": tools})
    [item] = whole["output"]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "weather", text)
    assert events[-1]["response"] == whole
    named = {event["type"].removeprefix("response."): event for event in events}
    assert named["custom_tool_call_input.delta"]["delta"] == text
    assert named["custom_tool_call_input.done"]["input"] == text
    assert named["output_item.added"]["item"]["input"] == ""


def test_a_truncated_response_has_a_warning_and_an_incomplete_item() -> None:
    """The call has the beginning of its arguments, as in a chat."""
    size = len(ToolScene(CALL).generator.token_ids) - 8
    whole, events = whole_and_events(HERMES, CALL, {"max_output_tokens": size})
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"] == whole
    assert whole["warnings"] == [INCOMPLETE]
    [item] = whole["output"]
    assert item["status"] == "incomplete"
    assert shown(item) == ("function_call", '{"city": "')


def test_a_verified_response_has_its_verdict() -> None:
    """`--proof-rows` adds the verdict of the chat."""
    scene = ToolScene('{"a": 1}')
    *_, responses = text_endpoints(scene.model, seed=7, verifies=True)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    body = scene.reply(responses, {"input": "Hi", "text": text}).body
    [verdict] = body["tidemill"]["proof"]
    assert verdict["holds"] is True
