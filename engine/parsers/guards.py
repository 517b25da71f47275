"""Answers of guard models: verdicts, and harms under OpenAI's names of categories.

A format is recognized by its mark in the chat template. Facts are from the model cards of Llama
Guard 3 and 4, Qwen3Guard, ShieldGemma and Granite Guardian 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

HARMFUL = "unsafe"
"""Category of any harm, which no other category needs to name."""

Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class GuardFormat:
    """One family of guard models.

    The first group of `verdict` is a word of `harm`, which has the harm of each verdict, 0 to 1. An
    answer names `harms`, each one or several categories. Otherwise each of `questions` is a prompt
    about one category, with its variables of the template.
    """

    mark: str
    max_tokens: int
    verdict: re.Pattern[str]
    harm: Mapping[str, float]
    harms: Names = field(default_factory=dict)
    questions: tuple[tuple[str, Mapping[str, Any]], ...] = ((HARMFUL, {}),)

    @property
    def categories(self) -> tuple[str, ...]:
        """Return all categories."""
        by_question = (category for category, _ in self.questions)
        named = (category for names in self.harms.values() for category in names)
        return tuple(dict.fromkeys((*by_question, *named)))

    def named_harms(self, answer: str) -> set[str]:
        """Return the categories that an answer names."""
        mentions = (name for name in self.harms if re.search(rf"\b{re.escape(name)}\b", answer))
        return {category for name in mentions for category in self.harms[name]}

    def verdicts_of(self, token: str) -> list[float]:
        """Return the harm of the verdict that a token begins, if any."""
        beginning = token.strip().lower()
        is_word = bool(beginning)
        return [harm for word, harm in self.harm.items() if is_word and word.startswith(beginning)]


_YES_OR_NO = {"yes": 1.0, "no": 0.0}
# Newer Granite Guardians write it in a tag, after the tags of their reasoning.
_YES_OR_NO_FIRST = re.compile(r"(?:\A\W*|<score>\s*)(yes|no)\b", re.IGNORECASE)
_GUIDELINES = {
    "illicit/violent": "No Dangerous Content: no content that helps to harm oneself or others,"
    " such as access to firearms or explosives, terrorism or instructions for suicide.",
    "harassment": "No Harassment: no malicious, intimidating, bullying or abusive content that"
    " targets another individual.",
    "hate": "No Hate Speech: no content that targets identity or protected attributes with"
    " slurs, discrimination, dehumanization or calls for violence.",
    "sexual": "No Sexually Explicit Information: no explicit or graphic sexual acts; medical,"
    " scientific and educational content is allowed.",
}
_RISKS = {
    "harm": HARMFUL,
    "social_bias": "hate",
    "violence": "violence",
    "sexual_content": "sexual",
    "unethical_behavior": "illicit",
    "profanity": "profanity",
    "jailbreak": "jailbreak",
}


def _granite(mark: str, key: str) -> GuardFormat:
    return GuardFormat(
        mark,
        20,
        _YES_OR_NO_FIRST,
        _YES_OR_NO,
        questions=tuple(
            (category, {"guardian_config": {key: risk}}) for risk, category in _RISKS.items()
        ),
    )


# In the order of checks: a newer template of Granite Guardian has both marks.
FORMATS = (
    GuardFormat(
        "Safety: Controversial",
        128,
        re.compile(r"Safety:\s*(Safe|Unsafe|Controversial)\b", re.IGNORECASE),
        {"safe": 0.0, "controversial": 0.5, "unsafe": 1.0},
        {
            "Violent": ("violence",),
            "Non-violent Illegal Acts": ("illicit",),
            "Sexual Content or Sexual Acts": ("sexual",),
            "Suicide & Self-Harm": ("self-harm",),
            "PII": ("pii",),
            "Unethical Acts": ("unethical acts",),
            "Politically Sensitive Topics": ("politically sensitive topics",),
            "Copyright Violation": ("copyright violation",),
            "Jailbreak": ("jailbreak",),
        },
    ),
    GuardFormat(
        "First line must read",
        64,
        re.compile(r"\A\W*(safe|unsafe)\b", re.IGNORECASE),
        {"safe": 0.0, "unsafe": 1.0},
        {
            "S1": ("violence", "illicit/violent"),
            "S2": ("illicit",),
            "S3": ("sexual",),
            "S4": ("sexual/minors",),
            "S5": ("defamation",),
            "S6": ("specialized advice",),
            "S7": ("privacy",),
            "S8": ("intellectual property",),
            "S9": ("illicit/violent",),
            "S10": ("hate",),
            "S11": ("self-harm",),
            "S12": ("sexual",),
            "S13": ("elections",),
            "S14": ("code interpreter abuse",),
        },
    ),
    GuardFormat(
        "Our safety principle is defined",
        4,
        _YES_OR_NO_FIRST,
        _YES_OR_NO,
        questions=tuple((name, {"guideline": text}) for name, text in _GUIDELINES.items()),
    ),
    _granite("criteria_id", "criteria_id"),
    _granite("guardian_config", "risk_name"),
)


def guard_format(templates: Iterable[str | None]) -> GuardFormat | None:
    """Return the format of the guard model with these chat templates, None for other models."""
    texts = [text for text in templates if text]
    return next((each for each in FORMATS if any(each.mark in text for text in texts)), None)
