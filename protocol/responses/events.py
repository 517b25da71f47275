"""Streamed responses: the chunks of a chat as OpenAI's typed events."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from ..custom_tools import input_of
from ..reasoning_fields import reasoning_of
from .response import ended_body

# By kind of item: the prefix of its IDs, and the prefix of its events, which names its part.
_IDS: Final = {
    "reasoning": "rs",
    "message": "msg",
    "function_call": "fc",
    "custom_tool_call": "ctc",
}
_PARTS: Final = {"reasoning": "reasoning_text", "message": "output_text"}
_FUNCTION_CALL: Final = ("function_call", "arguments")
# By field of a call: the prefix of its events.
_CALLS: Final = {"arguments": "function_call_arguments", "input": "custom_tool_call_input"}


class ResponseEvents:
    """Events of one response; `body` is the response without output, `name` is in its items' IDs.

    Calls of `custom_tools` have an input instead of arguments. Each event has its number. The last
    one contains the whole response.
    """

    def __init__(
        self, body: Mapping[str, Any], name: str, custom_tools: Collection[str] = ()
    ) -> None:
        self._body = body
        self._name = name
        self._custom_tools = custom_tools
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the last item
        self._logprobs: list[Mapping[str, Any]] = []  # of tokens whose text may follow
        self._warnings: set[str] = set()
        self._events: list[dict[str, Any]] = []
        self._number = 0
        self._finish_reason: str | None = None
        self._usage: Mapping[str, Any] = {}

    def add(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a chunk of the chat."""
        if not self._number:
            self._emit("response.created", response=self._body)
            self._emit("response.in_progress", response=self._body)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"]:
            self._logprobs += (choice.get("logprobs") or {}).get("content") or ()
            self._add_delta(choice["delta"])
            self._finish_reason = choice["finish_reason"] or self._finish_reason
            self._warnings.update(choice.get("warnings") or ())
        return self._pop_events()

    def end(self) -> list[dict[str, Any]]:
        """Return the last events, with the whole response."""
        is_truncated = self._finish_reason == "length"
        self._close("incomplete" if is_truncated else "completed")
        response = ended_body(self._body, self._items, self._usage, is_truncated=is_truncated)
        if self._warnings:
            response["warnings"] = sorted(self._warnings)
        self._emit(f"response.{response['status']}", response=response)
        return self._pop_events()

    def _add_delta(self, delta: Mapping[str, Any]) -> None:
        text, reasoning, calls = delta.get("content"), reasoning_of(delta), delta.get("tool_calls")
        if not text and (reasoning or calls):
            self._logprobs.clear()
        if reasoning:
            self._add_text("reasoning", reasoning)
        if text or (text == "" and not self._items):
            self._add_text("message", text)
        for call in calls or ():
            self._add_call(call)

    def _add_text(self, kind: str, text: str) -> None:
        if not self._items or self._items[-1]["type"] != kind:
            if self._items and not (text := text.lstrip("\n")):
                return  # it separates blocks of one kind, which are items here
            own = ("summary", []) if kind == "reasoning" else ("role", "assistant")
            self._open(kind, **dict[str, Any]([own]), content=[])
            self._items[-1]["content"].append(_new_part(kind))
            self._emit_item("response.content_part.added", content_index=0, part=_new_part(kind))
        self._texts.append(text)
        fields: dict[str, Any] = {}
        if kind == "message":
            fields["logprobs"] = _logprobs_of(text, self._logprobs)
            self._items[-1]["content"][0]["logprobs"] += fields["logprobs"]
            self._logprobs.clear()
        if text:
            name = f"response.{_PARTS[kind]}.delta"
            self._emit_item(name, content_index=0, delta=text, **fields)

    def _add_call(self, call: Mapping[str, Any]) -> None:
        """Add a call, or more arguments of the last one; the input of a custom tool comes whole."""
        function, arguments = call["function"], call["function"]["arguments"]
        if "id" in call:
            is_custom = function["name"] in self._custom_tools
            kind, field = ("custom_tool_call", "input") if is_custom else _FUNCTION_CALL
            self._open(kind, call_id=call["id"], name=function["name"], **{field: ""})
        self._texts.append(arguments)
        if arguments and "arguments" in self._items[-1]:
            self._emit_item(f"response.{_CALLS['arguments']}.delta", delta=arguments)

    def _open(self, kind: str, **fields: Any) -> None:
        """End the last item, and begin one."""
        self._close("completed")
        place = len(self._items)
        name = f"{_IDS[kind]}_{self._name}_{place}"
        item = {"id": name, "type": kind, **fields, "status": "in_progress"}
        self._items.append(item)
        shown = {**item, "content": []} if "content" in item else {**item}
        self._emit("response.output_item.added", output_index=place, item=shown)

    def _close(self, status: str) -> None:
        """End the last item, if there is one."""
        if not self._items:
            return
        item = self._items[-1]
        item["status"] = status
        text = "".join(self._texts)
        self._texts.clear()
        if "input" in item:
            item["input"] = input_of(text)
            name = f"response.{_CALLS['input']}"
            if item["input"]:
                self._emit_item(f"{name}.delta", delta=item["input"])
            self._emit_item(f"{name}.done", input=item["input"])
        elif "arguments" in item:
            item["arguments"] = text
            fields = {name: item[name] for name in ("name", "arguments")}
            self._emit_item(f"response.{_CALLS['arguments']}.done", **fields)
        else:
            [part] = item["content"]
            part["text"] = text
            fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            self._emit_item(f"response.{part['type']}.done", content_index=0, **fields)
            self._emit_item("response.content_part.done", content_index=0, part=part)
        self._emit("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _emit_item(self, kind: str, **fields: Any) -> None:
        place = len(self._items) - 1
        self._emit(kind, item_id=self._items[-1]["id"], output_index=place, **fields)

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def _pop_events(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events


def _new_part(kind: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": ""}
    return part if kind == "reasoning" else {**part, "annotations": [], "logprobs": []}


def matched_logprobs(
    text: str, logprobs: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]] | None:
    """Return the log-probabilities of the tokens that are a text, without those of marks and ends.

    None if no tokens are exactly this text.
    """
    data, place, matched = text.encode(), 0, []
    for each in logprobs:
        token = bytes(each["bytes"])
        if token and data.startswith(token, place):
            matched.append(each)
            place += len(token)
    return matched if place == len(data) else None


def _logprobs_of(text: str, logprobs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the log-probabilities of a text's tokens, which may have more space around them."""
    matched = matched_logprobs(text, logprobs)
    if matched is not None:
        return matched
    data = text.encode()
    tokens = [bytes(each["bytes"]) for each in logprobs]
    return [
        each
        for each, token in zip(logprobs, tokens, strict=True)
        if token and (token.strip() or token) in data
    ]
