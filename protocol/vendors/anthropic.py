"""Anthropic's Messages API: requests as chats.

A part or field that has no counterpart stays as it is, so that the chat's validation names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from ..json_printing import json_text
from .error_names import ErrorNames, Origin

_SYSTEM: Final = "system"
# Fields that are read by name, and those without an effect on the answer.
_READ: Final = ("system", "stop_sequences", "tools", "tool_choice", "thinking", "output_config")
_DROPPED: Final = (
    *("metadata", "service_tier", "cache_control", "anthropic_version", "anthropic_beta"),
    *("betas", "container", "context_management", "inference_geo", "output_format"),
    *("diagnostics", "speed", "user_profile_id", "workspace_id"),
    # A chat's fields for several answers and for log-probabilities, which a message cannot contain.
    *("n", "best_of", "logprobs", "top_logprobs", "logprob_token_ids"),
    *("prompt_logprobs", "logprob_start_len"),
)
_RESULT: Final = "tool_result"
# Types of an assistant's blocks that are not parts of its chat message.
_NO_PARTS: Final = ("tool_use", "thinking", "redacted_thinking")
# Fields of a chat, by which its errors name those of a request for a message.
_NAMES: Final = ErrorNames(
    {
        "stop": "stop_sequences",
        "thinking_token_budget": "thinking.budget_tokens",
        "thinkingConfig": "thinking",
        "response_format.json_schema.schema": "output_config.format.schema",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "prompt": "messages",
    }
)
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def chat_of_message(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat request of a request for a message."""
    get = body.get
    others = {name: body[name] for name in body if name not in (*_READ, *_DROPPED)}
    chat = {name: value for name, value in others.items() if value is not None}
    messages = get("messages")
    if isinstance(messages, list):
        system = [] if get("system") in (None, "", []) else [_message("system", get("system"))]
        chat["messages"] = system + [each for message in messages for each in _messages(message)]
        if _is_prefix(messages[-1] if messages else None):
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if get("stop_sequences"):
        chat["stop"] = get("stop_sequences")
    if isinstance(tools := get("tools"), list):
        chat["tools"] = [*map(_tool, tools)]
    elif tools is not None:
        chat["tools"] = tools
    if (choice := get("tool_choice")) is not None:
        chat |= _tool_choice(choice)
    return chat | _output(body) | _thinking(get("thinking"))


def error_of_message(text: str, body: Any) -> str:
    """Return an error of a request's chat with the names and places of the request.

    Without its `body`, places are those of the chat.
    """
    return message_error_at(text, [*message_origins(body)] if isinstance(body, Mapping) else ())


def message_error_at(text: str, origins: Sequence[Origin]) -> str:
    """Return an error of a chat with the names and places of its request."""
    return _NAMES.apply(text, origins)


def message_origins(body: Mapping[str, Any]) -> Iterator[Origin]:
    """Yield the origin of each message of a request's chat."""
    if body.get(_SYSTEM) not in (None, "", []):
        yield Origin(_SYSTEM, _SYSTEM, ())
    messages = body.get("messages")
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        place, content = f"messages.{number}", None
        if isinstance(message, dict) and message.get("role"):
            content = message.get("content")
        if not isinstance(content, list):
            yield Origin(place, f"{place}.content", ())
            continue
        kinds = [block.get("type") if isinstance(block, dict) else None for block in content]
        if message["role"] == "assistant":
            parts = [i for i, kind in enumerate(kinds) if kind not in _NO_PARTS]
            yield Origin(place, f"{place}.content", parts)
            continue
        for i, kind in enumerate(kinds):
            if kind == _RESULT:
                result = f"{place}.content.{i}"
                yield Origin(result, f"{result}.content", ())
        others = [i for i, kind in enumerate(kinds) if kind != _RESULT]
        if others or not content:
            yield Origin(place, f"{place}.content", others)


def _messages(message: Any) -> Iterator[Any]:
    """Yield the chat messages of a message: each tool result is one."""
    role = message.get("role") if isinstance(message, dict) else None
    content = message["content"] if role and "content" in message else None
    if not isinstance(content, list):
        yield message
        return
    if role == "assistant":
        yield _assistant(content)
        return
    parts = []
    for block in content:
        if isinstance(block, dict) and block.get("type") == _RESULT:
            result = _message("tool", _result(block))
            yield {**result, "tool_call_id": block.get("tool_use_id")}
        else:
            parts.append(block)
    if parts or not content:
        yield _message(role, parts)


