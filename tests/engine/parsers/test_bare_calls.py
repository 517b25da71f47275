"""Calls without marks: they name tools and have arguments; all other text is content."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.parsers.parsing import PARIS, TOOLS, calls_of, parsed, reading
from tidemill.engine.parsers.parsed_output import merge_deltas, parse_text
from tidemill.engine.parsers.tool_calls import INCOMPLETE, UNREAD

CALL = f'{{"name": "weather", "parameters": {PARIS}}}'


@pytest.mark.parametrize("form", ["llama3_json", "llama4_json", "pythonic", "llama4_pythonic"])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Maria", "age": 34}',
        '\n[{"name": "Maria", "age": 34}, {"name": "João"}]',
        '{"name": "time.zone", "offset": 1}',
        '{"type": "person", "name": "Maria"}',
        '{"function": "f(x)", "name": null}',
        '{"id": 5, "name": "Maria", "args": null, "x": [',
        '{"name": {"name": "weather", "parameters": {}}}',
        '{"steps": [{"name": "weather", "parameters": {}}]}',
        '{"name": "Maria',
        '[1, 2, ["a"]] is a list, {x} is a set, and {"a" is nothing.',
        "```python\nprint([f(x) for x in y], {'a': 1}, [g(1)])\n```",
    ],
    ids=range(11),
)
def test_an_answer_that_only_looks_like_a_call_is_content(form: str, text: str) -> None:
    """People have names, too; nothing is lost, and there is no warning."""
    answer = parsed(text, form)
    assert (answer.content, answer.calls, answer.warnings) == (text, (), ())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama3_json", '{"name": "weather", "age": 34}'),
        ("llama3_json", '{"name": "sing", "parameters": {}}'),
        ("llama3_json", '{"type": "function", "name": "sing", "arguments": {}}'),
        ("llama3_json", 'I look. {"name": "weather", "parameters": '),
        ("llama3_json", 'I look. {"type": "function", "function": {"name": "weather", "para'),
        ("llama3_json", '[{"name": "weather", "parameters": {}}, {"name": "weather"}]'),
        ("pythonic", "[sing(song='x')]"),
        ("pythonic", "I look: [weather('Paris')]"),
        ("pythonic", '[{"name": "weather"}]'),
    ],
)
def test_an_intended_call_stays_content_with_a_warning(form: str, text: str) -> None:
    """It has no arguments, names an unknown tool, or is truncated."""
    answer = parsed(text, form)
    assert (answer.content, answer.calls, answer.warnings) == (text, (), (UNREAD,))


@pytest.mark.parametrize(
    ("form", "text", "content"),
    [
        ("llama3_json", f"I look.\n\n{CALL}", "I look."),
        ("llama3_json", f"For {{x}}: {CALL} Done.", "For {x}:\nDone."),
        ("llama3_json", f"[{CALL}]", ""),
        ("llama3_json", f'{{"type": "function", "function": {CALL}}}', ""),
        ("llama3_json", f'{{"parameters": {PARIS}, "name": "weather"}}', ""),
        ("llama3_json", f'{CALL}; {{"name": "Maria"}}', '; {"name": "Maria"}'),
        ("pythonic", "I look. [weather(city='Paris')]", "I look."),
        ("pythonic", f"See [1]: [{CALL}]", "See [1]:"),
    ],
)
def test_text_may_precede_a_call(form: str, text: str, content: str) -> None:
    """Small models announce a call before they make it."""
    answer = parsed(text, form)
    assert calls_of(answer) == [("weather", PARIS)]
    assert (answer.content, answer.warnings) == (content, ())


@pytest.mark.parametrize("form", ["llama3_json", "llama4_json"])
@pytest.mark.parametrize(
    "example",
    [
        'To use it, send {"name": "weather", "parameters": {"city": <city>}} where a city follows.',
        '```\npost(json={"name": "weather", "parameters": {"city": city}})\n```',
        'Write {"name": "weather", "parameters": {"city": "Paris" /* or another */}}.',
    ],
    ids=["placeholder", "code", "comment"],
)
def test_an_example_of_a_call_is_content(form: str, example: str) -> None:
    """A call without a mark is certain once its arguments are complete; the next one is parsed."""
    alone = parsed(example, form)
    assert (alone.content, alone.calls, alone.warnings) == (example, (), (UNREAD,))
    answer = parsed(f"{example}\n{CALL}", form)
    assert (answer.content, calls_of(answer)) == (example, [("weather", PARIS)])


def test_a_call_without_a_mark_may_be_truncated() -> None:
    """The end of the text is not a sign that it is an example."""
    answer = parsed('I look. {"name": "weather", "parameters": {"city": "Par', "llama3_json")
    assert calls_of(answer) == [("weather", '{"city": "Par')]
    assert (answer.content, answer.warnings) == ("I look.", (INCOMPLETE,))


def test_python_calls_a_tool_without_arguments() -> None:
    """Its parentheses mark it as a call."""
    assert calls_of(parsed("[time.now()]", "pythonic")) == [("time.now", "{}")]
    assert calls_of(parsed("[now()]", "pythonic")) == []


def test_any_call_after_a_mark_is_one() -> None:
    """The mark announces a call: an unknown name has a warning."""
    answer = parsed('<|python_tag|>{"name": "sing"}', "llama3_json")
    assert calls_of(answer) == [("sing", "{}")]
    assert "sing" in answer.warnings[0]


def test_under_a_grammar_only_calls_at_the_beginning_are_parsed() -> None:
    """In a text the arguments would not follow a schema."""
    held = parsed(f"I look. {CALL}", "llama3_json", is_constrained=True)
    assert (held.content, held.calls) == (f"I look. {CALL}", ())
    assert (
        calls_of(parsed(f" {CALL}; {CALL}", "llama3_json", is_constrained=True))
        == [("weather", PARIS)] * 2
    )
    listed = parsed(f"[{CALL}]", "llama3_json", is_constrained=True)
    assert (listed.content, listed.calls) == (f"[{CALL}]", ())
    answer = parsed(' {"name": "Maria"}', "llama3_json", is_constrained=True)
    assert (answer.content, answer.calls) == (' {"name": "Maria"}', ())


def test_an_answer_in_json_is_streamed() -> None:
    """It is held back only as long as it may be a call."""
    reader = reading("llama3_json").for_choice(0)
    assert reader.push('{"name": "Mar') == []
    streamed = [*reader.push('ia", "a'), *reader.push('ge": 3'), *reader.push("4, ")]
    assert "".join(piece.content for piece in streamed) == '{"name": "Maria", "age": 34,'
    assert "".join(piece.content for piece in reader.push('"of": [1')) == ' "of": ['


PARTS = [
    *('{"name": ', '"weather"', '"Maria"', ', "parameters": ', "{}", "}", "[", "]", "{", '"', "; "),
    *(CALL, "[weather(city=1)]", "weather(", "city=", ")", " ", "\n", "text", "1", "null", ","),
    *("<|python_tag|>", "<|python_start|>", "<|python_end|>", '{"type": "function", '),
]


@given(
    form=st.sampled_from(["llama3_json", "pythonic"]),
    parts=st.lists(st.sampled_from(PARTS), max_size=14),
    cuts=st.lists(st.integers(0, 300), max_size=6),
    is_constrained=st.booleans(),
)
def test_text_that_is_not_a_call_is_streamed_as_content(
    form: str, parts: list[str], cuts: list[int], *, is_constrained: bool
) -> None:
    """For any cuts the stream is the whole answer; without calls the content is all of the text."""
    text = "".join(parts)
    parser = reading(form, is_constrained=is_constrained)
    whole = parse_text(parser.for_choice(0), text)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for stream in ([text[i:j] for i, j in pairwise(bounds)], list(text)):
        reader = parser.for_choice(0)
        pieces = [piece for stretch in stream for piece in reader.push(stretch)]
        streamed = merge_deltas([*pieces, *reader.end()])
        assert (streamed.content, streamed.calls) == (whole.content, whole.calls)
        assert set(streamed.warnings) == set(whole.warnings)
    if not whole.calls:
        assert whole.content == text
    for call in whole.calls:
        assert INCOMPLETE in whole.warnings or isinstance(json.loads(call.arguments), dict)
        assert call.name in TOOLS or "<|python" in text


@pytest.mark.parametrize("form", ["llama3_json", "pythonic"])
@pytest.mark.parametrize(
    "beginning",
    [
        '{"name": "weather", "parameters": [',
        '{"type": "function", "x": ',
        "[weather(a=",
        "[",
        '{"a":',
        "<|python_start|>x",
        "<|python_start|>[x",
        "[{",
    ],
)
def test_a_text_with_many_beginnings_is_parsed_once(form: str, beginning: str) -> None:
    """Searching to the text's end for each would take minutes."""
    text = beginning * (60_000 // len(beginning))
    answer = parsed(text, form)
    assert (answer.content, answer.calls) == (text, ())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (r"'''It's \x41\u00e9\101 \d'''", "It's Aé\x41 \\d"),
        (r"'\ud83c\udf0a' ' and \'more\''", "🌊 and 'more'"),
        ('"one\ntwo\\\n"', "one\ntwo"),
        (r"('a\ud83c\udf0a',)", ["a🌊"]),
        ("-5", -5),
        ("[[], {'a': {}, \"b\": [1.5, None]}, false]", [[], {"a": {}, "b": [1.5, None]}, False]),
    ],
)
def test_values_in_python_are_json(value: str, expected: object) -> None:
    """Escapes, strings in parts and containers mean the same, also by characters."""
    text = f"[add(why={value}, a=2), time.now()]"
    parser = reading("pythonic")
    [add, now] = parse_text(parser.for_choice(0), text).calls
    assert json.loads(add.arguments) == {"why": expected, "a": 2}
    assert now.arguments == "{}"
    add.arguments.encode()  # no surrogates, which JSON could escape
    reader = parser.for_choice(0)
    pieces = [piece for char in text for piece in reader.push(char)]
    assert merge_deltas([*pieces, *reader.end()]).calls == (add, now)


def test_a_call_that_becomes_invalid_after_its_first_argument_is_incomplete() -> None:
    """Streamed arguments cannot be taken back: the rest of the call's text follows them."""
    answer = parsed("[weather(city='It's fine'), time.now()] Done.", "pythonic")
    assert calls_of(answer) == [("weather", '{"city": "It"s fine\'), time.now(')]
    assert (answer.content, answer.warnings) == ("Done.", (INCOMPLETE,))
    marked = parsed("<|tool_call_start|>[weather(city='a', 5)]<|tool_call_end|> Done.", "lfm2")
    assert calls_of(marked) == [("weather", '{"city": "a", 5')]
    assert (marked.content, marked.warnings) == ("Done.", (INCOMPLETE,))
