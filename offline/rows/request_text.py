"""Request text: the readable content of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

_PROMPT_FIELDS = ("prompt", "input", "state", "text_1", "query", "queries")


def request_text(body: Mapping[str, Any]) -> str:
    """Return the messages of a request, or its prompt, otherwise its JSON."""
    messages = body.get("messages")
    if isinstance(messages, list):
        return "\n".join(map(_message_text, messages))
    for name in _PROMPT_FIELDS:
        if isinstance(prompt := body.get(name), str):
            return prompt
    return _json(body)


def _message_text(message: object) -> str:
    if not isinstance(message, dict):
        return _json(message)
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [*_part_texts(content)]
    calls = message.get("tool_calls")
    parts += map(_json, calls if isinstance(calls, list) else ())
    return f"{message.get('role')}: {' '.join(parts)}"


def _part_texts(content: object) -> Iterator[str]:
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]
        else:  # an image or a recording
            yield f"[{part.get('type') if isinstance(part, dict) else 'part'}]"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
