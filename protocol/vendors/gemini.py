"""Gemini's `generateContent`: requests as chats, and answers of chats in its form.

Names may be in camel case or snake case. A part or field that has no counterpart stays as it is, so
that the chat's validation names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Final

from ..json_printing import json_text
from ..parts import AUDIO_URL, FILE, IMAGE_URL
from ..reasoning_fields import reasoning_of
from .anthropic_answers import arguments_of, call_text
from .error_names import ErrorNames, Origin

_PARAMETERS: Final = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "candidateCount": "n",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "responseLogprobs": "logprobs",
    "logprobs": "top_logprobs",
}
# Fields of a chat, by which its errors name those of a request for contents.
_NAMES: Final = ErrorNames(
    {
        **{name: f"generationConfig.{own}" for own, name in _PARAMETERS.items()},
        "thinking_token_budget": "generationConfig.thinkingConfig.thinkingBudget",
        "reasoning_effort": "generationConfig.thinkingConfig.thinkingLevel",
        "response_format.json_schema.schema": "generationConfig.responseSchema",
        "response_format": "generationConfig.responseMimeType",
        "tool_choice": "toolConfig",
        "messages": "contents",
        "prompt": "contents",
    }
)
_SYSTEM: Final = "systemInstruction"
# Fields that are read by name, and those without an effect on the answer.
_READ: Final = ("contents", _SYSTEM, "generationConfig", "tools", "toolConfig")
_DROPPED: Final = ("safetySettings", "labels", "store")
_CONFIG_READ: Final = (
    *("responseMimeType", "responseSchema", "responseJsonSchema", "thinkingConfig"),
    "responseModalities",
)
# Types of outputs that need no response format, or that are read by name.
_TYPES: Final = (None, "text/plain", "application/json")
_DATA: Final = frozenset(("text", "inlineData", "fileData", "functionCall", "functionResponse"))
"""Fields of a part, which has one of them."""

_MODES: Final = {"AUTO": "auto", "ANY": "required", "NONE": "none"}
_FINISH_REASONS: Final = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
# The codes of gRPC.
_CODES: Final = {400: 3, 401: 16, 403: 7, 404: 5, 429: 8, 503: 14}
_INTERNAL: Final = 13
_ENUM: Final = "text/x.enum"
# Keywords of 64-bit integers, which JSON of protocol buffers prints as strings.
_COUNTS: Final = frozenset(
    f"{end}{name}" for end in ("min", "max") for name in ("Items", "Length", "Properties")
)
_DIGITS: Final = re.compile("[0-9]{1,18}")
_SNAKE: Final = re.compile(r"_([a-z])")


def chat_of_contents(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request of a request for contents."""
    fields = _camel(request)
    config = _camel(fields.get("generationConfig"))
    chat = {name: value for name, value in fields.items() if name not in (*_READ, *_DROPPED)}
    if isinstance(model := chat.get("model"), str):
        chat["model"] = model.removeprefix("models/")
    for name, value in config.items():
        if name not in _CONFIG_READ:
            chat[_PARAMETERS.get(name, name)] = value
    if not isinstance(given := fields.get("generationConfig"), Mapping | None):
        chat["generationConfig"] = given
    chat |= _output(config)
    contents = fields.get("contents")
    if not isinstance(contents, list):
        contents = [{"parts": [{"text": contents}]}] if isinstance(contents, str) else contents
    chat["messages"] = _all_messages(fields.get(_SYSTEM), contents)
    tools = fields.get("tools")
    if isinstance(tools, list):
        chat["tools"] = [each for tool in tools for each in _tools(tool)]
    elif tools is not None:
        chat["tools"] = tools
    return chat | _tool_choice(fields.get("toolConfig"))


def error_of_contents(text: str, request: Mapping[str, Any]) -> str:
    """Return an error of a request's chat with the names and places of the request."""
    return contents_error_at(text, contents_origins(request))


def contents_error_at(text: str, origins: Sequence[Origin]) -> str:
    """Return an error of a chat with the names and places of its request."""
    return _NAMES.apply(text, origins)


def contents_origins(request: Mapping[str, Any]) -> list[Origin]:
    """Return the origin of each message of a request's chat."""
    fields = _camel(request)
    given = fields.get("contents")
    system = Origin(_SYSTEM, f"{_SYSTEM}.parts", ())
    origins = [system for _ in _all_messages(fields.get(_SYSTEM), [])]
    for number, content in enumerate(given if isinstance(given, list) else ()):
        place = f"contents.{number}"
        origin = Origin(place, f"{place}.parts", _numbers_of_parts(content))
        origins += [origin for _ in _messages(content, _CallIds())]
    return origins


def _numbers_of_parts(content: Any) -> list[int]:
    """Return the numbers of the parts that are parts of a content's chat message."""
    parts = content.get("parts") if isinstance(content, dict) else None
    kinds = [_camel(part) for part in parts] if isinstance(parts, list) else []
    others = {"functionCall", "functionResponse", "thought"}
    return [number for number, kind in enumerate(kinds) if others.isdisjoint(kind)]


