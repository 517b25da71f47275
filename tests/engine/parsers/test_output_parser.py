"""Answers in models' formats: thinking, calls and text are separated, for any cuts."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.parsers.parsing import PARIS, TIME, TOOLS, calls_of, parsed, reading
from tidemill.engine.parsers.output_parser import ModelOutputParser
from tidemill.engine.parsers.parsed_output import merge_deltas, parse_text
from tidemill.engine.parsers.registry import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    ParserSet,
    parser_notes,
    select_parsers,
)
from tidemill.engine.parsers.tool_calls import INCOMPLETE, UNREAD
from tidemill.protocol.contract import EngineError

WEATHER = f'{{"name": "weather", "arguments": {PARIS}}}'
DEEPSEEK = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"city": "Paris"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>'
    "time.now\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Paris"}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>time.now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
CODER = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=why>\nto see\nif"
    "\n</parameter>\n</function>\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n'
    '</invoke>\n<invoke name="time.now">\n</invoke>\n</minimax:tool_call>'
)
SEED = (
    "<seed:tool_call>\n<function=weather>\n<parameter=city>Paris</parameter>\n</function>\n"
    "</seed:tool_call>\n<seed:tool_call>\n<function=time.now>\n</function>\n</seed:tool_call>"
)
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>'
    "functions.time.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
NEMOTRON = f'<TOOLCALL>[{{"name": "weather", "arguments": {PARIS}}}, {TIME}]</TOOLCALL>'
COHERE = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": '
    f'{PARIS}}},\n    {{"tool_call_id": "1", "tool_name": "time.now", "parameters": {{}}}}\n]'
    "<|END_ACTION|>"
)
GEMMA = (
    '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'
    "<|tool_call>call:time.now{}<tool_call|>"
)
OLMO = '<function_calls>\nweather(city="Paris")\ntime.now()\n</function_calls>'
HARMONY = (
    "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>Looking it up.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Paris"}<|call|>'
)


CUT_CALLS = {  # each with the text that completes its last call, before the closing marks
    "hermes": (f"<tool_call>\n{WEATHER}\n</tool_call>", WEATHER),
    "qwen3_coder": (CODER, "</parameter>\n</"),
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        "</arg_value>\n</",
    ),
    "minimax_m2": (MINIMAX, 'name="time.now">\n</'),
    "seed_oss": (SEED, "<function=time.now>\n</"),
    "kimi_k2": (KIMI, "{}"),
    "deepseek_v3": (DEEPSEEK, "{}"),
    "deepseek_v31": (DEEPSEEK_31, "{}"),
    "nemotron_json": (NEMOTRON, f"{TIME}]"),
    "cohere_command3": (COHERE, '"parameters": {}}\n]'),
    "gemma4": (GEMMA, "time.now{}"),
    "olmo3": (OLMO, "time.now()"),
}


@pytest.mark.parametrize("form", CUT_CALLS)
def test_the_beginning_of_a_closing_mark_behind_a_call_is_not_content(form: str) -> None:
    """A call is complete once its arguments are, regardless of truncated closing marks."""
    text, last = CUT_CALLS[form]
    whole = parsed(text, form)
    least = text.rindex(last) + len(last)
    for end in range(least, len(text)):
        answer = parsed(text[:end], form)
        assert (calls_of(answer), answer.content) == (calls_of(whole), ""), text[:end]
        pieces = reading(form).for_choice(0)
        streamed = [delta for char in text[:end] for delta in pieces.push(char)]
        assert merge_deltas([*streamed, *pieces.end()]) == answer


def test_a_truncated_call_does_not_affect_complete_ones() -> None:
    """The section of calls has the first one; the beginning of the second is content."""
    for form, text, mark in (
        ("kimi_k2", KIMI, "<|tool_call_begin|>"),
        ("deepseek_v31", DEEPSEEK_31, "<｜tool▁call▁begin｜>"),
    ):
        answer = parsed(text[: text.rindex(mark) + len(mark) + 4], form)
        assert calls_of(answer) == [("weather", PARIS)]
        assert (answer.content[: len(mark)], answer.warnings) == (mark, (UNREAD,))


def test_the_beginning_of_a_mark_behind_text_is_content() -> None:
    """Only after a call it cannot be part of the answer."""
    for text in ("a <", "<", "</tool", f"<tool_call>{WEATHER}</tool_call> so <"):
        assert parsed(text, "hermes").content == text.rpartition("</tool_call> ")[2]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>'),
        ("hermes", f'<tool_call>{{"arguments":{PARIS},"name":"weather"}}'),
        (
            "glm45",
            "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        ),
        ("llama3_json", f'{{"name": "weather", "parameters": {PARIS}}}'),
        (
            "llama4_json",
            f'<|python_start|>{{"name": "weather", "parameters": {PARIS}}}<|python_end|>',
        ),
        ("llama3_json", f'\n{{"type": "function", "name": "weather", "parameters": {PARIS}}}'),
        ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {PARIS}}}'),
        ("mistral", f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]'),
        ("mistral", f"[TOOL_CALLS]weather[ARGS]{PARIS}"),
        ("mistral", f"[TOOL_CALLS]weather{PARIS}"),
        ("pythonic", "[weather(city='Paris')]"),
        ("pythonic", '<|python_start|>[weather(city="Paris")]<|python_end|>'),
        ("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]'),
        ("deepseek_v3", DEEPSEEK.split("\n<｜tool▁call▁begin｜>", maxsplit=1)[0]),
        ("deepseek_v31", DEEPSEEK_31.split("<｜tool▁call▁begin｜>time", maxsplit=1)[0]),
        (
            "openai",
            "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>" + PARIS,
        ),
        ("openai", "<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>"
         + PARIS + "<|call|>"),
    ],
)  # fmt: skip
def test_a_call_is_parsed_in_each_format(form: str, text: str) -> None:
    """The arguments are the JSON text that the model wrote, and nothing is left as content."""
    answer = parsed(text, form)
    assert calls_of(answer) == [("weather", PARIS)]
    assert (answer.content, answer.warnings) == ("", ())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "hermes",
            (
                '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>\n'
                '<tool_call>{"name": "time.now", "arguments": {}}</tool_call>'
            ),
        ),
        (
            "llama3_json",
            f'{{"name": "weather", "parameters": {PARIS}}}; {TIME}',
        ),
        (
            "mistral",
            (
                '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}},'
                ' {"name": "time.now", "arguments": null}]'
            ),
        ),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]time.now[ARGS]{}'),
        ("pythonic", "[weather(city='Paris'), time.now()]"),
        ("deepseek_v3", DEEPSEEK),
        ("deepseek_v31", DEEPSEEK_31),
        ("minimax_m2", MINIMAX),
        ("minimax_m2", f"<minimax:tool_call>[{WEATHER}, {TIME}]</minimax:tool_call>"),
        ("seed_oss", SEED),
        ("kimi_k2", KIMI),
        ("kimi_k2", KIMI.replace("functions.", "").removesuffix("<|tool_calls_section_end|>")),
        ("nemotron_json", NEMOTRON),
        ("hunyuan_a13b", f"<tool_calls>\n{WEATHER}\n{TIME}\n</tool_calls>"),
        ("cohere_command3", COHERE),
        ("gemma4", GEMMA),
        ("gemma4", GEMMA.replace('city:<|"|>Paris<|"|>', '"city": "Paris"')),
        ("gemma4", GEMMA.replace("}<tool_call|>", "}\n<tool_call|>")),
        ("olmo3", OLMO.replace('city="Paris"', '\n    city="Paris",\n')),
        ("olmo3", f"<function_calls>[{WEATHER}, {TIME}]</function_calls>"),
        (
            "openai",
            (
                '<|channel|>commentary to=functions.weather<|message|>{"city": "Paris"}<|call|>'
                "<|start|>assistant<|channel|>commentary to=functions.time.now<|message|>{}<|call|>"
            ),
        ),
    ],
)
def test_several_calls_are_parsed_in_order(form: str, text: str) -> None:
    """Each has its own id; a call without arguments has an empty object."""
    answer = parsed(text, form)
    assert calls_of(answer) == [("weather", PARIS), ("time.now", "{}")]
    assert len({call.call_id for call in answer.calls}) == 2
    assert answer.content == ""


def test_text_around_calls_is_content_without_the_space_between() -> None:
    """Text before and after calls is content, separated by a newline."""
    call = '<tool_call>{"name": "time.now", "arguments": {}}</tool_call>'
    answer = parsed(f" I look. \n{call}\n\n{call}\nDone. ", "hermes")
    assert answer.content == " I look.\nDone. "
    assert len(answer.calls) == 2


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"name": "sing", "arguments": {"song": "Par</tool_call>'),
        ("hermes", '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "weather"'),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "weather", "arguments": [1]}</tool_call>'),
        ("hermes", "<tool_call>weather(Paris)</tool_call>"),
        ("hermes", "<tool_call><function=add><parameter=a>2"),
        ("hermes", "<tool_call>" + "[" * 300),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>"),
        ("glm45", "<tool_call>weather is what I ask for</tool_call>"),
        ("llama3_json", "<|python_tag|>brave_search.call(query='x')"),
        ("mistral", "[TOOL_CALLS]weather[ARGS]Paris"),
        ("mistral", "[TOOL_CALLS][]"),
        ("pythonic", "[weather('Paris')]"),
        ("pythonic", "I look: [weather(city='Paris'"),
        ("pythonic", "[weather(city=1 + 1)]"),
        ("pythonic", "[weather(city=float('nan'))]"),
        ("deepseek_v3", DEEPSEEK[:75]),
        ("granite", "<|tool_call|>[{]"),
        ("minimax_m2", MINIMAX[:60]),
        ("minimax_m2", MINIMAX.replace("city", "ci ty")),
        ("minimax_m2", "<minimax:tool_call>weather</minimax:tool_call>"),
        ("kimi_k2", KIMI[:70]),
        ("kimi_k2", KIMI.replace(PARIS, "[]")),
        ("nemotron_json", NEMOTRON[:30]),
        ("gemma4", GEMMA[:20]),
        ("gemma4", "<|tool_call>call:sing{song:Paris}<tool_call|>"),
        ("olmo3", OLMO[:30]),
        ("olmo3", "<function_calls>I look.</function_calls>"),
        ("cohere_command3", COHERE.replace("tool_name", "tool")),
    ],
)
def test_an_invalid_call_stays_content_with_a_warning(form: str, text: str) -> None:
    """No output of the model is lost."""
    answer = parsed(text, form)
    assert (answer.content, answer.calls, answer.warnings) == (text, (), (UNREAD,))


@pytest.mark.parametrize(
    ("form", "text", "arguments"),
    [
        ("hermes", f"<tool_call>{WEATHER[:-2]}</tool_call>", '{"city": "Paris"'),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
            '{"a": NaN}',
        ),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"why": "a\nb"}', '{"why": "a\nb"}'),
        ("gemma4", "<|tool_call>call:add{why:Paris}<tool_call|>", '{"why": Paris}'),
        ("gemma4", '<|tool_call>call:add{"a":1', '{"a":1'),
        ("qwen3_coder", f"<tool_call>{CODER[11:55]}\n<par", '{"a": 2'),
        ("glm45", "<tool_call>weather<arg_key>city</arg_key><arg_value>Pa</arg", '{"city": "Pa'),
        ("openai", '<|channel|>x to=functions.add<|message|>{"a":}<|call|>', '{"a":}'),
        ("kimi_k2", KIMI.replace('"}', '\n"}').replace("weather", "add"), '{"city": "Paris\n"}'),
    ],
)
def test_invalid_arguments_are_returned_as_written(form: str, text: str, arguments: str) -> None:
    """They have been streamed; a warning describes them, and the next call is parsed."""
    answer = parsed(text, form)
    assert calls_of(answer)[0][1] == arguments
    assert (answer.content, answer.warnings) == ("", (INCOMPLETE,))
    assert calls_of(answer)[1:] == ([("time.now", "{}")] if form == "kimi_k2" else [])


INVALID = '{"why": "a\n}", "a": [NaN]}'
BROKEN = f'{{"name": "add", "arguments": {INVALID}}}'


@pytest.mark.parametrize(
    ("form", "text", "has_next"),
    [
        ("granite", f"<|tool_call|>[{BROKEN}, {WEATHER}] so", True),
        ("mistral", f"[TOOL_CALLS][{BROKEN}, {WEATHER}] so", True),
        ("mistral", f"[TOOL_CALLS]add[ARGS]{INVALID}[TOOL_CALLS]weather[ARGS]{PARIS} so", True),
        ("mistral", f"[TOOL_CALLS]add{INVALID} so", False),
        ("hermes", f"<tool_call>{BROKEN}</tool_call><tool_call>{WEATHER}</tool_call> so", True),
        ("hermes", f"<tool_call>[{BROKEN}, {WEATHER}]</tool_call> so", True),
        (
            "cohere_command3",
            f"<|START_ACTION|>[{BROKEN}, {WEATHER}]<|END_ACTION|> so",
            True,
        ),
        ("gemma4", "<|tool_call>call:add{why:a\n, a:[NaN]}<tool_call|> so", False),
        ("gemma4", f"<|tool_call>call:add{INVALID}<tool_call|> so", False),
    ],
)
def test_invalid_arguments_end_with_their_last_bracket(
    form: str, text: str, *, has_next: bool
) -> None:
    """The call's own wrapper, the next call and text are not arguments, for any cuts."""
    answer = parsed(text, form)
    calls = calls_of(answer)
    arguments = '{"why": a\n, "a": [NaN]}' if "why:a" in text else INVALID
    assert calls == [("add", arguments), *([("weather", PARIS)] if has_next else [])]
    assert (answer.content, answer.warnings) == ("so", (INCOMPLETE,))
    reader = reading(form).for_choice(0)
    pieces = [piece for char in text for piece in reader.push(char)]
    assert merge_deltas([*pieces, *reader.end()]) == answer


