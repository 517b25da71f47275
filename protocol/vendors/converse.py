"""Bedrock's Converse form, which Amazon's models share: requests as chats, and answers in it.

It has the parts of Anthropic's messages under other names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from ..json_bodies import load_json
from ..json_printing import json_text
from ..parts import AUDIO_URL, INPUT_AUDIO
from .anthropic import chat_of_message, message_error_at, message_origins
from .anthropic_answers import message_of_chat
from .error_names import ErrorNames, Origin

_PARAMETERS: Final = {
    "maxTokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "stopSequences": "stop_sequences",
}
# Fields of a request for a message, by which errors name those of Converse's form.
_NAMES: Final = ErrorNames(
    {
        **{name: f"inferenceConfig.{own}" for own, name in reversed(_PARAMETERS.items())},
        "tools": "toolConfig.tools",
        "tool_choice": "toolConfig.toolChoice",
        "output_config.format.schema": "outputConfig.textFormat.structure.jsonSchema.schema",
        "output_config.effort": "outputConfig.effort",
    }
)
_ADDITIONAL: Final = "additionalModelRequestFields"
_OUTPUT: Final = "outputConfig"
# Fields that are read by name, and those without an effect on the answer.
_READ: Final = ("messages", "system", "inferenceConfig", "toolConfig", _ADDITIONAL, _OUTPUT)
_DROPPED: Final = ("schemaVersion", "requestMetadata", "performanceConfig", "serviceTier")
_BLOCKS: Final = frozenset(
    ("text", "image", "document", "video", "audio", "toolUse", "toolResult", "reasoningContent")
)
"""Fields of a block, which has one of them."""


def is_converse(body: Mapping[str, Any]) -> bool:
    """Return whether a request has Converse's form, whose parts have no `type`."""
    match body:
        case {"inferenceConfig": _} | {"toolConfig": _} | {"schemaVersion": _}:
            return True
        case {"messages": [{"content": [dict(part), *_]}, *_]}:
            return "type" not in part and not _BLOCKS.isdisjoint(part)
    return False