def contents_of_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response with the candidates of a chat completion."""
    usage = body.get("usage") or {}
    thoughts = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    counts = {
        "promptTokenCount": usage.get("prompt_tokens", 0),
        "candidatesTokenCount": usage.get("completion_tokens", 0) - thoughts,
        "totalTokenCount": usage.get("total_tokens", 0),
    }
    return {
        "candidates": [
            {
                "content": {"parts": _answer_parts(choice["message"]), "role": "model"},
                "finishReason": _FINISH_REASONS.get(choice["finish_reason"], "STOP"),
                "index": choice["index"],
            }
            for choice in body["choices"]
        ],
        "usageMetadata": counts | ({"thoughtsTokenCount": thoughts} if thoughts else {}),
        "modelVersion": body["model"],
        "responseId": body["id"],
    }


def contents_error(status_code: int, message: str) -> dict[str, Any]:
    """Return an error in Gemini's form."""
    return {
        "code": _CODES.get(status_code, 3 if status_code < 500 else _INTERNAL),
        "message": message,
    }


def _camel(value: Any) -> dict[str, Any]:
    """Return an object with names in camel case; an empty one for another value."""
    if not isinstance(value, Mapping):
        return {}
    return {_SNAKE.sub(lambda match: match[1].upper(), name): each for name, each in value.items()}


def _all_messages(system: Any, contents: Any) -> Any:
    if not isinstance(contents, list):
        return contents
    if system and not isinstance(system, Mapping):
        system = {"parts": system}
    messages = [*_messages(_camel(system) | {"role": "system"}, _CallIds())] if system else []
    call_ids = _CallIds()
    for content in contents:
        messages += _messages(content, call_ids)
    return messages


class _CallIds:
    """IDs of the calls of a conversation."""

    def __init__(self) -> None:
        self._numbers = count()
        self._open: dict[str, list[Any]] = {}  # of calls without a response, by function

    def of_call(self, name: str, given: Any) -> Any:
        """Return the ID of a call, which is numbered if it has none."""
        call_id = given or f"call_{next(self._numbers)}"
        self._open.setdefault(name, []).append(call_id)
        return call_id

    def of_response(self, name: str, given: Any) -> Any:
        """Return the ID of a response: by default that of the function's next open call."""
        open_ids = self._open.get(name) or [f"call_{name}"]
        if given and given != open_ids[0]:
            return given
        return open_ids.pop(0)


def _messages(content: Any, call_ids: _CallIds) -> Iterator[Any]:
    """Yield the chat messages of a content: each function response is one."""
    parts = content.get("parts") if isinstance(content, dict) else None
    parts = [parts] if isinstance(parts, dict | str) else parts
    if not isinstance(parts, list):
        yield content
        return
    message = _Message("assistant" if content.get("role") == "model" else content.get("role"))
    for part in [_camel(part) or part for part in parts]:
        match part:
            case dict() if len(_DATA & part.keys()) > 1:
                message.parts.append(part)
            case {"functionResponse": {"name": str(name)} as result}:
                call_id = call_ids.of_response(name, result.get("id"))
                text = json_text(result.get("response") or {})
                yield {"role": "tool", "tool_call_id": call_id, "content": text}
            case {"functionCall": {"name": str(name)} as call}:
                call_id = call_ids.of_call(name, call.get("id"))
                function = {"name": name, "arguments": json_text(call.get("args") or {})}
                message.calls.append({"id": call_id, "type": "function", "function": function})
            case {"thought": True, "text": str(text)}:
                message.thoughts.append(text)
            case _:
                message.parts.append(_part(part))
    yield from message.as_chat()


class _Message:
    """Parts of a chat message."""

    def __init__(self, role: Any) -> None:
        self._role = role or "user"
        self.parts: list[Any] = []
        self.calls: list[dict[str, Any]] = []
        self.thoughts: list[str] = []

    def as_chat(self) -> list[dict[str, Any]]:
        """Return the message, unless it is empty; a single text is a string."""
        if not (self.parts or self.calls or self.thoughts):
            return []
        content: Any = self.parts or None
        if len(self.parts) == 1 and isinstance(self.parts[0], dict):
            part = self.parts[0]
            content = part["text"] if part.get("type") == "text" else content
        message = {"role": self._role, "content": content}
        if self.calls:
            message["tool_calls"] = self.calls
        if self.thoughts:
            message["reasoning"] = "\n".join(self.thoughts)
        return [message]


def _part(part: Any) -> Any:
    match part:
        case str(text) | {"text": text}:
            return {"type": "text", "text": text}
        case {"inlineData": dict(data)}:
            given = _camel(data)
            kind = given.get("mimeType")
            return _media(kind, f"data:{kind};base64,{given.get('data')}")
        case {"fileData": dict(data)}:
            given = _camel(data)
            return _media(given.get("mimeType"), given.get("fileUri"))
    return part


