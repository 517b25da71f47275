"""Tools and thinking from body to body: templates of each family, a generator with a script."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.engine.endpoints.tool_models import (
    DEEPSEEK,
    GPT_OSS,
    HERMES,
    MISTRAL,
    QWEN3,
    R1,
    SEED,
    TEMPLATES,
    WEATHER,
    ToolScene,
)
from tests.engine.scripted_model import TEMPLATE, Scene
from tidemill.engine.parsers.tool_calls import INCOMPLETE, UNREAD
from tidemill.protocol.contract import Reply, StreamedReply
from tidemill.protocol.vendors.anthropic_answers import message_of_chat

PARIS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'
CALLS = {
    "hermes": CALL,
    "llama3_json": f'{{"name": "weather", "parameters": {PARIS}}}',
    "mistral": f"[TOOL_CALLS]weather[ARGS]{PARIS}",
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{PARIS}\n```<｜tool▁call▁end｜>"
    ),
    "gemma4": '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>',
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    ),
    "pythonic": "[weather(city='Paris')]",
    "openai": f"<|channel|>commentary to=functions.weather<|message|>{PARIS}<|call|>",
}
HARMONY = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALLS['openai']}"
USER = {"role": "user", "content": "Weather?"}
CHATS = "/v1/chat/completions"


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_a_call_is_a_message_in_openais_format(family: str) -> None:
    """The template identifies the model's format; its marks are special tokens, but visible."""
    scene = ToolScene(CALLS[family], TEMPLATES[family])
    body = scene.chat(tools=[WEATHER])
    [choice] = ChatCompletion.model_validate(body).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    [call] = choice.message.tool_calls or []
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == (
        "weather",
        {"city": "Paris"},
    )
    assert "warnings" not in body["choices"][0]


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_turns_of_tools_reach_the_template(family: str) -> None:
    """The calls of a reply are sent back unchanged, with their results, and rendered."""
    scene = ToolScene(CALLS[family], TEMPLATES[family])
    message = scene.choice()["message"]
    [call] = message["tool_calls"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}
    prompt = scene.prompt(messages=[USER, message, result], tools=[WEATHER])
    assert 'TOOL {"type": "function", "function": {"name": "weather", "description"' in prompt
    assert '{"city": "Paris"}' in prompt
    assert "Sunny." in prompt


def test_foreign_ids_become_short_if_a_template_requires_it() -> None:
    """A call and its result still have the same id."""
    scene = ToolScene("x", MISTRAL)
    call = {"id": "call_abcdef", "type": "function"}
    call["function"] = {"name": "weather", "arguments": PARIS}
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_abcdef", "content": "Sunny."},
    ]
    prompt = scene.prompt(messages=[USER, *turns], tools=[WEATHER])
    short = prompt.split('"id": "')[1].split('"')[0]
    assert len(short) == 9
    assert f"[{short}]Sunny." in prompt
    call["id"] = turns[1]["tool_call_id"] = "abc123XYZ"
    assert "[abc123XYZ]Sunny." in scene.prompt(messages=[USER, *turns], tools=[WEATHER])


def test_tools_are_rendered_only_if_they_may_be_called() -> None:
    """With `none` the prompt is that of a request without tools, and calls are text."""
    scene = ToolScene(CALL)
    without = scene.prompt(messages=[USER])
    assert scene.prompt(messages=[USER], tools=[WEATHER], tool_choice="none") == without
    assert scene.prompt(messages=[USER], tools=[WEATHER]) != without
    choice = scene.choice(tool_choice="none", skip_special_tokens=False)
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_has_the_beginning_of_its_arguments() -> None:
    """The row has a warning in addition to the finish reason `length`, as in a stream."""
    scene = ToolScene(CALL)
    num_tokens = len(scene.generator.token_ids)
    choice = scene.choice(max_tokens=num_tokens - 8)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "'
    assert choice["warnings"] == [INCOMPLETE]
    choice = scene.choice(max_tokens=num_tokens - 20)
    assert "tool_calls" not in choice["message"]
    assert choice["warnings"] == [UNREAD]


