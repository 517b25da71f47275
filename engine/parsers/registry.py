"""Registry of tool call and reasoning parsers, by name and by their signs in chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tidemill.protocol.contract import EngineError
from tidemill.protocol.reasoning_fields import REASONING_FIELDS, ReasoningField, reasoning_fields

from .bare_calls import LISTED_CALLS, LLAMA_JSON, PYTHONIC, XLAM
from .enclosed_calls import APERTUS, FUNCTION_GEMMA, GEMMA, LFM, OLMO
from .harmony import HARMONY
from .nested_tags import MINIMAX_M3
from .reasoning import (
    APERTUS_THINK,
    COHERE_THINK,
    ERNIE_THINK,
    GEMMA_THINK,
    GRANITE_THINK,
    HUNYUAN_THINK,
    LONGCAT_THINK,
    MINIMAX_M3_THINK,
    MISTRAL_THINK,
    R1_THINK,
    SEED_THINK,
    THINK,
    ReasoningParser,
)
from .sectioned_calls import DEEPSEEK, KIMI
from .tagged_calls import COHERE, HERMES, HUNYUAN, LONGCAT, MINIMAX, NEMOTRON, SEED
from .tool_calls import GRANITE, INTERNLM, MISTRAL, PHI, ToolCallParser

NONE = "none"

# By vLLM's names; its other ones and SGLang's are below.
TOOL_CALL_PARSERS: Mapping[str, ToolCallParser] = MappingProxyType(
    {
        "apertus": APERTUS,
        "cohere_command3": COHERE,
        "deepseek_v3": DEEPSEEK,
        "deepseek_v31": DEEPSEEK,
        "ernie45": HERMES,
        "functiongemma": FUNCTION_GEMMA,
        "gemma4": GEMMA,
        "glm45": HERMES,
        "granite": GRANITE,
        "granite4": HERMES,
        "hermes": HERMES,
        "hunyuan_a13b": HUNYUAN,
        "internlm": INTERNLM,
        "kimi_k2": KIMI,
        "lfm2": LFM,
        "llama3_json": LLAMA_JSON,
        "llama4_json": LLAMA_JSON,
        "llama4_pythonic": PYTHONIC,
        "longcat": LONGCAT,
        "mimo": HERMES,
        "minimax_m2": MINIMAX,
        "minimax_m3": MINIMAX_M3,
        "mistral": MISTRAL,
        "nemotron_json": NEMOTRON,
        "olmo3": OLMO,
        "openai": HARMONY,
        "phi4_mini_json": PHI,
        "pythonic": PYTHONIC,
        "qwen3_coder": HERMES,
        "qwen3_xml": HERMES,
        "seed_oss": SEED,
        "xlam": XLAM,
    }
)
REASONING_PARSERS: Mapping[str, ReasoningParser] = MappingProxyType(
    {
        "apertus": APERTUS_THINK,
        "cohere_command3": COHERE_THINK,
        "deepseek_r1": R1_THINK,
        "deepseek_v3": THINK,
        "ernie45": ERNIE_THINK,
        "gemma4": GEMMA_THINK,
        "glm45": THINK,
        "granite": GRANITE_THINK,
        "hunyuan_a13b": HUNYUAN_THINK,
        "kimi_k2": THINK,
        "longcat": LONGCAT_THINK,
        "mimo": THINK,
        "minimax_m2": THINK,
        "minimax_m3": MINIMAX_M3_THINK,
        "mistral": MISTRAL_THINK,
        "nemotron_v3": THINK,
        "olmo3": THINK,
        "qwen3": THINK,
        "seed_oss": SEED_THINK,
    }
)
_TOOL_CALL_ALIASES = MappingProxyType(
    {
        "cohere_command4": "cohere_command3",
        "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31",
        "glm": "glm45",
        "glm47": "glm45",
        "gpt_oss": "openai",
        "hunyuan": "hunyuan_a13b",
        "jamba": "hunyuan_a13b",
        "ling3": "glm45",
        "llama3": "llama3_json",
        "poolside_v1": "glm45",
        "qwen": "hermes",
        "qwen25": "hermes",
        "qwen3_json": "hermes",
        "step3p5": "qwen3_coder",
    }
)
_REASONING_ALIASES = MappingProxyType(
    {
        "cohere_command4": "cohere_command3",
        "deepseek_v4": "deepseek_v3",
        "deepseek_v41": "deepseek_v3",
        "glm47": "glm45",
        "granite_thinking_parser": "nemotron_v3",
        "holo2": "deepseek_v3",
        "hy_v3": "qwen3",
        "ling3": "glm45",
        "minimax_m2_append_think": NONE,
        "poolside_v1": "deepseek_v3",
        "step3": "deepseek_r1",
        "step3p5": "qwen3",
    }
)
# vLLM's parsers without one of ours: a model's template selects the parser instead.
_OTHER_TOOL_CALL_PARSERS = frozenset(
    "deepseek_v32 deepseek_v4 deepseek_v41 dots gigachat3 granite_20b_fc hf hy_v3 hy_v4 inkling"
    " k2_horizon kimi_k3 minicpm5 muse_glimmer plamo3 step3".split()
)
_OTHER_REASONING_PARSERS = frozenset(
    "hf hy_v4 inkling k2_horizon kimi_k3 minicpmv muse_glimmer plamo3".split()
)
_CHANNELS = frozenset({"openai_gptoss", "gpt_oss"})
# Signs of each parser in templates; the first match wins.
TOOL_CALL_SIGNS = (
    ("<|channel|>", "openai"),
    ("]<]minimax[>[", "minimax_m3"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<TOOLCALL>", "nemotron_json"),
    ("<longcat_tool_call>", "longcat"),
    ("<|tools_prefix|>", "apertus"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<start_function_call>", "functiongemma"),
    ("<|action_start|>", "internlm"),
    ("functools[", "phi4_mini_json"),
    ("make calls in a single JSON array", "xlam"),
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
    ("<mm:think>", "minimax_m3"),
    ("<longcat_think>", "longcat"),
    ("<|inner_prefix|>", "apertus"),
    ("<response>", "ernie45"),
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
    tool_call_parser = TOOL_CALL_PARSERS.get(tool_calls)
    if reasoning in _CHANNELS:
        tool_call_parser, reasoning = HARMONY, NONE
    return ParserSet(
        tool_call_parser,
        None if tool_call_parser is HARMONY else REASONING_PARSERS.get(reasoning),
        reasoning_fields(reasoning_field),
        template or "",
    )


def parser_names(
    template: str | None, *, tool_calls: str | None = None, reasoning: str | None = None
) -> tuple[str, str]:
    """Return the names of the parsers of tool calls and of reasoning, as `select_parsers` does.

    Names that only vLLM has are those that the template implies. Raises `EngineError` for an
    unknown name.
    """
    tool_calls = _CALLS.own_name(tool_calls) or _CALLS.by_sign(template)
    reasoning = _REASONING.own_name(reasoning)
    if reasoning is None:
        reasoning = "openai_gptoss" if tool_calls == "openai" else _REASONING.by_sign(template)
    return tool_calls, reasoning


def check_parser_names(*, tool_calls: str | None, reasoning: str | None) -> None:
    """Raise `EngineError` for an unknown name of a parser."""
    parser_names(None, tool_calls=tool_calls, reasoning=reasoning)


def parser_notes(
    template: str | None, *, tool_calls: str | None, reasoning: str | None
) -> tuple[str, ...]:
    """Return a note on each name that only vLLM has, with the parser that replaces it."""
    used = parser_names(template, tool_calls=tool_calls, reasoning=reasoning)
    requested = (_CALLS, tool_calls), (_REASONING, reasoning)
    return tuple(
        f"{names.flag}: vLLM's {name!r} is not supported: "
        + ("the chat template shows no other" if own == NONE else f"{own!r} replaces it")
        for (names, name), own in zip(requested, used, strict=True)
        if name is not None and names.own_name(name) is None
    )


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a flag's parsers: ours, their aliases, those that only vLLM has, and signs."""

    flag: str
    own: frozenset[str]
    listed: tuple[str, ...]
    aliases: Mapping[str, str]
    others: frozenset[str]
    signs: tuple[tuple[str, str], ...]

    def own_name(self, name: str | None) -> str | None:
        """Return our name of a parser, or None if only vLLM has it; `EngineError` if none has."""
        if name is None:
            return None
        plain = name.lower().replace("-", "_")
        plain = self.aliases.get(plain, plain)
        if plain in self.own:
            return plain
        if plain in self.others:
            return None
        raise EngineError(
            f"{self.flag}: unknown parser {name!r}: use one of {', '.join(self.listed)}"
        )

    def by_sign(self, template: str | None) -> str:
        """Return the name of the parser that a template implies."""
        return next((name for sign, name in self.signs if sign in (template or "")), NONE)


_CALLS = _Names(
    "--tool-call-parser",
    frozenset({*TOOL_CALL_PARSERS, NONE}),
    (*sorted(TOOL_CALL_PARSERS), NONE),
    _TOOL_CALL_ALIASES,
    _OTHER_TOOL_CALL_PARSERS,
    TOOL_CALL_SIGNS,
)
_REASONING = _Names(
    "--reasoning-parser",
    frozenset({*REASONING_PARSERS, *_CHANNELS, NONE}),
    (*sorted(REASONING_PARSERS), NONE),
    _REASONING_ALIASES,
    _OTHER_REASONING_PARSERS,
    REASONING_SIGNS,
)
