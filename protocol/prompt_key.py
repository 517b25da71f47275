"""Prompt key: a request's prompt as bytes that share a prefix if the rendered prompts do.

Equal requests have equal results if these are deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from .requests import PROMPT_FIELDS, PROMPT_NAMES

PROMPTS = (*PROMPT_FIELDS, "file")
_QUESTIONS = "questions"
_GENERATING = frozenset({"messages", "prompt", "file", "file_url"})


def prompt_fields(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that a body's prompt is rendered from, in rendering order."""
    names = [name for name in PROMPTS if name in body]
    if _is_decision(body):
        place = 0 if body.get("question_layout") == "questions_first" else len(names)
        names.insert(place, _QUESTIONS)
    return tuple(names)


def prompt_key(body: Mapping[str, Any]) -> bytes:
    """Return JSON of everything that a body's prompt is rendered from, in rendering order."""
    fields = [to_json(body[name]) for name in prompt_fields(body)]
    return b",".join([prompt_head(body), *fields]) + b"]"


def prompt_head(body: Mapping[str, Any]) -> bytes:
    """Return the start of a prompt's key: parameters that are rendered before the conversation."""
    instructions = [body["instructions"]] if "instructions" in body else []
    return to_json([body.get("model"), body.get("tools"), *instructions])[:-1]


def settings_key(body: Mapping[str, Any]) -> bytes:
    """Return JSON of everything in a body except its prompt, in the body's order."""
    return to_json({name: value for name, value in body.items() if name not in PROMPT_NAMES})


def is_determined(body: Mapping[str, Any]) -> bool:
    """Say whether a body's result is deterministic: greedy, with a seed, or a decision's."""
    return body.get("temperature") == 0 or body.get("seed") is not None or _is_decision(body)


def _is_decision(body: Mapping[str, Any]) -> bool:
    return _QUESTIONS in body and _GENERATING.isdisjoint(body)