@pytest.mark.parametrize("family", ["llama3_json", "pythonic"])
def test_an_answer_in_json_is_not_a_call(family: str) -> None:
    """It has a name and calls have no mark, but there is no warning."""
    answer = '{"name": "Maria", "age": 34}'
    choice = ToolScene(answer, TEMPLATES[family]).choice()
    assert choice["message"]["content"] == answer
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    assert "warnings" not in choice


def test_a_strict_function_is_called_only_as_its_grammar_allows() -> None:
    """In a text its arguments would not follow a schema."""
    answer = f"I look. {CALLS['llama3_json']}"
    scene = ToolScene(answer, TEMPLATES["llama3_json"])
    assert scene.choice()["finish_reason"] == "tool_calls"
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    assert scene.choice(tools=[strict])["message"]["content"] == answer


def test_arguments_between_tags_have_the_types_of_their_schema() -> None:
    """An example is an optional integer in pydantic's schema."""
    days = {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None}
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"days": days}}}
    scene = ToolScene(
        "<tool_call><function=weather><parameter=days>\n5\n</parameter></function></tool_call>"
    )
    [call] = scene.choice(tools=[{"type": "function", "function": function}])["message"][
        "tool_calls"
    ]
    assert json.loads(call["function"]["arguments"]) == {"days": 5}