@pytest.mark.parametrize(
    "arguments", ['{why:<|"|>a}<|"|>}', '{"why": "a}"}', "{why:{b:[1,{}]}}"], ids=range(3)
)
def test_text_after_a_gemma_object_is_not_in_its_arguments(arguments: str) -> None:
    """The object ends with its last bracket outside strings."""
    answer = parsed(f"<|tool_call>call:add{arguments} I wait.", "gemma4")
    [(_, written)] = calls_of(answer)
    assert json.loads(written)["why"] in ("a}", {"b": [1, {}]})
    assert (answer.content, answer.warnings) == ("I wait.", ())


@pytest.mark.parametrize("key", ["why", "a"])
def test_an_opening_mark_in_a_value_is_text(key: str) -> None:
    """The value ends before another function begins; `a` is read whole."""
    value = "Write <tool_call> or <tool_call>, then the name."
    text = f"<tool_call><function=add><parameter={key}>\n{value}\n</parameter></function>"
    answer = parsed(f"{text}</tool_call>{CODER}", "qwen3_coder")
    assert [json.loads(arguments) for _, arguments in calls_of(answer)] == [
        {key: value},
        {"a": 2, "why": "to see\nif"},
    ]
    assert (answer.content, answer.warnings) == ("", ())


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            "qwen3_coder",
            (
                "<tool_call><function=add><parameter=why>x</parameter><parameter=why>y</parameter>"
                "<parameter=a>2</parameter><parameter=a>3</parameter></function></tool_call>"
            ),
        ),
        (
            "glm45",
            "<tool_call>add"
            + "".join(
                f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"
                for key, value in (("why", "x"), ("why", "y"), ("a", "2"), ("a", "3"))
            )
            + "</tool_call>",
        ),
    ],
)
def test_the_first_value_of_a_repeated_parameter_counts(form: str, text: str) -> None:
    """JSON parsers do not agree on repeated names; the same for a call that is read whole."""
    for sent in (text, text.removeprefix("<tool_call>")) if form == "qwen3_coder" else (text,):
        answer = parsed(sent, form)
        assert calls_of(answer) == [("add", '{"why": "x", "a": 2}')]
        assert "repeats a parameter" in answer.warnings[0]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (f"<tool_call>{WEATHER[:-1]} so}}</tool_call>", "so}</tool_call>"),
        (f"<tool_call>{CODER[11:-12]}so</tool_call>", "so</tool_call>"),
        (f"<tool_call>[{WEATHER}, {WEATHER[:30]}</tool_call>", f"{WEATHER[:30]}</tool_call>"),
    ],
)
def test_text_after_valid_arguments_is_content(text: str, content: str) -> None:
    """The call is complete; the rest has a warning."""
    answer = parsed(text, "hermes")
    [call] = answer.calls
    assert json.loads(call.arguments) in ({"city": "Paris"}, {"a": 2, "why": "to see\nif"})
    assert (answer.content, answer.warnings) == (content, (UNREAD,))


