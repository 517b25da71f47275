"""Registry of tool call and reasoning parsers, by name and by their signs in chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

from tidemill.protocol.contract import EngineError

from .bare_calls import LISTED_CALLS, LLAMA_JSON, PYTHONIC, parse_python_calls
from .call_grammar import LISTED_SYNTAX, NAME, CallSyntax
from .harmony import HARMONY
from .json_text import members
from .reasoning import (
    COHERE_THINK,
    GEMMA_THINK,
    GRANITE_THINK,
    MISTRAL_THINK,
    R1_THINK,
    SEED_THINK,
    THINK,
    ReasoningParser,
)
from .sectioned_calls import DEEPSEEK, KIMI
from .tagged_calls import COHERE, HERMES, HUNYUAN, MINIMAX, NEMOTRON, SEED
from .text_stream import ParserCoroutine, TextStream, partial_mark_size
from .tool_calls import (
    GRANITE,
    INCOMPLETE,
    MISTRAL,
    CallsCoroutine,
    MarkedCallParser,
    RawCall,
    ToolCallParser,
    parse_json_calls,
    stream_call,
)

_GEMMA_CALL = re.compile(r"\s*call:(?P<name>[\w./:-]+)\s*(?P<arguments>\{.*\})\s*", re.DOTALL)
_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r'([{,]\s*)([^\s{}\[\]:,"]+)\s*:\s*')


def _enclosed(
    stream: TextStream, marks: tuple[str, str], parse: Callable[[str], Sequence[RawCall]]
) -> CallsCoroutine:
    """Parse text up to the closing mark, another opening mark, or the end."""
    text, mark = yield from stream.read_until(marks)
    if mark is None:
        text = text[: len(text) - partial_mark_size(marks[1:], text, 0)]
    elif mark != marks[1]:
        return None
    try:
        return parse(text) or None
    except ValueError:
        return None


def _olmo(stream: TextStream) -> CallsCoroutine:
    """Parse lines of Python, or the list of JSON calls that a grammar enforces."""
    yield from stream.skip_space()
    if (yield from stream.peek(2)) != "[{":
        parse = partial(_enclosed, marks=_OLMO, parse=lambda text: parse_python_calls(text.strip()))
        return (yield from parse(stream))
    calls = yield from parse_json_calls(stream)
    yield from stream.skip_space()
    yield from stream.accept(_OLMO[1])
    return calls


def _gemma(stream: TextStream) -> CallsCoroutine:
    """Parse a call; stream its arguments if it calls a tool."""
    start = stream.at
    yield from stream.skip_space()
    name = (yield from stream.read_name()) if (yield from stream.accept("call:")) else ""
    yield from stream.skip_space()
    if name not in stream.tools or (yield from stream.peek(1)) != "{":
        stream.at = start
        return (yield from _enclosed(stream, marks=_GEMMA, parse=_gemma_calls))
    if not stream.is_constrained:  # to JSON
        stream.emit_call(name, "")
        yield from _stream_gemma_object(stream)
    else:
        yield from stream_call(stream, name)
    yield from stream.skip_space()
    yield from stream.accept(_GEMMA[1])
    return []


def _stream_gemma_object(stream: TextStream) -> ParserCoroutine:
    """Emit a Gemma object as JSON arguments; the strings as they stream."""
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        stream.emit_arguments(text)

    mark: str | None = _QUOTE
    while mark == _QUOTE:
        stream.discard()
        text, mark = yield from stream.read_until((_QUOTE, *_GEMMA))
        if mark is None:
            text = text[: len(text) - partial_mark_size((_QUOTE, *_GEMMA), text, 0)]
        write(_quoted_keys(text if mark == _QUOTE else text.rstrip()))
        if mark == _QUOTE:
            stream.discard()
            write('"')
            mark = yield from stream.forward_until(
                (_QUOTE,), lambda part: write(json.dumps(part, ensure_ascii=False)[1:-1])
            )
            write('"' if mark else "")
    stream.discard()
    if mark is not None:
        stream.push_back(mark)
    try:
        members("".join(written))
    except ValueError:
        stream.warn(INCOMPLETE)


def _gemma_calls(text: str) -> list[RawCall]:
    """Return the call of a text such as `call:f{key:<|"|>value<|"|>,size:5}`."""
    match = _GEMMA_CALL.fullmatch(text)
    if match is None:
        raise ValueError("not a call")
    arguments = match["arguments"]
    try:
        members(arguments)
    except ValueError:
        arguments = _json_of(arguments)
        members(arguments)
    return [RawCall(match["name"], arguments)]


def _json_of(text: str) -> str:
    """Return a Gemma object as JSON: its strings have marks, and its keys have no quotes."""
    parts = text.split(_QUOTE)
    parts[::2] = [_quoted_keys(part) for part in parts[::2]]
    parts[1::2] = [json.dumps(part, ensure_ascii=False) for part in parts[1::2]]
    return "".join(parts)


def _quoted_keys(text: str) -> str:
    return _BARE_KEY.sub(r'\1"\2": ', text)


_GEMMA, _OLMO = ("<|tool_call>", "<tool_call|>"), ("<function_calls>", "</function_calls>")
GEMMA = MarkedCallParser(
    _GEMMA[:1],
    _gemma,
    CallSyntax(head=f"{_GEMMA[0]}call:{NAME}", tail=_GEMMA[1]),
    (_GEMMA[1], _QUOTE),
)
OLMO = MarkedCallParser(
    _OLMO[:1],
    _olmo,
    CallSyntax(
        prefix=_OLMO[0] + LISTED_SYNTAX.prefix,
        head=LISTED_SYNTAX.head,
        tail=LISTED_SYNTAX.tail,
        between=LISTED_SYNTAX.between,
        suffix=LISTED_SYNTAX.suffix + _OLMO[1],
    ),
    _OLMO[1:],
)


NONE = "none"
_Parser = TypeVar("_Parser")

# By vLLM's names; SGLang's are below.
TOOL_CALL_PARSERS: Mapping[str, ToolCallParser] = MappingProxyType(
    {
        "cohere_command3": COHERE,
        "deepseek_v3": DEEPSEEK,
        "deepseek_v31": DEEPSEEK,
        "ernie45": HERMES,
        "gemma4": GEMMA,
        "glm45": HERMES,
        "granite": GRANITE,
        "granite4": HERMES,
        "hermes": HERMES,
        "hunyuan_a13b": HUNYUAN,
        "kimi_k2": KIMI,
        "llama3_json": LLAMA_JSON,
        "llama4_json": LLAMA_JSON,
        "llama4_pythonic": PYTHONIC,
        "mimo": HERMES,
        "minimax_m2": MINIMAX,
        "mistral": MISTRAL,
        "nemotron_json": NEMOTRON,
        "olmo3": OLMO,
        "openai": HARMONY,
        "pythonic": PYTHONIC,
        "qwen3_coder": HERMES,
        "qwen3_xml": HERMES,
        "seed_oss": SEED,
    }
)
REASONING_PARSERS: Mapping[str, ReasoningParser] = MappingProxyType(
    {
        "cohere_command3": COHERE_THINK,
        "deepseek_r1": R1_THINK,
        "deepseek_v3": THINK,
        "ernie45": THINK,
        "gemma4": GEMMA_THINK,
        "glm45": THINK,
        "granite": GRANITE_THINK,
        "kimi_k2": THINK,
        "mimo": THINK,
        "minimax_m2": THINK,
        "mistral": MISTRAL_THINK,
        "nemotron_v3": THINK,
        "olmo3": THINK,
        "qwen3": THINK,
        "seed_oss": SEED_THINK,
    }
)
_OTHER_NAMES = MappingProxyType(
    {
        "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31",
        "glm": "glm45",
        "glm47": "glm45",
        "gpt_oss": "openai",
        "hunyuan": "hunyuan_a13b",
        "llama3": "llama3_json",
        "qwen": "hermes",
        "qwen25": "hermes",
    }
)
_CHANNELS = frozenset({"openai_gptoss", "gpt_oss"})
# Signs of each parser in templates; the first match wins.
TOOL_CALL_SIGNS = (
    ("<|channel|>", "openai"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<TOOLCALL>", "nemotron_json"),
    ("<|tool_call>", "gemma4"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ("<tool_calls>", "hunyuan_a13b"),
    ("<function_calls>", "olmo3"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
)
REASONING_SIGNS = (
    ("[THINK]", "mistral"),
    ("<seed:think>", "seed_oss"),
    ("<|START_THINKING|>", "cohere_command3"),
    ("<|channel>", "gemma4"),
    ("</think>", "qwen3"),
    ("<think>", "qwen3"),
    ("Here is my thought process", "granite"),
)


@dataclass(frozen=True, slots=True)
class ParserSet:
    """The tool call parser and the reasoning parser of one model; None for an unknown one.

    Harmony channels contain both: then `tool_calls` parses all answers, and there is no reasoning
    parser.
    """

    tool_calls: ToolCallParser | None = None
    reasoning: ReasoningParser | None = None
    template: str = field(default="", compare=False, repr=False)

    @property
    def has_channels(self) -> bool:
        """Return whether all of the model's output is in Harmony channels."""
        return self.tool_calls is HARMONY

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts of both parsers' special tokens."""
        tool_calls = () if self.tool_calls is None else self.tool_calls.marks
        reasoning = () if self.reasoning is None else self.reasoning.opens + self.reasoning.closes
        return tool_calls + reasoning

    @property
    def without_calls(self) -> ParserSet:
        """Return the parsers of answers without tools; channels are always parsed."""
        return self if self.has_channels else replace(self, tool_calls=None)

    @property
    def without_reasoning(self) -> ParserSet:
        """Return the parsers of answers whose reasoning stays in the content."""
        return replace(self, reasoning=None)

    @property
    def with_forced_calls(self) -> ParserSet:
        """Return the parsers of forced calls: a JSON list if the model's parser is unknown."""
        return self if self.tool_calls is not None else replace(self, tool_calls=LISTED_CALLS)

    @property
    def has_reasoning(self) -> bool:
        """Return whether the model may reason before it answers."""
        return self.has_channels or self.reasoning is not None


