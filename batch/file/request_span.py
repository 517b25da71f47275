"""Span of a request: attributes of its line and its row, by OpenTelemetry's conventions.

The conventions are at https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from tidemill.net.tracing import Attributes, Value, WorkSpan
from tidemill.protocol.contract import Usage
from tidemill.protocol.json_bodies import load_json

from .lines import BOM, RawLine

# Parsing more would block the event loop; the span of a longer request has only its tokens.
_MAX_BYTES: Final = 2**18
_MAX_CHARS: Final = 200
_OPERATIONS: Final = {
    "/chat/completions": "chat",
    "/responses": "chat",
    "/completions": "text_completion",
    "/embeddings": "embeddings",
    "/embed": "embeddings",
}
_NUMBERS: Final = {
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
}

Body = dict[str, Any]


def _as_is(_url: str, body: Body) -> Body:
    return body


def trace_request(
    span: WorkSpan,
    line: RawLine,
    row: bytes,
    usage: Usage | None,
    *,
    is_success: bool,
    started_ns: int,
    with_defaults: Callable[[str, Body], Body] = _as_is,
) -> None:
    """Add the span of a line that has its row, if it is in the sample.

    `with_defaults` returns the body that the line ran with.
    """
    if span.takes(is_success=is_success):
        with suppress(Exception):  # no row depends on its span
            name, attributes = _described(span, line, row, usage, with_defaults)
            error_type = None if is_success else _error_type(row)
            span.add_request(name, started_ns, attributes, error_type)


def _described(
    span: WorkSpan,
    line: RawLine,
    row: bytes,
    usage: Usage | None,
    with_defaults: Callable[[str, Body], Body],
) -> tuple[str, Attributes]:
    """Return the name and the attributes of a request's span."""
    request = _parsed(line.data)
    url, body = _text(request.get("url")), _object(request.get("body"))
    body = with_defaults(url, body) if body else body
    reply = _object(_object(_parsed(row).get("response")).get("body"))
    operation = _operation(url)
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "tidemill",
        "tidemill.line": line.number,
        **_request_attributes(body),
        **_reply_attributes(reply),
        **_usage_attributes(usage),
    }
    if span.captures_content:
        attributes |= _content(body, reply)
    model = attributes.get("gen_ai.request.model")
    return (operation if model is None else f"{operation} {model}"), attributes


def _operation(url: str) -> str:
    """Return the name of an operation; one without a convention has the end of its URL."""
    for ending, name in _OPERATIONS.items():
        if url.endswith(ending):
            return name
    return url.rpartition("/")[2][:_MAX_CHARS] or "unknown"


def _request_attributes(body: Body) -> Attributes:
    attributes: dict[str, Value] = {
        name: body[field]
        for field, name in _NUMBERS.items()
        if isinstance(body.get(field), (int, float)) and not isinstance(body[field], bool)
    }
    if model := _text(body.get("model")):
        attributes["gen_ai.request.model"] = model
    count = body.get("n")
    if isinstance(count, int) and count != 1:
        attributes["gen_ai.request.choice.count"] = count
    return attributes


def _reply_attributes(reply: Body) -> Attributes:
    attributes: dict[str, Value] = {}
    for field, name in (("id", "gen_ai.response.id"), ("model", "gen_ai.response.model")):
        if text := _text(reply.get(field)):
            attributes[name] = text
    reasons = [_text(choice.get("finish_reason")) for choice in _objects(reply.get("choices"))]
    if isinstance(reply.get("output"), list):
        reasons = [_text(reply.get("status"))]
    if any(reasons):
        attributes["gen_ai.response.finish_reasons"] = reasons
    return attributes


def _usage_attributes(usage: Usage | None) -> Attributes:
    if usage is None:
        return {}
    attributes = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
    }
    if usage.cached_tokens:
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if usage.reasoning_tokens:
        attributes["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
    return attributes


def _error_type(row: bytes) -> str:
    """Return the code of a row's error, or its type, or the status; never its message."""
    printed = _parsed(row)
    response = _object(printed.get("response"))
    error = _object(printed.get("error")) or _object(_object(response.get("body")).get("error"))
    error = _object(error.get("error")) or error  # vLLM's dialect
    for field in ("code", "type"):
        if text := _text(error.get(field)):
            return text
    status = response.get("status_code", error.get("code"))
    return str(status) if isinstance(status, int) else "_OTHER"


def _content(body: Body, reply: Body) -> Attributes:
    """Return the messages of a request and its reply; of other content only the type."""
    inputs = [
        {"role": _text(message.get("role")), "parts": [*_parts(message)]}
        for message in _objects(body.get("messages"))
    ]
    if isinstance(prompt := body.get("prompt"), str):
        inputs.append({"role": "user", "parts": [_text_part(prompt)]})
    outputs = []
    for choice in _objects(reply.get("choices")):
        message = _object(choice.get("message")) or {"content": choice.get("text")}
        reason = _text(choice.get("finish_reason"))
        outputs.append({"role": "assistant", "parts": [*_parts(message)], "finish_reason": reason})
    if isinstance(items := reply.get("output"), list):
        given = body.get("input")
        user = [{"role": "user", "content": given}] if isinstance(given, str) else given
        rules = [{"role": "system", "content": body.get("instructions")}]
        inputs = [*_item_messages([*rules, *_objects(user)])]
        outputs = [*_item_messages(items)]
    lists = {"gen_ai.input.messages": inputs, "gen_ai.output.messages": outputs}
    return {name: json.dumps(each, ensure_ascii=False) for name, each in lists.items() if each}


def _item_messages(items: object) -> Iterator[Body]:
    """Yield the items of a response as messages."""
    for item in _objects(items):
        message: Mapping[str, Any] = item
        kind = str(item.get("type"))
        if kind in ("function_call", "custom_tool_call"):
            message = {"tool_calls": [{"id": item.get("call_id"), "function": item}]}
        elif kind.endswith("_output"):
            message = {"content": item.get("output")}
        elif kind == "reasoning":
            texts = (part.get("text") for part in _objects(item.get("content")))
            message = {"reasoning": "\n".join(text for text in texts if isinstance(text, str))}
        role = "tool" if kind.endswith("_output") else "assistant"
        if parts := [*_parts(message)]:
            yield {"role": _text(item.get("role")) or role, "parts": parts}


def _parts(message: Mapping[str, Any]) -> Iterator[Body]:
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if isinstance(reasoning, str):
        yield {"type": "reasoning", "content": reasoning}
    content = message.get("content")
    if isinstance(content, str):
        yield _text_part(content)
    for part in _objects(content):
        is_text = isinstance(part.get("text"), str)
        yield _text_part(part["text"]) if is_text else {"type": _text(part.get("type"))}
    for call in _objects(message.get("tool_calls")):
        function = _object(call.get("function") or call.get("custom"))
        named = {"id": call.get("id"), "name": function.get("name")}
        arguments = function.get("arguments", function.get("input"))  # a custom tool has an input
        yield {"type": "tool_call", **named, "arguments": arguments}


def _text_part(text: str) -> Body:
    return {"type": "text", "content": text}


def _parsed(data: bytes) -> Body:
    """Parse a JSON object; returns an empty one for other or long data."""
    if len(data) > _MAX_BYTES:
        return {}
    with suppress(ValueError):
        return _object(load_json(data.removeprefix(BOM), cache_strings="keys"))
    return {}


def _object(value: object) -> Body:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> list[Body]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _text(value: object) -> str:
    return value[:_MAX_CHARS] if isinstance(value, str) else ""
