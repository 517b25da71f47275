"""Constraints of answers: forced calls, arguments under a schema, and where a schema begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
SPACE = "]<]minimax[>["
# Formats that are selected by name here.
NAMED_CALLS = {
    "apertus": f'<|tools_prefix|>[{{"weather": {PARIS}}}]<|tools_suffix|>',
    "functiongemma": f"<start_function_call>call:weather{PARIS}<end_function_call>",
    "internlm": (
        f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {PARIS}}}<|action_end|>'
    ),
    "lfm2": (f'<|tool_call_start|>[{{"name": "weather", "arguments": {PARIS}}}]<|tool_call_end|>'),
    "longcat": (
        f'<longcat_tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</longcat_tool_call>'
    ),
    "minimax_m3": (
        f'{SPACE}<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n{SPACE}</tool_call>'
    ),
    "phi4_mini_json": f'functools[{{"name": "weather", "arguments": {PARIS}}}]',
    "xlam": f'[{{"name": "weather", "arguments": {PARIS}}}]',
}
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


class Held:
    """The state of a request's constraint, which checks texts."""

    def __init__(self, scene: ToolScene, **fields: Any) -> None:
        body = {"messages": [USER], "tools": [WEATHER, NOW], **fields}
        prepared = scene.chats.prepare(body, METADATA)
        self.parser = prepared.context.parser
        self._constraint = prepared.requests[0].constraint
        self._scene = scene

    def takes(self, text: str) -> bool:
        """Return whether a model could write this text and end there."""
        return self.refused(text) == ""

    def refused(self, text: str) -> str | None:
        """Return the rejected rest of a text; "" if there is none, None if it cannot end there."""
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


def unmarked(template: str, **parsers: Any) -> ToolScene:
    """Return a scene of a model whose marks are ordinary text."""
    scene = ToolScene("x", template)
    scene.model = replace(text_model(chat_template=template), max_model_len=4_096)
    scene.tokenizer = scene.model.tokenizer
    scene.chats, *_ = text_endpoints(
        scene.model, seed=7, parsers=select_parsers(template, **parsers)
    )
    return scene


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_a_forced_call_has_the_models_own_format(family: str) -> None:
    """Only that call can be written, and it is parsed as one."""
    call = CALLS[family]
    held = Held(ToolScene("x", TEMPLATES[family]), tool_choice="required")
    assert held.takes(call)
    assert held.refused("Hi") == "Hi"
    assert held.refused(call.replace("Paris", 'Paris", "country": "x')) not in ("", None)
    answer = parse_text(held.parser.for_choice(0), call)
    assert [(call.name, call.arguments) for call in answer.calls] == [("weather", PARIS)]
    assert (answer.content, answer.warnings) == ("", ())


@pytest.mark.parametrize("family", sorted(NAMED_CALLS))
def test_forced_and_strict_calls_have_the_format_of_a_named_parser(family: str) -> None:
    """Only that call can be written, alone if it is forced, and it is parsed as one."""
    call = NAMED_CALLS[family]
    # MiniMax-M3's mark contains another one, which is a token here.
    make: Callable[..., ToolScene] = unmarked if family == "minimax_m3" else partial(ToolScene, "x")
    scene = make(HERMES, tool_calls=family, reasoning="none")
    held = Held(scene, tool_choice="required")
    assert held.takes(call)
    assert held.refused("Hi") == "Hi"
    auto = Held(scene)
    text = call if family == "xlam" else f"I look. {call}"
    for constraint in (held, auto):
        assert constraint.refused(call.replace("Paris", 'Paris", "country": "x')) not in ("", None)
    assert auto.takes(text)
    for constraint, written in ((held, call), (auto, text)):
        answer = parse_text(constraint.parser.for_choice(0), written)
        assert [(call.name, call.arguments) for call in answer.calls] == [("weather", PARIS)]
        assert (answer.content, answer.warnings) == (written.removesuffix(call).strip(), ())