def test_an_invalid_call_in_a_channel_becomes_content_without_its_marks() -> None:
    """Its arguments become content."""
    answer = parsed("<|channel|>commentary to=functions.weather<|message|>Paris<|call|>", "openai")
    assert (answer.content, answer.calls, answer.warnings) == ("Paris", (), (UNREAD,))


def test_a_call_after_a_broken_one_is_parsed() -> None:
    """One mistake costs one call."""
    text = '<tool_call>{"a"}</tool_call> <tool_call>{"name": "time.now"}</tool_call>'
    answer = parsed(text, "hermes")
    assert calls_of(answer) == [("time.now", "{}")]
    assert answer.content == '<tool_call>{"a"}</tool_call>'
    assert answer.warnings == (UNREAD,)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("llama3_json", '{"answer": 5}'),
        ("llama3_json", '{"answer": 5'),
        ("pythonic", "[1, 2] is a list"),
        ("pythonic", "[see here](https://example.com)"),
        ("hermes", "a < b, and <tool is not a mark"),
        ("mistral", "[TOOL is none either"),
        ("openai", "Plain text."),
    ],
)
def test_text_that_resembles_a_call_is_content(form: str, text: str) -> None:
    """JSON, lists and links are answers without a warning."""
    answer = parsed(text, form)
    assert (answer.content, answer.calls, answer.warnings) == (text, (), ())


