"""Registry of tool call and reasoning parsers, by name and by their signs in chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from tidemill.protocol.contract import EngineError
from tidemill.protocol.reasoning_fields import REASONING_FIELDS, ReasoningField, reasoning_fields

from .bare_calls import LISTED_CALLS, LLAMA_JSON, PYTHONIC
from .enclosed_calls import GEMMA, OLMO
from .harmony import HARMONY
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
from .tool_calls import GRANITE, MISTRAL, ToolCallParser

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
    reasoning_fields: tuple[str, ...] = REASONING_FIELDS
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
    template: str | None,
    *,
    tool_calls: str | None = None,
    reasoning: str | None = None,
    reasoning_field: ReasoningField = "both",
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
        tool_call_parser,
        None if tool_call_parser is HARMONY else reasoning_parser,
        reasoning_fields(reasoning_field),
        template or "",
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