@pytest.mark.parametrize("family", sorted(TEMPLATES))
def test_only_a_named_tool_is_called(family: str) -> None:
    """The others are rendered, but cannot be called."""
    held = Held(ToolScene("x", TEMPLATES[family]), tool_choice=NAMED)
    refused = held.refused(CALLS[family])
    assert refused is not None
    assert refused.startswith("weather")
    bare = CALLS[family].replace("weather", "now").replace(PARIS, "{}")
    assert held.takes(bare)
    assert held.refused(bare.replace("{}", '{"a": 1}')) is not None


@pytest.mark.parametrize("scene", [ToolScene("x", HERMES), unmarked(HERMES)])
def test_the_number_of_calls_follows_the_request(scene: ToolScene) -> None:
    """The request allows several calls, or exactly one."""
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
def test_a_strict_function_follows_its_schema_everywhere(scene: ToolScene) -> None:
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


def test_calls_may_be_inside_a_text() -> None:
    """The text around them is unconstrained."""
    text = f"I look. {CALLS['hermes']}\nAnd again.\n{CALLS['hermes']} Done"
    for scene in (ToolScene("x", HERMES), unmarked(HERMES)):
        assert Held(scene).takes(text)


def test_nothing_is_constrained_by_default() -> None:
    """Functions that are not strict do not constrain the answer."""
    scene = ToolScene("x", HERMES)
    body = {"messages": [USER], "tools": [WEATHER]}
    assert scene.chats.prepare(body, METADATA).requests[0].constraint is None


def test_a_call_or_a_schema_can_be_requested_together() -> None:
    """An answer is then either of them; JSON calls could not be distinguished from it."""
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
    # A forced call is not followed by content.
    must = Held(ToolScene("x", HERMES), regex="a+", tool_choice="required")
    assert must.takes(CALLS["hermes"])


def test_reasoning_before_an_answer_is_free() -> None:
    """The prompt opens the reasoning, leaves it to the model, or has closed it."""
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


def test_a_schema_constrains_the_final_channel() -> None:
    """Other channels are free."""
    held = Held(ToolScene("x", GPT_OSS), tools=None, response_format=JSON)
    assert held.takes(f'{THOUGHT}<|channel|>final<|message|>{{"a": 1}}')
    assert held.refused(f"{THOUGHT}<|channel|>final<|message|>Hi") == "Hi"


def test_a_model_with_an_unknown_format_can_be_forced_to_call() -> None:
    """It writes a JSON list, which is parsed."""
    scene = ToolScene("x", HERMES, tool_calls="none")
    held = Held(scene, tool_choice="required")
    assert held.takes(CALLS["pythonic"])
    [call] = parse_text(held.parser.for_choice(0), CALLS["pythonic"]).calls
    assert (call.name, call.arguments) == ("weather", PARIS)


def test_an_unsupported_schema_is_rejected_if_it_is_strict() -> None:
    """The error names the tool, the keyword and its place; otherwise any object is allowed."""
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


def test_too_large_tools_are_rejected() -> None:
    """Their schemas have a common limit."""
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
    """Then its end mark must come; the rest is free again, or follows the requested constraint."""
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


def test_an_end_of_several_tokens_comes_completely() -> None:
    """A vocabulary without the mark spells it letter by letter."""
    held = Held(unmarked(R1), tools=None, thinking_token_budget=2)
    assert held.takes("ab</think>Hi")
    assert held.refused("ab</thinx") == "x"


def test_a_budget_requires_a_model_that_thinks() -> None:
    """If thinking is switched off there is nothing to limit."""
    fault = ToolScene("x", HERMES).chat_fault(thinking_token_budget=3)
    assert fault.param == "thinking_token_budget"
    assert ToolScene("x", QWEN3).chat_fault(thinking_token_budget=-2).param == fault.param
    body = {"messages": [USER], "thinking_token_budget": 3, "reasoning_effort": "none"}
    assert ToolScene("x", QWEN3).chats.prepare(body, METADATA).requests[0].constraint is None