def test_values_between_tags_have_the_types_of_their_schema() -> None:
    """Qwen3-Coder writes bare texts; a value without a type in the schema stays a text."""
    assert calls_of(parsed(CODER, "qwen3_coder")) == [("add", '{"a": 2, "why": "to see\\nif"}')]
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"
        for key, value in (("a", "2"), ("b", "x"), ("why", "3"))
    )
    text = f"<tool_call>add\n{pairs}</tool_call><tool_call>time.now</tool_call>"
    assert calls_of(parsed(text, "glm45")) == [
        ("add", '{"a": 2, "b": "x", "why": "3"}'),
        ("time.now", "{}"),
    ]


def test_python_values_become_json() -> None:
    """Python's constants, JSON's words, tuples and nested values."""
    text = "[add(a=-2, b=1.5, why={'k': [True, null, None, false, (1, \"x'é\")]})]"
    [(name, arguments)] = calls_of(parsed(text, "pythonic"))
    assert name == "add"
    assert json.loads(arguments) == {
        "a": -2,
        "b": 1.5,
        "why": {"k": [True, None, None, False, [1, "x'é"]]},
    }


def test_gemmas_values_become_json() -> None:
    """Keys have no quotes, strings are between marks, and everything else is JSON."""
    text = (
        '<|tool_call>call:add{a:2,b:-1.5,why:{list:[<|"|>a{b:"c<|"|>,true,{x:null}],<|"|>é<|"|>:1}}'
        "<tool_call|>"
    )
    [(name, arguments)] = calls_of(parsed(text, "gemma4"))
    assert name == "add"
    assert json.loads(arguments) == {
        "a": 2,
        "b": -1.5,
        "why": {"list": ['a{b:"c', True, {"x": None}], "é": 1},
    }


