"""What answers are held to: calls that must come, arguments of a schema, and where it begins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.engine.endpoints.tool_models import (
    DEEPSEEK,
    GPT_OSS,
    HERMES,
    PYTHONIC,
    QWEN3,
    R1,
    TEMPLATES,
    ToolScene,
)
from tests.engine.scripted_model import METADATA, Scene, text_model
from tidemill.engine.endpoints import text_endpoints
from tidemill.engine.parsers.parsed_output import parse_text
from tidemill.engine.parsers.registry import select_parsers

USER = {"role": "user", "content": "Weather?"}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now", "strict": True}}
NAMED = {"type": "function", "function": {"name": "now"}}
JSON = {"type": "json_object"}
PARIS = '{"city": "Paris"}'
CALLS = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
    "llama3_json": f'{{"name": "weather", "parameters": {PARIS}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}]',
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
        f"```json\n{PARIS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "gemma4": f"<|tool_call>call:weather{PARIS}<tool_call|>",
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{PARIS}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "minimax_m2": (
        f'<minimax:tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</minimax:tool_call>'
    ),
    "pythonic": f'[{{"name": "weather", "arguments": {PARIS}}}]',
    "openai": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.weather <|constrain|>json<|message|>{PARIS}"
    ),
}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


class Held:
    """A sequence of a request's constraint, to which texts are shown."""

    def __init__(self, scene: ToolScene, **fields: Any) -> None:
        body = {"messages": [USER], "tools": [WEATHER, NOW], **fields}
        prepared = scene.chats.prepare(body, METADATA)
        self.parser = prepared.context.parser
        self._constraint = prepared.requests[0].constraint
        self._scene = scene

    def takes(self, text: str) -> bool:
        """Say whether a model could write this text and end there."""
        return self.refused(text) == ""

    def refused(self, text: str) -> str | None:
        """Return what of a text cannot come; "" when all can, None when it cannot end there."""
        assert self._constraint is not None
        tokenizer, model = self._scene.tokenizer, self._scene.model
        watch = self._constraint.start_state()
        mask = np.zeros(-(-model.vocab_size // 32), np.uint32)
        ids = tokenizer.encode(text, add_special_tokens=False)
        for place, token_id in enumerate(ids):
            rest = tokenizer.text(ids[place:], skip_special_tokens=False)
            if watch.fill(mask) and not _allows(mask, token_id):
                return rest
            if watch.push(token_id):
                return tokenizer.text(ids[place + 1 :], skip_special_tokens=False)
        is_free = not watch.fill(mask)
        may_end = is_free or any(_allows(mask, end) for end in model.eos_token_ids)
        return "" if may_end else None


def _allows(mask: Any, token_id: int) -> bool:
    return bool((int(mask[token_id // 32]) >> (token_id % 32)) & 1)


def unmarked(template: str) -> ToolScene:
    """Return a scene of a model to which the marks of its form are texts like any other."""
    scene = ToolScene("x", template)
    scene.model = replace(text_model(chat_template=template), max_model_len=4_096)
    scene.tokenizer = scene.model.tokenizer
    scene.chats, *_ = text_endpoints(scene.model, seed=7, parsers=select_parsers(template))
    return scene


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_a_call_that_must_come_is_of_the_models_own_form(family: str) -> None:
    """Nothing else can be written, and what can is read as that call."""
    call = CALLS[family]
    held = Held(ToolScene("x", TEMPLATES[family]), tool_choice="required")
    assert held.takes(call)
    assert held.refused("Hi") == "Hi"
    assert held.refused(call.replace("Paris", 'Paris", "country": "x')) not in ("", None)
    answer = parse_text(held.parser.for_choice(0), call)
    assert [(said.name, said.arguments) for said in answer.calls] == [("weather", PARIS)]
    assert (answer.content, answer.warnings) == ("", ())


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_a_named_tool_alone_is_called(family: str) -> None:
    """The others are shown, and cannot be."""
    held = Held(ToolScene("x", TEMPLATES[family]), tool_choice=NAMED)
    refused = held.refused(CALLS[family])
    assert refused is not None
    assert refused.startswith("weather")
    bare = CALLS[family].replace("weather", "now").replace(PARIS, "{}")
    assert held.takes(bare)
    assert held.refused(bare.replace("{}", '{"a": 1}')) is not None


@pytest.mark.parametrize("scene", [ToolScene("x", HERMES), unmarked(HERMES)])
def test_so_many_calls_come_as_are_asked_for(scene: ToolScene) -> None:
    """Several, or one and no more."""
    twice = f"{CALLS['hermes']}\n{CALLS['hermes']}"
    assert Held(scene, tool_choice="required").takes(twice)
    single = Held(scene, tool_choice="required", parallel_tool_calls=False)
    assert single.takes(CALLS["hermes"])
    assert single.refused(twice) == "\n" + CALLS["hermes"]


@pytest.mark.parametrize(
    "scene",
    [
        *(ToolScene("x", template) for template in TEMPLATES.values()),
        unmarked(HERMES),
        unmarked(DEEPSEEK),
    ],
)
def test_a_strict_function_is_held_to_its_schema_wherever_it_is_called(scene: ToolScene) -> None:
    """With `auto` a text is free, and a call in it is not."""
    held = Held(scene)
    family = {template: name for name, template in TEMPLATES.items()}
    source = scene.model.chat_template
    assert source is not None
    call = CALLS[family[source.source_text]]
    assert held.takes(call)
    text = f"{THOUGHT}<|channel|>final<|message|>Hi there <" if "Hm." in call else "Hi there <"
    assert held.takes(text)
    assert held.refused(call.replace("weather", "sing")) not in ("", None)


def test_calls_may_stand_in_a_text() -> None:
    """What is written around them is free."""
    text = f"I look. {CALLS['hermes']}\nAnd again.\n{CALLS['hermes']} Done"
    for scene in (ToolScene("x", HERMES), unmarked(HERMES)):
        assert Held(scene).takes(text)


def test_nothing_is_held_where_nothing_is_asked_for() -> None:
    """Functions that are not strict leave an answer to the model."""
    scene = ToolScene("x", HERMES)
    body = {"messages": [USER], "tools": [WEATHER]}
    assert scene.chats.prepare(body, METADATA).requests[0].constraint is None


def test_a_call_or_a_schema_can_be_asked_for_together() -> None:
    """An answer is then either; calls that are JSON themselves cannot be told from it."""
    for family in ("hermes", "mistral", "deepseek_v3", "openai"):
        held = Held(ToolScene("x", TEMPLATES[family]), response_format=JSON)
        answer = '{"a": [1]}'
        if family == "openai":
            answer = f"{THOUGHT}<|channel|>final<|message|>{answer}"
        assert held.takes(CALLS[family])
        assert held.takes(answer)
        assert held.refused("Hi") == "Hi"
    choice = Held(ToolScene("x", HERMES), guided_choice=["yes", "no"])
    assert choice.takes("yes")
    assert choice.takes(CALLS["hermes"])
    assert not choice.takes("maybe")
    for template, fields, param in (
        (PYTHONIC, {"response_format": JSON}, "response_format"),
        (HERMES, {"regex": "a+"}, "regex"),
    ):
        fault = ToolScene("x", template).chat_fault(tools=[WEATHER], **fields)
        assert fault.param == param
        assert "tool_choice" in fault.message
    # Where a call must come there is no content that could follow it.
    must = Held(ToolScene("x", HERMES), regex="a+", tool_choice="required")
    assert must.takes(CALLS["hermes"])


def test_what_is_thought_before_is_free() -> None:
    """A prompt that opens the thinking, one that leaves it to the model, one that has closed it."""
    call = CALLS["hermes"]
    opened = Held(ToolScene("x", R1), tool_choice="required")
    assert opened.takes(f"Hm, weather(.</think>{call}")
    assert not opened.takes(call)
    assert not opened.takes("Hm.</think>Hi")
    left = Held(ToolScene("x", QWEN3), tool_choice="required")
    assert left.takes(f"<think>Hm.</think>{call}")
    assert left.takes(call)
    assert left.refused("Hi") == "Hi"
    assert not left.takes("<think>Hm.")
    closed = Held(ToolScene("x", QWEN3), tool_choice="required", reasoning_effort="none")
    assert closed.takes(call)
    assert closed.refused(f"<think>Hm.</think>{call}") is not None
    schema = Held(ToolScene("x", QWEN3), tools=None, response_format=JSON)
    assert schema.takes('<think>Hm.</think>{"a": 1}')
    assert schema.takes('{"a": 1}')
    assert not schema.takes("<think>Hm.</think>Hi")


def test_a_schema_holds_the_final_channel() -> None:
    """Other channels are free."""
    held = Held(ToolScene("x", GPT_OSS), tools=None, response_format=JSON)
    assert held.takes(f'{THOUGHT}<|channel|>final<|message|>{{"a": 1}}')
    assert held.refused(f"{THOUGHT}<|channel|>final<|message|>Hi") == "Hi"


def test_a_model_of_no_known_form_can_be_made_to_call() -> None:
    """It writes a list of JSON, which is read."""
    scene = ToolScene("x", HERMES, tool_calls="none")
    held = Held(scene, tool_choice="required")
    assert held.takes(CALLS["pythonic"])
    [call] = parse_text(held.parser.for_choice(0), CALLS["pythonic"]).calls
    assert (call.name, call.arguments) == ("weather", PARIS)


def test_a_schema_that_cannot_be_held_to_is_refused_where_it_is_strict() -> None:
    """The error names the tool, the keyword and its place; any object will do where it is not."""
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    tools = [WEATHER, {"type": "function", "function": function}]
    fault = Scene().chat_fault(tools=tools)
    assert fault.param == "tools.1.function.parameters"
    assert "/properties/a/not" in fault.message
    function["strict"] = False
    held = Held(ToolScene("x", HERMES), tools=tools, tool_choice="required")
    assert held.takes('<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>')


def test_a_format_that_is_not_enforced_is_named_in_each_answer() -> None:
    """Chats and text completions name it as a warning, the only field that they add."""
    enforced, noted = ({"type": "string", "format": name} for name in ("uuid", "regex"))
    scene = Scene("x")
    for answer in (scene.chat, scene.complete):
        [choice], [quiet] = (answer(guided_json=one)["choices"] for one in (noted, enforced))
        assert [warning.partition(" is ")[0] for warning in choice.pop("warnings")] == [
            "`/format` of `guided_json`"
        ]
        assert choice.keys() == quiet.keys()


def test_tools_too_large_to_be_held_to_are_refused() -> None:
    """Their schemas are bounded together."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x" * 600_000]}}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}} for name in "ab"
    ]
    scene = ToolScene("x", HERMES)
    scene.model = replace(scene.model, max_model_len=10**7)
    scene.chats, *_ = text_endpoints(scene.model, seed=7, parsers=select_parsers(HERMES))
    fault = scene.chat_fault(tools=tools, tool_choice="required")
    assert fault.param == "tools"
    assert "1,048,576" in fault.message


def test_thinking_ends_where_its_budget_does() -> None:
    """Then its end mark must come; what follows is free again, or held to what was asked for."""
    opened = Held(ToolScene("x", R1), tools=None, thinking_token_budget=3)
    assert opened.takes("abc</think>Hi")
    assert opened.takes("a</think>Hi, and more than three")
    assert opened.refused("abcd</think>Hi") == "d</think>Hi"
    assert Held(ToolScene("x", R1), tools=None, thinking_token_budget=0).refused("a") == "a"
    left = Held(ToolScene("x", QWEN3), tools=None, thinking_token_budget=3)
    assert left.takes("<think>abc</think>Hi")
    assert left.refused("<think>abcd</think>Hi") == "d</think>Hi"
    assert left.takes("Hi, and more than three")
    both = Held(ToolScene("x", R1), tool_choice="required", thinking_token_budget=3)
    assert both.takes(f"abc</think>{CALLS['hermes']}")
    assert both.refused(f"abcd</think>{CALLS['hermes']}") == f"d</think>{CALLS['hermes']}"


def test_an_end_of_several_tokens_comes_whole() -> None:
    """A vocabulary without the mark writes it by letters."""
    held = Held(unmarked(R1), tools=None, thinking_token_budget=2)
    assert held.takes("ab</think>Hi")
    assert held.refused("ab</thinx") == "x"


def test_a_budget_is_of_models_that_think() -> None:
    """Where thinking is switched off there is nothing to bound."""
    fault = ToolScene("x", HERMES).chat_fault(thinking_token_budget=3)
    assert fault.param == "thinking_token_budget"
    assert ToolScene("x", QWEN3).chat_fault(thinking_token_budget=-2).param == fault.param
    body = {"messages": [USER], "thinking_token_budget": 3, "reasoning_effort": "none"}
    assert ToolScene("x", QWEN3).chats.prepare(body, METADATA).requests[0].constraint is None
