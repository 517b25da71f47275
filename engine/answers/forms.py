"""The forms that models answer in, by their names and by what a model's template shows of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeVar

from engine.answers.bare import LISTED_CALLS, LLAMA_JSON, PYTHONIC
from engine.answers.calls import GRANITE, HERMES, MISTRAL, CallForm
from engine.answers.deepseek import DEEPSEEK
from engine.answers.harmony import HARMONY
from engine.answers.thinking import GRANITE_THINK, MISTRAL_THINK, R1_THINK, THINK, ThinkingForm
from engine.errors import EngineError

_NONE = "none"
_Form = TypeVar("_Form")

# By vLLM's names; SGLang's are below.
CALL_FORMS: Mapping[str, CallForm] = MappingProxyType(
    {
        "deepseek_v3": DEEPSEEK,
        "deepseek_v31": DEEPSEEK,
        "glm45": HERMES,
        "granite": GRANITE,
        "hermes": HERMES,
        "llama3_json": LLAMA_JSON,
        "llama4_json": LLAMA_JSON,
        "llama4_pythonic": PYTHONIC,
        "mistral": MISTRAL,
        "openai": HARMONY,
        "pythonic": PYTHONIC,
        "qwen3_coder": HERMES,
        "qwen3_xml": HERMES,
    }
)
THINKING_FORMS: Mapping[str, ThinkingForm] = MappingProxyType(
    {
        "deepseek_r1": R1_THINK,
        "deepseek_v3": THINK,
        "glm45": THINK,
        "granite": GRANITE_THINK,
        "mistral": MISTRAL_THINK,
        "qwen3": THINK,
    }
)
_OTHER_NAMES = MappingProxyType(
    {
        "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31",
        "gpt_oss": "openai",
        "llama3": "llama3_json",
        "qwen": "hermes",
        "qwen25": "hermes",
    }
)
_CHANNELS = frozenset({"openai_gptoss", "gpt_oss"})
# What a template shows of each, of several the first.
_SHOWN_CALLS = (
    ("<|channel|>", "openai"),
    ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call|>", "granite"),
    ("<tool_call>", "hermes"),
    ('"parameters": dictionary of argument name', "llama3_json"),
    ("func_name1(", "pythonic"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
)
_SHOWN_THINKING = (
    ("[THINK]", "mistral"),
    ("</think>", "qwen3"),
    ("<think>", "qwen3"),
    ("Here is my thought process", "granite"),
)


@dataclass(frozen=True, slots=True)
class AnswerForms:
    """How one model writes its thinking and its calls; None where it does not, as far as is known.

    Channels hold both: then `calls` reads all answers, and there is no form of thinking.
    """

    calls: CallForm | None = None
    thinking: ThinkingForm | None = None
    template: str = field(default="", compare=False, repr=False)

    @property
    def has_channels(self) -> bool:
        """Say whether all that the model writes stands in channels."""
        return self.calls is HARMONY

    @property
    def marks(self) -> tuple[str, ...]:
        """Return what the special tokens of both are written like."""
        calls = () if self.calls is None else self.calls.marks
        thinking = () if self.thinking is None else self.thinking.opens + self.thinking.closes
        return calls + thinking

    @property
    def without_calls(self) -> AnswerForms:
        """Return how answers are read where there are no tools; channels are read in any case."""
        return self if self.has_channels else replace(self, calls=None)

    @property
    def without_thinking(self) -> AnswerForms:
        """Return how answers are read whose thinking stays where it is."""
        return replace(self, thinking=None)

    @property
    def that_must_call(self) -> AnswerForms:
        """Return how answers are read that are held to calls: in a list where no form is known."""
        return self if self.calls is not None else replace(self, calls=LISTED_CALLS)

    @property
    def thinks(self) -> bool:
        """Say whether the model may think before it answers."""
        return self.has_channels or self.thinking is not None


def forms_of(
    template: str | None, *, calls: str | None = None, thinking: str | None = None
) -> AnswerForms:
    """Return the forms by these names (`none` for none), or else those that a template shows.

    Raises `EngineError` for a name that is not known.
    """
    if calls is None:
        calls = _shown(template, _SHOWN_CALLS)
    if thinking is None:
        thinking = _shown(template, _SHOWN_THINKING)
    call_form = _named(CALL_FORMS, calls, "--tool-call-parser")
    if _plain(thinking) in _CHANNELS:
        call_form, thinking = HARMONY, _NONE
    thinking_form = _named(THINKING_FORMS, thinking, "--reasoning-parser")
    return AnswerForms(call_form, None if call_form is HARMONY else thinking_form, template or "")


def check_names(*, calls: str | None, thinking: str | None) -> None:
    """Raise `EngineError` for a name of a form that is not known."""
    forms_of(None, calls=calls, thinking=thinking)


def _shown(template: str | None, signs: tuple[tuple[str, str], ...]) -> str:
    return next((name for sign, name in signs if sign in (template or "")), _NONE)


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _named(forms: Mapping[str, _Form], name: str, flag: str) -> _Form | None:
    plain = _plain(name)
    if plain == _NONE:
        return None
    form = forms.get(plain) or forms.get(_OTHER_NAMES.get(plain, ""))
    if form is None:
        names = ", ".join([*sorted(forms), _NONE])
        raise EngineError(f"{flag} {name} is none of {names}")
    return form