def test_arguments_encoded_as_a_json_string_are_decoded() -> None:
    """Some models write OpenAI's format."""
    text = '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>'
    assert calls_of(parsed(text, "hermes")) == [("weather", PARIS)]


def test_arguments_are_copied_literally() -> None:
    """Digits, escapes and whitespace do not change."""
    arguments = '{"a":1.50,  "why":"\\u00e9 </tool_call>"}'
    text = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    assert calls_of(parsed(text, "hermes")) == [("add", arguments)]


def test_gemma_may_write_arguments_in_json() -> None:
    """Text in a JSON string that looks like a key stays as it is."""
    arguments = '{"why": "a, b: c"}'
    answer = parsed(f"<|tool_call>call:add{arguments}<tool_call|>", "gemma4")
    assert calls_of(answer) == [("add", arguments)]


def test_only_one_call_is_returned_if_only_one_is_allowed() -> None:
    """The others are dropped with a warning."""
    call = '<tool_call>{"name": "time.now"}</tool_call>'
    answer = parsed(call * 3, "hermes", is_single=True)
    assert len(answer.calls) == 1
    assert len(answer.warnings) == 1
    assert "parallel_tool_calls" in answer.warnings[0]


def test_a_call_of_an_unknown_tool_has_a_warning() -> None:
    """The client decides about it."""
    answer = parsed('<tool_call>{"name": "sing"}</tool_call>', "hermes")
    assert calls_of(answer) == [("sing", "{}")]
    assert "sing" in answer.warnings[0]


def test_ids_depend_only_on_row_choice_and_place() -> None:
    """Mistral's have nine characters, as its templates require; a model's own ids are preserved."""
    call = '<tool_call>{"name": "time.now"}</tool_call>'
    hermes = reading("hermes")
    first, again, other = (parse_text(hermes.for_choice(choice), call * 2) for choice in (0, 0, 1))
    assert first == again
    assert len({call.call_id for answer in (first, other) for call in answer.calls}) == 4
    [mistral] = parsed("[TOOL_CALLS]time.now[ARGS]{}", "mistral").calls
    assert len(mistral.call_id) == 9
    assert mistral.call_id.isalnum()
    assert [call.call_id for call in parsed(KIMI, "kimi_k2").calls] == [
        "functions.weather:0",
        "functions.time.now:1",
    ]
    [own] = parsed("[TOOL_CALLS]time.now[CALL_ID]abc123XYZ[ARGS]{}", "mistral").calls
    assert own.call_id == "abc123XYZ"


@pytest.mark.parametrize(
    ("form", "text", "is_open", "reasoning", "content"),
    [
        ("qwen3", "<think>\nHm.\n</think>\n\n Yes. ", False, "Hm.", " Yes. "),
        ("qwen3", "Hm.\n</think>\n\nYes.", True, "Hm.", "Yes."),
        ("qwen3", "\n<think>Hm.</think>Yes.", True, "Hm.", "Yes."),
        ("qwen3", "Hm, and no end", True, "Hm, and no end", ""),
        ("qwen3", " Yes, <think> is a mark.", False, "", " Yes, <think> is a mark."),
        ("qwen3", "<think></think>Yes.", False, "", "Yes."),
        ("mistral", "[THINK]Hm.[/THINK]Yes.", False, "Hm.", "Yes."),
        ("seed_oss", "Hm.</seed:think>Yes.", True, "Hm.", "Yes."),
        ("gemma4", "<|channel>thought\nHm.\n<channel|>Yes.", False, "Hm.", "Yes."),
        ("cohere_command3", "<|START_THINKING|>Hm.<|END_THINKING|>Yes.", False, "Hm.", "Yes."),
        (
            "granite",
            "Here is my thought process: Hm.\n\nHere is my response: Yes.",
            False,
            " Hm.",
            " Yes.",
        ),
    ],
)
def test_thinking_is_separated(
    form: str, text: str, is_open: int, reasoning: str, content: str
) -> None:
    """It precedes the answer, opened by the model or the prompt; newlines around it go."""
    answer = parsed(text, thinking=form, is_open=bool(is_open))
    assert (answer.reasoning, answer.content) == (reasoning, content)
    if not reasoning and "</think>" not in text:
        assert answer.reasoning_spans == ()


