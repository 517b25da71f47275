"""Request text: the readable content of a request."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from string import ascii_uppercase
from typing import Any

_PROMPT_FIELDS = ("prompt", "input", "state", "text_1", "query", "queries")


def request_text(body: Mapping[str, Any]) -> str:
    """Return the messages of a request, or its prompt or questions, otherwise its JSON."""
    questions = body.get("questions")
    if isinstance(questions, list) and "input" in body:
        return _decision_text(body, questions)
    messages = body.get("messages")
    if isinstance(messages, list):
        return "\n".join(map(_message_text, messages))
    rules = [body["instructions"]] if isinstance(body.get("instructions"), str) else []
    items = _items(body.get("input"))
    if items and all(isinstance(item, dict) for item in items):  # of a response
        shown = (_message_text(item) if "role" in item else _json(item) for item in items)
        return "\n".join([*rules, *shown])
    for name in _PROMPT_FIELDS:
        if isinstance(prompt := body.get(name), str):
            return "\n".join([*rules, prompt])
    return _json(body)


def _decision_text(body: Mapping[str, Any], questions: Sequence[Any]) -> str:
    """Return a decision as the model reads it, without the labels that depend on the model."""
    given, shown_questions = body["input"], [_question_lines(question) for question in questions]
    shown = given if isinstance(given, str) else "\n".join(map(_message_text, _items(given)))
    before = [body["instructions"]] if isinstance(body.get("instructions"), str) else []
    if body.get("question_layout") != "questions_first":
        each = ("\n".join(["Question: " + lines[0], *lines[1:]]) for lines in shown_questions)
        return "\n\n".join([*before, shown, *each])
    parts = []
    for number, (first, *others) in enumerate(shown_questions, 1):
        name = "Question" if len(shown_questions) == 1 else f"Question {number}"
        parts.append("\n".join([f"{name}: {first}", *others]))
    return "\n\n".join([*before, *parts, f"Input:\n{shown}"])


def _question_lines(question: object) -> list[str]:
    """Return the instructions of a question and a line for each of its options."""
    if not isinstance(question, dict):
        return [_json(question)]
    instructions = question.get("instructions")
    is_text = isinstance(instructions, str)
    lines = [str(instructions) if is_text else " ".join(part_texts(instructions))]
    for field, key in (("choices", "value"), ("levels", "label")):
        for place, option in enumerate(_items(question.get(field))):
            value = option.get(key) if isinstance(option, dict) else option
            text = value if isinstance(value, str) else _json(value)
            description = option.get("description") if isinstance(option, dict) else None
            described = f" ({description})" if description else ""
            label = ascii_uppercase[place : place + 1] if field == "choices" else str(place)
            lines.append(f"{label or '-'}: {text}{described}")
    return lines


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def _message_text(message: object) -> str:
    if not isinstance(message, dict):
        return _json(message)
    content = message.get("content")
    parts = [content] if isinstance(content, str) else [*part_texts(content)]
    parts += map(_json, _items(message.get("tool_calls")))
    return f"{message.get('role')}: {' '.join(parts)}"


def part_texts(content: object) -> Iterator[str]:
    """Yield the texts of a message's parts; a name in brackets for an image or a recording."""
    for part in _items(content):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"]
        else:
            yield f"[{part.get('type') if isinstance(part, dict) else 'part'}]"


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