def test_each_choice_has_its_own_calls() -> None:
    """Ids differ from choice to choice, and are the same in every run of the row."""
    scene = ToolScene(CALL)
    first, again = (scene.chat(tools=[WEATHER], n=2) for _ in range(2))
    assert first == again
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in first["choices"]]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("template", "answer", "fields", "reasoning"),
    [
        (QWEN3, "<think>\nHm.\n</think>\n\nYes.", {}, "Hm."),
        (QWEN3, "Yes.", {"chat_template_kwargs": {"enable_thinking": False}}, None),
        (QWEN3, "Yes.", {"reasoning_effort": "none"}, None),
        (SEED, "Yes.", {"reasoning_effort": "none"}, None),
        (SEED, "Hm.</seed:think>Yes.", {}, "Hm."),
        (R1, "Hm.\n</think>\n\nYes.", {}, "Hm."),
        (R1, "<think>\nHm.\n</think>\n\nYes.", {}, "Hm."),
        (
            GPT_OSS,
            ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
            "Yes.<|return|>"),
            {},
            "Hm.",
        ),
    ],
)  # fmt: skip
def test_thinking_is_shown_apart_and_counted(
    template: str, answer: str, fields: dict[str, Any], reasoning: str | None
) -> None:
    """`reasoning` contains it, and so does its old name; usage counts its tokens and marks."""
    scene = ToolScene(answer, template)
    reply = scene.reply(scene.chats, {"messages": [USER], **fields})
    [choice] = reply.body["choices"]
    assert choice["message"]["content"] == "Yes."
    assert choice["message"]["reasoning"] == reasoning
    assert choice["message"]["reasoning_content"] == reasoning
    counted = reply.body["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert counted == reply.usage.reasoning_tokens
    after = scene.tokenizer.encode(answer.partition("</think>")[2], add_special_tokens=False)
    if "</think>" in answer:
        assert counted == len(scene.generator.token_ids) - len(after) - 1
    else:
        assert (counted > 0) == (reasoning is not None)


def test_unfinished_thinking_is_not_an_answer() -> None:
    """All tokens are counted as thinking, and content is null."""
    scene = ToolScene("Hm, let me see", R1)
    body = scene.chat(max_tokens=5)
    [choice] = body["choices"]
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"]
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_thinking_may_be_left_out_or_left_in() -> None:
    """`include_reasoning` false drops it; SGLang's `separate_reasoning` false leaves it there."""
    scene = ToolScene("Hm.</think>Yes.", R1)
    answer = {"role": "assistant", "refusal": None, "reasoning": None}
    dropped = scene.choice(include_reasoning=False)["message"]
    assert dropped == {**answer, "content": "Yes."}
    whole = scene.choice(separate_reasoning=False)["message"]
    assert whole == {**answer, "content": "Hm.</think>Yes."}


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_thinking_is_in_the_configured_field(name: str) -> None:
    """The other field is left out, also of streams; responses and messages have it as before."""
    scene = ToolScene("Hm.</think>Yes.", R1, reasoning_field=name)
    message = scene.choice()["message"]
    assert message == {"role": "assistant", "content": "Yes.", "refusal": None, name: "Hm."}
    await assert_streamed_as_whole(scene)
    assert scene.choice(include_reasoning=False)["message"][name] is None
    response = await scene.served.answer("/v1/responses", {"input": "Hi"}, "req_1", 0)
    assert isinstance(response, Reply)
    assert [item["type"] for item in response.body["output"]] == ["reasoning", "message"]
    chat = {
        "choices": [{"message": message, "finish_reason": "stop"}],
        "usage": {},
        "id": "chatcmpl-1",
    }
    content = message_of_chat({**chat, "model": "m"})["content"]
    assert content[0] == {"type": "thinking", "thinking": "Hm.", "signature": ""}


def test_a_message_with_thinking_round_trips() -> None:
    """Clients append the message unchanged; truncated thinking has no content."""
    template = "{% for m in messages %}[{{ m.reasoning }}|{{ m.content }}]{% endfor %}<think>"
    scene = ToolScene("Hm.</think>Yes.", template, reasoning="qwen3")
    for max_tokens, shown in ((None, "[Hm.|Yes.]"), (4, "|]")):
        message = scene.choice(max_tokens=max_tokens, tools=[])["message"]
        assert message["reasoning"]
        assert shown in scene.prompt(messages=[message, USER])


def test_an_answer_may_continue_inside_its_thinking() -> None:
    """The last message decides whether it has ended, not the template."""
    turn = {"role": "assistant", "content": "<think>So far"}
    scene = ToolScene(" so good.</think>Yes.", HERMES, reasoning="qwen3")
    fields = {"messages": [USER, turn], "continue_final_message": True}
    body = scene.reply(scene.chats, fields).body
    assert body["choices"][0]["message"]["reasoning"] == "so good."
    turn["content"] = "<think>Hm.</think>So far"
    body = scene.reply(scene.chats, fields).body
    assert body["choices"][0]["message"]["reasoning"] is None


def test_a_call_follows_the_thinking() -> None:
    """Both are separated from the content between them."""
    message = ToolScene(f"Hm.</think>\n\nI look.\n{CALL}", R1).choice()["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["content"] == "I look."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


def test_a_configured_format_overrides_the_template() -> None:
    """`none` parses nothing; another format uses its own marks."""
    assert ToolScene(CALL, tool_calls="none", reasoning="none").choice(tools=[])["message"] == {
        "role": "assistant",
        "content": CALL.replace("<tool_call>", "").replace("</tool_call>", ""),
        "refusal": None,
        "reasoning": None,
    }
    message = ToolScene(CALLS["pythonic"], tool_calls="pythonic").choice()["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == PARIS


def test_a_stop_string_inside_a_call_ends_it_there() -> None:
    """Stop strings are searched in the whole output, including marks."""
    choice = ToolScene(CALL).choice(stop="Paris")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Paris")
    assert choice["warnings"] == [INCOMPLETE]
    choice = ToolScene(CALL).choice(stop="</tool_call>")
    assert choice["finish_reason"] == "tool_calls"


async def test_a_stream_that_stops_inside_a_call_ends_as_the_answer() -> None:
    """So does one with a complete call before it, and one whose invalid call has ended."""
    for answer, reason in ((CALL, "stop"), (f"{CALL}{CALL.replace('Paris', 'Rome')}", "stop")):
        stop = "Rome" if "Rome" in answer else "Paris"
        assert ToolScene(answer).choice(stop=stop)["finish_reason"] == reason
        await assert_streamed_as_whole(ToolScene(answer), stop=stop)
    invalid = CALL.replace('"Paris"', "Paris")
    assert ToolScene(invalid).choice()["finish_reason"] == "tool_calls"
    await assert_streamed_as_whole(ToolScene(invalid))


def test_tools_that_the_template_ignores_are_rejected() -> None:
    """A template without tools would silently omit them."""
    fault = Scene().chat_fault(tools=[WEATHER])
    assert (fault.param, fault.code) == ("tools", "tools_not_supported")
    assert "--chat-template" in fault.message
    fault = ToolScene("x", TEMPLATE + "{{ tools }}").chat_fault(tools=[WEATHER])
    assert (fault.param, fault.code) == ("tools", "tools_not_supported")
    assert "--tool-call-parser" in fault.message


@pytest.mark.parametrize("arguments", [PARIS, PARIS[:-3]])
def test_arguments_are_a_text_where_a_template_joins_them(arguments: str) -> None:
    """DeepSeek's template does; printing an object would show Python's quotes."""
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turns = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    prompt = ToolScene("x", DEEPSEEK).prompt(messages=turns, tools=[WEATHER])
    assert f"weather\n```json\n{arguments}\n```" in prompt
    if arguments != PARIS:
        prompt = ToolScene("x", HERMES).prompt(messages=turns, tools=[WEATHER])
        assert f'"arguments": {json.dumps(arguments)}}}' in prompt


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (R1, f"Hm.\n</think>\n\nI look.\n{CALL}"),
        (R1, "Hm.</think><tool_call>{"),
        (GPT_OSS, HARMONY),
        (HERMES, CALL),
        (HERMES, "No."),
        (R1, "Hm."),
        (R1, "</think>"),
    ],
)
async def test_a_stream_equals_the_complete_answer(template: str, answer: str) -> None:
    """It covers thinking, content, calls, warnings, the finish reason and reasoning tokens."""
    await assert_streamed_as_whole(ToolScene(answer, template))


async def test_arguments_of_a_forced_call_arrive_token_by_token() -> None:
    """So do those of a free one; the first delta has the name."""
    for choice in ("required", "auto"):
        scene = ToolScene(CALL)
        body = {"messages": [USER], "tools": [WEATHER], "tool_choice": choice, "stream": True}
        streamed = await scene.served.answer(CHATS, body, "req_1", 0)
        assert isinstance(streamed, StreamedReply)
        deltas = [chunk["choices"][0]["delta"] async for chunk in streamed.chunks]
        first, *rest = [delta["tool_calls"][0] for delta in deltas if delta.get("tool_calls")]
        assert first["function"]["name"] == "weather"
        assert len(rest) == len(scene.model.tokenizer.encode(PARIS, add_special_tokens=False)) - 1


async def test_a_stream_without_its_thinking_equals_the_answer_too() -> None:
    """A stream without output ends with empty content instead of null."""
    for answer in ("Hm.", "Hm.</think>Yes."):
        await assert_streamed_as_whole(ToolScene(answer, R1), include_reasoning=False)


async def test_a_stream_names_formats_that_are_not_enforced() -> None:
    """The warning comes once, with the last chunk of the choice."""
    schema = {"type": "string", "format": "regex"}
    await assert_streamed_as_whole(ToolScene("x", HERMES), tools=[], guided_json=schema)


async def assert_streamed_as_whole(scene: ToolScene, **fields: Any) -> None:
    """Compare the merged deltas of an answer with the complete answer."""
    body = {"messages": [USER], "tools": [WEATHER], "n": 2, **fields}
    whole = await scene.served.answer(CHATS, body, "req_1", 0)
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await scene.served.answer(CHATS, body | stream, "req_1", 0)
    assert isinstance(whole, Reply)
    assert isinstance(streamed, StreamedReply)
    chunks = [chunk async for chunk in streamed.chunks]
    assert chunks[-1]["usage"] == whole.body["usage"]
    for choice in whole.body["choices"]:
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        deltas = [one["delta"] for one in own]
        message = choice["message"]
        contents = [d["content"] for d in deltas if d.get("content") is not None]
        assert ("".join(contents) if contents else None) == message["content"]
        for name in ("reasoning", "reasoning_content"):
            thought = "".join(d.get(name, "") for d in deltas)
            assert (thought or None) == message.get(name)
        calls: list[dict[str, Any]] = []
        for call in [call for d in deltas for call in d.get("tool_calls", [])]:
            if call.pop("index") == len(calls):
                calls.append(call)
            else:
                assert call.keys() == {"function"}
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        assert calls == message.get("tool_calls", [])
        assert own[-1]["finish_reason"] == choice["finish_reason"]
        warnings = [words for one in own for words in one.get("warnings", [])]
        assert warnings == choice.get("warnings", [])