def select_parsers(
    template: str | None, *, tool_calls: str | None = None, reasoning: str | None = None
) -> ParserSet:
    """Return the parsers with these names (`none` for no parser), or those that a template implies.

    Raises `EngineError` for an unknown name.
    """
    tool_calls, reasoning = parser_names(template, tool_calls=tool_calls, reasoning=reasoning)
    tool_call_parser = _named(TOOL_CALL_PARSERS, tool_calls, "--tool-call-parser")
    if _plain(reasoning) in _CHANNELS:
        tool_call_parser, reasoning = HARMONY, NONE
    reasoning_parser = _named(REASONING_PARSERS, reasoning, "--reasoning-parser")
    return ParserSet(
        tool_call_parser, None if tool_call_parser is HARMONY else reasoning_parser, template or ""
    )


def parser_names(
    template: str | None, *, tool_calls: str | None = None, reasoning: str | None = None
) -> tuple[str, str]:
    """Return the names of the parsers of tool calls and of reasoning, as `select_parsers` does."""
    if tool_calls is None:
        tool_calls = _name_by_sign(template, TOOL_CALL_SIGNS)
    if reasoning is None:
        has_channels = _plain(tool_calls) == "openai"
        reasoning = "openai_gptoss" if has_channels else _name_by_sign(template, REASONING_SIGNS)
    return tool_calls, reasoning


def check_parser_names(*, tool_calls: str | None, reasoning: str | None) -> None:
    """Raise `EngineError` for an unknown name of a parser."""
    select_parsers(None, tool_calls=tool_calls, reasoning=reasoning)


def _name_by_sign(template: str | None, signs: tuple[tuple[str, str], ...]) -> str:
    return next((name for sign, name in signs if sign in (template or "")), NONE)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _named(parsers: Mapping[str, _Parser], name: str, flag: str) -> _Parser | None:
    plain = _plain(name)
    if plain == NONE:
        return None
    parser = parsers.get(plain) or parsers.get(_OTHER_NAMES.get(plain, ""))
    if parser is None:
        names = ", ".join([*sorted(parsers), NONE])
        raise EngineError(f"{flag}: unknown parser {name!r}: use one of {names}")
    return parser
