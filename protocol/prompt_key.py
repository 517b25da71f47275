"""Prompt key: a request's prompt as bytes, which begin alike where what a template renders does.

Equal requests have equal results where these are determined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

from .requests import PROMPT_FIELDS

PROMPTS = (*PROMPT_FIELDS, "file")


def prompt_key(body: Mapping[str, Any]) -> bytes:
    """Return JSON of all that a body's prompt is rendered from, in the order of the rendering."""
    names = [name for name in PROMPTS if name in body]
    # What is rendered before the conversation comes before it here.
    return to_json([body.get("model"), body.get("tools"), *(body[name] for name in names)])


def is_determined(body: Mapping[str, Any]) -> bool:
    """Say whether text that is generated for a body is the same each time: greedy, or by a seed."""
    return body.get("temperature") == 0 or body.get("seed") is not None