def test_calls_may_follow_thinking() -> None:
    """A call inside the thinking is not a call."""
    text = '<think>Call <tool_call>x</think>\n<tool_call>{"name": "time.now"}</tool_call>'
    answer = parsed(text, "hermes", "qwen3")
    assert answer.reasoning == "Call <tool_call>x"
    assert calls_of(answer) == [("time.now", "{}")]
    [(start, end)] = answer.reasoning_spans
    assert text[start:end] == "<think>Call <tool_call>x</think>"


def test_channels_are_thinking_calls_and_answer() -> None:
    """Text before a call is content, and so is the final message."""
    answer = parsed(HARMONY, "openai")
    assert (answer.reasoning, answer.content) == ("Need the weather.", "Looking it up.")
    assert calls_of(answer) == [("weather", PARIS)]
    [(start, end)] = answer.reasoning_spans
    assert HARMONY[start:end].startswith("<|channel|>analysis")
    final = parsed(
        "<|channel|>analysis<|message|>A<|end|><|start|>assistant<|channel|>analysis<|message|>B"
        "<|start|>assistant<|channel|>final<|message|>Yes. <|return|>",
        "openai",
    )
    assert (final.reasoning, final.content) == ("A\nB", "Yes. ")
    assert len(final.reasoning_spans) == 2