def _media(kind: Any, url: Any) -> dict[str, Any]:
    """Return the part of an image, a document or a recording of this MIME type."""
    if kind == "application/pdf":
        return {"type": FILE, FILE: {"file_url": url}}
    name = AUDIO_URL if str(kind).startswith("audio/") else IMAGE_URL
    return {"type": name, name: {"url": url}}


def _tools(tool: Any) -> Iterator[Any]:
    fields = _camel(tool)
    declarations = fields.pop("functionDeclarations", None)
    if not isinstance(declarations, list):
        yield tool
        return
    others = {name: value for name, value in fields.items() if value is not None}
    if others:
        yield others
    for declaration in declarations:
        given = _camel(declaration)
        function: dict[str, Any] = {
            name: given[name] for name in ("name", "description") if name in given
        }
        if "parametersJsonSchema" in given:
            function["parameters"] = given["parametersJsonSchema"]
        elif "parameters" in given:
            function["parameters"] = _json_schema(given["parameters"])
        yield {"type": "function", "function": function}


def _tool_choice(tool_config: Any) -> dict[str, Any]:
    given = _camel(tool_config).get("functionCallingConfig")
    config = _camel(given)
    for value in (tool_config, given):
        if not isinstance(value, Mapping | None):
            return {"tool_choice": value}
    if "mode" not in config:
        return {}
    mode, names = (
        _MODES.get(str(config["mode"]), config["mode"]),
        config.get("allowedFunctionNames"),
    )
    if not isinstance(names, list) or not names:
        return {"tool_choice": mode}
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    allowed = {"mode": mode, "tools": tools}
    return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}


def _output(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format and modalities of the output, and the limit of its thoughts."""
    output: dict[str, Any] = {}
    schema = config.get("responseJsonSchema")
    if schema is None and config.get("responseSchema") is not None:
        schema = _json_schema(config["responseSchema"])
    if schema is not None:
        named = {"name": "response", "schema": schema, "strict": True}
        output["response_format"] = {"type": "json_schema", "json_schema": named}
    elif config.get("responseMimeType") == "application/json":
        output["response_format"] = {"type": "json_object"}
    if config.get("responseMimeType") == _ENUM:
        choices = schema.get("enum") if isinstance(schema, dict) else None
        output["response_format"] = {"type": _ENUM}  # refused by name without choices
        if isinstance(choices, list):
            output = {"structured_outputs": {"choice": choices}}
    elif config.get("responseMimeType") not in _TYPES:
        output["response_format"] = {"type": config["responseMimeType"]}
    modalities = config.get("responseModalities")
    if isinstance(modalities, list):
        modalities = [str(each).lower() for each in modalities]
    if modalities not in (None, [], ["text"]):
        output["modalities"] = modalities
    return output | _thinking(config.get("thinkingConfig"))


def _thinking(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping | None):
        return {"thinkingConfig": given}
    thinking = _camel(given)
    level, budget = thinking.get("thinkingLevel"), thinking.get("thinkingBudget")
    if budget == 0:
        return {"reasoning_effort": "none"}
    if budget is not None:
        return {"thinking_token_budget": budget}
    if level is None or level == "THINKING_LEVEL_UNSPECIFIED":
        return {}
    return {"reasoning_effort": level.lower() if isinstance(level, str) else level}


def _json_schema(schema: Any) -> Any:
    """Return the JSON schema of a schema in OpenAPI's form, whose types are in upper case."""
    if isinstance(schema, list):
        return [*map(_json_schema, schema)]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for name, value in _camel(schema).items():
        if name in {"properties", "$defs", "defs"} and isinstance(value, dict):
            found[name] = {key: _json_schema(each) for key, each in value.items()}
        elif name in {"items", "anyOf", "additionalProperties"}:
            found[name] = _json_schema(value)
        elif name == "type" and isinstance(value, str):
            found["type"] = value.lower()
        elif name in _COUNTS and isinstance(value, str) and _DIGITS.fullmatch(value):
            found[name] = int(value)
        elif name not in {"nullable", "propertyOrdering"}:
            found[name] = value
    return _with_null(found) if schema.get("nullable") is True else found


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    found = dict(schema)
    if isinstance(kind := schema.get("type"), str):
        found["type"] = [kind, "null"]
    for name, null in (("enum", None), ("anyOf", {"type": "null"})):
        if isinstance(values := schema.get(name), list):
            found[name] = [*values, null]
    return found


def _answer_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    if reasoning := reasoning_of(message):
        parts.append({"text": reasoning, "thought": True})
    if text := message.get("content"):
        parts.append({"text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        name, arguments = function["name"], arguments_of(function["arguments"])
        if arguments is None:
            parts.append({"text": call_text(name, function["arguments"])})
        else:
            parts.append({"functionCall": {"id": call["id"], "name": name, "args": arguments}})
    return parts