def _result(block: Mapping[str, Any]) -> Any:
    """Return the content of a tool result; that of an error begins with the word."""
    content = block.get("content") or ""
    if block.get("is_error") is not True:
        return content
    match content:
        case str(text):
            return f"Error: {text}"
        case [{"type": "text", "text": str(text)}, *others]:
            return [{"type": "text", "text": f"Error: {text}"}, *others]
        case [*blocks]:
            return [{"type": "text", "text": "Error:"}, *blocks]
    return content


def _assistant(content: list[Any]) -> dict[str, Any]:
    parts, calls, thoughts = [], [], []
    for block in content:
        match block:
            case {"type": "tool_use", "name": name}:
                function = {"name": name, "arguments": json_text(block.get("input", {}))}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "redacted_thinking"}:
                pass
            case _:
                parts.append(block)
    message = _message("assistant", parts) if parts else {"role": "assistant", "content": None}
    if not parts and not calls:
        message["content"] = ""
    calling = {"tool_calls": calls} if calls else {}
    return message | calling | ({"reasoning": "\n".join(thoughts)} if thoughts else {})


def _message(role: Any, content: Any) -> dict[str, Any]:
    """Return a chat message; a single text is a string, which every template takes."""
    if isinstance(content, list):
        content = [*map(_part, content)]
        if len(content) == 1 and isinstance(content[0], dict) and content[0].get("type") == "text":
            content = content[0].get("text")
    return {"role": role, "content": content}


def _part(block: Any) -> Any:
    match block:
        case {"type": "text", "text": text}:
            return {"type": "text", "text": text}
        case {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case {"type": "image", "source": {"type": "url", "url": url}}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "document", "source": {"type": "base64", "media_type": kind, "data": data}}:
            return {"type": "file", "file": {"file_data": f"data:{kind};base64,{data}"}}
        case {"type": "document", "source": {"type": "url", "url": url}}:
            return {"type": "file", "file": {"file_url": url}}
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            about = [block.get(name) for name in ("title", "context")]
            texts = [*(each for each in about if isinstance(each, str)), text]
            return {"type": "text", "text": "\n\n".join(texts)}
    return block


def _is_prefix(message: Any) -> bool:
    """Return whether the answer continues a message, which is the assistant's and ends as text."""
    match message:
        case {"role": "assistant", "content": str(text)}:
            return bool(text)
        case {"role": "assistant", "content": [*_, {"type": "text"}]}:
            return True
    return False


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        return tool
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    if "input_schema" in tool:
        function["parameters"] = tool["input_schema"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Any) -> dict[str, Any]:
    if not isinstance(choice, dict):
        return {"tool_choice": choice}
    chosen: Any = _CHOICES.get(str(choice.get("type")), choice)
    if choice.get("type") == "tool":
        chosen = {"type": "function", "function": {"name": choice.get("name")}}
    parallel = choice.get("disable_parallel_tool_use")
    return {"tool_choice": chosen} | ({"parallel_tool_calls": False} if parallel else {})


def _thinking(thinking: Any) -> dict[str, Any]:
    match thinking:
        case None | {"type": "adaptive" | "between_tools"}:
            return {}
        case {"type": "disabled"}:
            return {"reasoning_effort": "none"}
        case {"type": "enabled", "budget_tokens": budget}:
            return {"thinking_token_budget": budget}
        case dict() if thinking:
            return {"thinking_token_budget": thinking}
    return {"thinkingConfig": thinking}


def _output(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format and the effort of the output."""
    config = body.get("output_config")
    form = config.get("format") if isinstance(config, dict) else config
    form = body.get("output_format") if form is None else form
    output: dict[str, Any] = {}
    match form:
        case {"type": "json_schema", "schema": schema}:
            named = {"name": "output", "schema": schema, "strict": True}
            output["response_format"] = {"type": "json_schema", "json_schema": named}
        case None:
            pass
        case _:
            output["response_format"] = form
    if isinstance(config, dict) and config.get("effort") is not None:
        output["reasoning_effort"] = config["effort"]
    return output