TEXTS = {
    "hermes": f'x <tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call> {CODER}',
    "llama3_json": f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "add"}}<|python_tag|>',
    "mistral": f'[TOOL_CALLS]weather[CALL_ID]a[ARGS]{PARIS} y [TOOL_CALLS][{{"name": "add"}}]',
    "pythonic": "[weather(city='it\\'s'), add(a=[1, {'b': \"]\"}])]<|python_start|>[add()]",
    "deepseek_v3": DEEPSEEK + DEEPSEEK_31,
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]',
    "minimax_m2": MINIMAX,
    "seed_oss": SEED,
    "kimi_k2": KIMI,
    "nemotron_json": NEMOTRON,
    "cohere_command3": COHERE,
    "gemma4": GEMMA,
    "olmo3": OLMO,
    "apertus": f'<|tools_prefix|>[{{"weather": {PARIS}}}, {{"add": {{}}}}]<|tools_suffix|>',
    "ernie45": f"<response>\nYes.\n</response><tool_call>{WEATHER}",
    "functiongemma": GEMMA.replace("<|tool_call>", "<start_function_call>")
    .replace("<tool_call|>", "<end_function_call>")
    .replace('<|"|>', "<escape>"),
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "weather", "parameters": {PARIS}}}',
    "lfm2": "<|tool_call_start|>[weather(city='it'), add(a=1)]<|tool_call_end|>",
    "longcat": "<longcat_tool_call>add\n<longcat_arg_key>a</longcat_arg_key>\n"
    "<longcat_arg_value>1</longcat_arg_value></longcat_tool_call>",
    "minimax_m3": ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="weather">]<]minimax[>[<city>'
    "Paris]<]minimax[>[</city>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
    "phi4_mini_json": f'functools[{{"name": "weather", "arguments": {PARIS}}}]',
    "xlam": f'```json\n[{{"name": "weather", "arguments": {PARIS}}}]\n```',
    "openai": HARMONY + "<|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
}
PARTS = [
    *("<think>", "</think>", "[THINK]", "\n", " ", "text", "é", "{", "}", "[", "]", '"', "\\"),
    *("'", ",", ":", ";", "(", ")", "=", '{"name": "add"}', "[add()]", "null", "-1.5e3", "\x01"),
    *("<arg_key>a</arg_key>", "<arg_value>1</arg_value>", "<tool_call>add"),
    *("<function=add>", "<parameter=a>", "</parameter>", "</function>", "</tool_call>", "```json"),
    *("<response>", "</response>", "<answer>", "]<]minimax[>[<a>", "<|inner_prefix|>"),
    *('<invoke name="add">', '<parameter name="a">', "</invoke>", "functions.add:0"),
    *{mark for form in TOOL_CALL_PARSERS.values() for mark in form.marks},
]
THINKING = ["none", *REASONING_PARSERS]


@st.composite
def cases(draw: st.DrawFn) -> tuple[ModelOutputParser, list[str]]:
    """Draw a parser and a text in pieces: in its format, truncated or damaged, or random parts."""
    form = draw(st.sampled_from(sorted(TEXTS)))
    parsers = select_parsers(None, tool_calls=form, reasoning=draw(st.sampled_from(THINKING)))
    options = {name: draw(st.booleans()) for name in ("is_open", "is_single", "is_constrained")}
    parser = ModelOutputParser(parsers, "r", tools=TOOLS, **options)
    parts = "".join(draw(st.lists(st.sampled_from(sorted(PARTS)), max_size=12)))
    own = TEXTS[form][: draw(st.integers(0, len(TEXTS[form])))]
    place = draw(st.integers(0, len(own)))
    text = own[:place] + parts + own[place:]
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    return parser, [text[i:j] for i, j in pairwise(bounds)]


@given(case=cases())
def test_the_answer_does_not_depend_on_cuts(
    case: tuple[ModelOutputParser, list[str]],
) -> None:
    """The merged deltas are equal for pieces, characters and the whole text."""
    parser, pieces = case
    text = "".join(pieces)
    whole = parse_text(parser.for_choice(0), text)
    for stream in (pieces, list(text)):
        reader = parser.for_choice(0)
        pieces = [piece for stretch in stream for piece in reader.push(stretch)]
        streamed = merge_deltas([*pieces, *reader.end()])
        assert (streamed.reasoning, streamed.content) == (whole.reasoning, whole.content)
        assert (streamed.calls, streamed.warnings) == (whole.calls, whole.warnings)
        assert tuple(reader.reasoning_spans) == whole.reasoning_spans
    for call in whole.calls if INCOMPLETE not in whole.warnings else ():
        assert isinstance(json.loads(call.arguments), dict)


def test_a_delta_is_emitted_as_soon_as_it_is_certain() -> None:
    """Text and thinking are not held back, except possible marks and trailing whitespace."""
    reader = reading("hermes", "qwen3", is_open=True).for_choice(0)
    assert [piece.reasoning for piece in reader.push("I think")] == ["I think"]
    assert [piece.reasoning for piece in reader.push(" so.</th")] == [" so."]
    assert [piece.content for piece in reader.push("ink>\nYes")] == ["Yes"]
    assert reader.push(" <tool") == []
    assert [piece.content for piece in reader.push("box>")] == [" <toolbox>"]


@pytest.mark.parametrize(
    ("template", "calls", "thinking"),
    [
        ("{{ '<tool_call>' }}", "hermes", None),
        ("{{ '<tool_call><think></think>' }}", "hermes", "qwen3"),
        ("{{ '[TOOL_CALLS]' }}", "mistral", None),
        ("{{ '<|python_tag|>' }}", "llama3_json", None),
        ("{{ '<|python_start|>' }}", "pythonic", None),
        ("{{ '[func_name1(param1=value1)] <|python_tag|>' }}", "pythonic", None),
        ("{{ '<｜tool▁calls▁begin｜></think>' }}", "deepseek_v3", "deepseek_v3"),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "openai", None),
        ("{{ '<|tool_calls_section_begin|><think></think>' }}", "kimi_k2", "qwen3"),
        ("{{ '<minimax:tool_call></think>' }}", "minimax_m2", "minimax_m2"),
        ("{{ '<seed:tool_call></seed:think>' }}", "seed_oss", None),
        ("{{ '<seed:tool_call><seed:think>' }}", "seed_oss", "seed_oss"),
        ("{{ '<TOOLCALL>[</think>' }}", "nemotron_json", "nemotron_v3"),
        ("{{ '<|tool_call>call: <|channel>thought' }}", "gemma4", "gemma4"),
        ("{{ '<function_calls></think>' }}", "olmo3", "olmo3"),
        ("{{ '<|START_THINKING|><|START_ACTION|>' }}", "cohere_command3", "cohere_command3"),
        ("{{ ns + '<tool_call>' }}{% set ns = ']<]minimax[>[' %}<mm:think>", *["minimax_m3"] * 2),
        ("{{ '<longcat_tool_call><longcat_think>' }}", "longcat", "longcat"),
        ("{{ '<|inner_prefix|><|tools_prefix|>' }}", "apertus", "apertus"),
        ("{{ '<|tool_list_start|>' }}", "lfm2", None),
        ("{{ '<|tool_call_start|></think>' }}", "lfm2", "qwen3"),
        ("{{ '<start_function_call>' }}", "functiongemma", None),
        ("{{ '<|action_start|><|plugin|>' }}", "internlm", None),
        ("{{ 'functools[{' }}", "phi4_mini_json", None),
        ("{{ 'make calls in a single JSON array: [' }}", "xlam", None),
        ("{{ '<tool_call></think><response>' }}", "ernie45", "ernie45"),
        ("{{ 'plain' }}", None, None),
    ],
)
def test_a_template_implies_its_formats(
    template: str, calls: str | None, thinking: str | None
) -> None:
    """The parsers follow from the template's text."""
    assert select_parsers(template) == ParserSet(
        None if calls is None else TOOL_CALL_PARSERS[calls],
        None if thinking is None else REASONING_PARSERS[thinking],
    )


