"""Calls of functions with omitted or misplaced marks."""

from __future__ import annotations

import json

import pytest

from tests.engine.parsers.parsing import PARIS, TIME, calls_of, parsed
from tidemill.engine.parsers.parsed_output import ParsedMessage
from tidemill.engine.parsers.tool_calls import INCOMPLETE, UNREAD

WEATHER = "<function=weather>\n<parameter=city>\nParis\n</parameter>\n"


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{WEATHER}</function>\n<function=time.now>\n</function>\n</tool_call>",
        f"<tool_call>{WEATHER}</function><function=time.now></tool_call>",
        f"<tool_call>{WEATHER}</tool_call><tool_call><function=time.now></function>",
        f"{WEATHER}</function>\n</tool_call>\n<function=time.now></function></tool_call>",
        f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}\n{TIME}</tool_call>',
        f"<tool_call>{WEATHER}</function>{TIME}</tool_call>",
    ],
    ids=range(6),
)
def test_several_calls_between_marks_and_calls_without_some_are_parsed(text: str) -> None:
    """Models write two functions in one call, and omit marks before or after it."""
    answer = parsed(text, "qwen3_coder")
    assert calls_of(answer) == [("weather", PARIS), ("time.now", "{}")]
    assert (answer.content, answer.warnings) == ("", ())


@pytest.mark.parametrize(
    ("call", "content"),
    [
        ("", f"{TIME}\n</tool_call>"),
        ("", "<function=weather><parameter=city>Paris"),
        ("", "<function=sing></function>"),
        (f"<tool_call>{TIME}", "<function=weather><parameter=city>"),
        (f"<tool_call>{TIME}</tool_call>", "</tool_call>"),
    ],
    ids=range(5),
)
def test_stray_marks_stay_content_with_a_warning(call: str, content: str) -> None:
    """Calls next to it are parsed."""
    answer = parsed(call + content, "hermes")
    assert (answer.content, answer.warnings) == (content, (UNREAD,))
    assert calls_of(answer) == ([("time.now", "{}")] if call else [])


def test_a_function_in_a_text_is_not_a_call() -> None:
    """Under a grammar no call is parsed without its mark."""
    text = "Use <function=name> as in <function=sing> or </function>."
    assert parsed(text, "qwen3_coder") == ParsedMessage("", text)
    held = parsed(f"{WEATHER}</function>", "qwen3_coder", is_constrained=True)
    assert (held.content, held.calls) == (f"{WEATHER}</function>", ())


@pytest.mark.parametrize("start", ["<tool_call>\n", ""])
def test_a_value_may_contain_the_mark_of_a_function(start: str) -> None:
    """Its own end follows the mark; if another call begins first, the value is incomplete."""
    value = "print('<function=') # <function=x>"
    call = f"<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n"
    answer = parsed(f"{start}{call}</tool_call>", "qwen3_coder")
    assert calls_of(answer) == [("weather", json.dumps({"city": value}))]
    open_call = "<function=weather><parameter=city>Paris"
    answer = parsed(f"{start}{open_call}{WEATHER}</function></tool_call>", "qwen3_coder")
    assert calls_of(answer)[-1] == ("weather", PARIS)
    assert answer.warnings == ((INCOMPLETE,) if start else (UNREAD,))