def chat_of_converse(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request of a request in Converse's form."""
    return chat_of_message(_message_body(body))


def error_of_converse(text: str, body: Mapping[str, Any]) -> str:
    """Return an error of a request's chat with the names and places of the request."""
    return converse_error_at(text, [*converse_origins(body)])


def converse_error_at(text: str, origins: Sequence[Origin]) -> str:
    """Return an error of a chat with the names and places of its request."""
    return _NAMES.apply(message_error_at(text, origins))


def converse_origins(body: Mapping[str, Any]) -> Iterator[Origin]:
    """Yield the origin of each message of a request's chat."""
    return message_origins(_message_body(body))


def _message_body(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for a message of Anthropic's."""
    others = body.keys() - {*_READ, *_DROPPED}
    message = {name: value for name, value in body.items() if name in others}
    extra = _parameters(_ADDITIONAL, body.get(_ADDITIONAL), {})
    for config in (body.get("inferenceConfig"), extra.pop("inferenceConfig", None)):
        message |= _parameters("inferenceConfig", config, _PARAMETERS)
    message |= extra | _output(body.get(_OUTPUT))
    message["messages"] = _each(body.get("messages"), _message)
    message["system"] = _each(body.get("system"), _block)
    tools = body.get("toolConfig")
    if isinstance(tools, dict):
        message["tools"] = _each(tools.get("tools"), _tool)
        match tools.get("toolChoice"):
            case {"tool": {"name": name}}:
                message["tool_choice"] = {"type": "tool", "name": name}
            case {"any": _}:
                message["tool_choice"] = {"type": "any"}
            case None | {"auto": _}:
                pass
            case choice:
                message["tool_choice"] = choice
    elif tools is not None:
        message["tools"] = tools
    return message


def _output(config: Any) -> dict[str, Any]:
    """Return the format and the effort of the output; a configuration of another form stays."""
    match config:
        case None:
            return {}
        case {"textFormat": None, **others}:
            return _output(others)
        case {
            "textFormat": {
                "type": "json_schema",
                "structure": {"jsonSchema": {"schema": schema}},
            },
            **others,
        } if others.keys() <= {"effort"}:
            form = {"type": "json_schema", "schema": _schema(schema)}
            return {"output_config": {"format": form, **others}}
        case {"effort": _, **others} if not others:
            return {"output_config": config}
    return {_OUTPUT: config}


def _schema(schema: Any) -> Any:
    """Return a schema, which Converse has as a JSON text; a text that is invalid stays."""
    if isinstance(schema, str):
        with suppress(ValueError):
            return load_json(schema.encode())
    return schema


def _parameters(name: str, config: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the parameters in a field, under these names; a value that has none stays there."""
    if isinstance(config, dict):
        return {names.get(each) or each: value for each, value in config.items()}
    return {} if config is None else {name: config}


def converse_of_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response of a chat completion in Converse's form."""
    message = message_of_chat(body)
    usage = body.get("usage") or {}
    content = [_answer_block(block) for block in message["content"]]
    return {
        "output": {"message": {"role": "assistant", "content": content}},
        "stopReason": message["stop_reason"],
        "usage": {
            "inputTokens": usage.get("prompt_tokens", 0),
            "outputTokens": usage.get("completion_tokens", 0),
            "totalTokens": usage.get("total_tokens", 0),
        },
    }


def _each(values: Any, translated: Any) -> Any:
    """Return the translated values of a list, without marks of a cache."""
    if not isinstance(values, list):
        return values
    return [translated(value) for value in values if not _is_cache_point(value)]


def _is_cache_point(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() == {"cachePoint"}


def _message(message: Any) -> Any:
    if not isinstance(message, dict) or "content" not in message:
        return message
    return {**message, "content": _each(message["content"], _block)}


def _block(block: Any) -> Any:
    if isinstance(block, dict) and len(_BLOCKS & block.keys()) > 1:
        return block
    match block:
        case {"text": text}:
            return {"type": "text", "text": text}
        case {"json": value}:
            return {"type": "text", "text": json_text(value)}
        case {"toolUse": {"toolUseId": call_id, "name": name, "input": given}}:
            return {"type": "tool_use", "id": call_id, "name": name, "input": given}
        case {"toolResult": {"toolUseId": call_id, "content": content} as result}:
            found = _each(content, _block)
            is_error = result.get("status") == "error"
            shown = {"tool_use_id": call_id, "content": found, "is_error": is_error}
            return {"type": "tool_result", **shown}
        case {"reasoningContent": {"reasoningText": {"text": text}}}:
            return {"type": "thinking", "thinking": text}
    return _media(block)


def _media(block: Any) -> Any:
    match block:
        case {"image": {"source": {"s3Location": {"uri": url}}}}:
            return {"type": "image", "source": {"type": "url", "url": url}}
        case {"document": {"format": "pdf", "source": {"s3Location": {"uri": url}}}}:
            return {"type": "document", "source": {"type": "url", "url": url}}
        case {"audio": {"source": {"s3Location": {"uri": url}}}}:
            return {"type": AUDIO_URL, AUDIO_URL: {"url": url}}
        case {"image": {"format": kind, "source": {"bytes": data}}}:
            source = {"type": "base64", "media_type": f"image/{kind}", "data": data}
            return {"type": "image", "source": source}
        case {"document": {"format": "pdf", "source": {"bytes": data}}}:
            source = {"type": "base64", "media_type": "application/pdf", "data": data}
            return {"type": "document", "source": source}
        case {"audio": {"format": kind, "source": {"bytes": data}}}:
            return {"type": INPUT_AUDIO, INPUT_AUDIO: {"data": data, "format": kind}}
    return block


def _tool(tool: Any) -> Any:
    match tool:
        case {"toolSpec": {"name": name, "inputSchema": {"json": schema}} as spec}:
            described = {key: spec[key] for key in ("description", "strict") if key in spec}
            return {"name": name, **described, "input_schema": schema}
    return tool


def _answer_block(block: Mapping[str, Any]) -> dict[str, Any]:
    match block["type"]:
        case "thinking":
            return {"reasoningContent": {"reasoningText": {"text": block["thinking"]}}}
        case "tool_use":
            use = {"toolUseId": block["id"], "name": block["name"], "input": block["input"]}
            return {"toolUse": use}
    return {"text": block["text"]}