def test_a_format_may_be_configured() -> None:
    """Names are vLLM's and SGLang's; `none` means no parser; others are rejected with a list."""
    template = "{{ '<tool_call></think>' }}"
    assert select_parsers(template, tool_calls="none", reasoning="none") == ParserSet()
    assert (
        select_parsers(template, tool_calls="llama3").tool_calls is TOOL_CALL_PARSERS["llama3_json"]
    )
    assert select_parsers(template, tool_calls="qwen25").tool_calls is TOOL_CALL_PARSERS["hermes"]
    assert (
        select_parsers(template, reasoning="deepseek-r1").reasoning
        is REASONING_PARSERS["deepseek_r1"]
    )
    assert select_parsers(template, reasoning="openai_gptoss").has_channels
    assert select_parsers(template, reasoning="gpt-oss").has_channels
    assert select_parsers(template, tool_calls="step3p5") == select_parsers(template)
    assert select_parsers(template, reasoning="minimax_m2_append_think").reasoning is None
    names = ", ".join([*sorted(TOOL_CALL_PARSERS), "none"])
    with pytest.raises(
        EngineError, match=f"--tool-call-parser: unknown parser 'x': use one of {names}"
    ):
        select_parsers(template, tool_calls="x")
    names = ", ".join([*sorted(REASONING_PARSERS), "none"])
    with pytest.raises(
        EngineError, match=f"--reasoning-parser: unknown parser 'x': use one of {names}"
    ):
        select_parsers(template, reasoning="x")


def test_a_parser_that_only_vllm_has_is_replaced_by_the_templates_own() -> None:
    """A note names both, also where the template shows no format."""
    names: dict[str, Any] = {"tool_calls": "granite-20b-fc", "reasoning": "kimi_k3"}
    template = "{{ '<tool_call>' }}"
    assert select_parsers(template, **names) == select_parsers(template)
    assert parser_notes(template, **names) == (
        "--tool-call-parser: vLLM's 'granite-20b-fc' is not supported: 'hermes' replaces it",
        "--reasoning-parser: vLLM's 'kimi_k3' is not supported: the chat template shows no other",
    )
    assert parser_notes(template, tool_calls="step3p5", reasoning=None) == ()


# The names of vLLM 0.32, with one for each parser.
VLLM_TOOL_CALLS = (
    "apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4"
    " deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc"
    " granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba k2_horizon kimi_k2 kimi_k3"
    " lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax_m2"
    " minimax_m3 mistral muse_glimmer olmo3 openai phi4_mini_json plamo3 poolside_v1 pythonic"
    " qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 xlam"
).split()
VLLM_REASONING = (
    "cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45"
    " gemma4 glm45 glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 inkling"
    " k2_horizon kimi_k2 kimi_k3 ling3 mimo minicpmv minimax_m2 minimax_m2_append_think minimax_m3"
    " mistral muse_glimmer nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1 qwen3 seed_oss step3"
    " step3p5"
).split()


def test_no_name_of_vllm_ends_a_start() -> None:
    """The template replaces 16 of 54 names of tool calls, and 8 of 38 of reasoning."""
    calls = [parser_notes(None, tool_calls=name, reasoning=None) for name in VLLM_TOOL_CALLS]
    thinking = [parser_notes(None, tool_calls=None, reasoning=name) for name in VLLM_REASONING]
    assert [(len(notes), sum(map(len, notes))) for notes in (calls, thinking)] == [
        (54, 16),
        (38, 8),
    ]


@pytest.mark.parametrize(
    "beginning",
    [
        ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="sing">]<]minimax[>[<a>',
        '<|tools_prefix|>[{"sing": {"a":',
        "<|tool_call_start|>[",
        "functools[",
        '<tool_call>{"a":"',
        '<tool_call>["",',
        "<tool_call>[",
        "<tool_call>add<arg_key>",
        "<tool_call><function=add><parameter=a>",
        "<function=add><parameter=a>",
        "<function=add>x",
        '<minimax:tool_call><invoke name="add"><parameter name="a">',
        "<|tool_call>call:sing{",
    ],
)
def test_a_text_with_many_beginnings_is_parsed_once(beginning: str) -> None:
    """None of them is a call; searching to the text's end for each would take minutes."""
    text = beginning * (60_000 // len(beginning))
    forms = {
        "]<]minimax": "minimax_m3",
        "<minimax": "minimax_m2",
        "<|tools_": "apertus",
        "<|tool_call_": "lfm2",
        "<|tool_": "gemma4",
        "functools": "phi4_mini_json",
    }
    answer = parsed(text, next((forms[sign] for sign in forms if sign in beginning), "hermes"))
    assert (answer.content, answer.calls, answer.warnings) == (text, (), (UNREAD,))
