"""Anthropic's Messages API: the chunks of a streamed chat as its events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..reasoning_fields import reasoning_of
from .anthropic_answers import arguments_of, call_text, message_id, message_usage, stop_fields

_CALL = "call"  # a block that is not sent before its end


class MessageEvents:
    """Events of one message; each has its name as `type`.

    A call is sent whole: invalid arguments make it a text.
    """

    def __init__(self) -> None:
        self._has_begun = False
        self._num_blocks = 0
        self._kind: str | None = None  # of the open block
        self._call: dict[str, Any] = {}
        self._arguments: list[str] = []  # of the open call
        self._has_calls = False
        self._stop: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._choice: Mapping[str, Any] | None = None  # with the finish reason
        self._usage: Mapping[str, Any] = {}

    def add(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of a chunk of the chat."""
        self._usage = chunk.get("usage") or self._usage
        if not self._has_begun:
            self._has_begun = True
            message = {
                "id": message_id(chunk["id"]),
                "type": "message",
                "role": "assistant",
                "model": chunk["model"],
                "content": [],
                **self._stop,
                "usage": message_usage(self._usage),
            }
            yield {"type": "message_start", "message": message}
        for choice in chunk["choices"]:
            yield from self._deltas(choice["delta"])
            if choice.get("finish_reason"):
                self._choice = choice

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the last events."""
        yield from self._close()
        if self._choice is not None:
            self._stop = stop_fields(self._choice, has_calls=self._has_calls)
        yield {"type": "message_delta", "delta": self._stop, "usage": message_usage(self._usage)}
        yield {"type": "message_stop"}

    def _deltas(self, delta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        if reasoning := reasoning_of(delta):
            yield from self._open("thinking", thinking="", signature="")
            yield self._delta("thinking_delta", thinking=reasoning)
        if text := delta.get("content"):
            yield from self._open("text", text="")
            yield self._delta("text_delta", text=text)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if function.get("name"):
                yield from self._close()
                self._kind = _CALL
                self._call = {"id": call["id"], "name": function["name"], "input": {}}
                self._arguments.clear()
            self._arguments.append(function.get("arguments") or "")

    def _open(self, kind: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Begin a block, unless the open one is of this kind."""
        if self._kind == kind:
            return
        yield from self._close()
        self._kind = kind
        block = {"type": kind, **fields}
        yield {"type": "content_block_start", "index": self._num_blocks, "content_block": block}

    def _open_call(self) -> Iterator[dict[str, Any]]:
        """Begin the block of a call that has ended, with its content."""
        self._kind = None
        arguments = "".join(self._arguments)
        if arguments_of(arguments) is None:
            yield from self._open("text", text="")
            yield self._delta("text_delta", text=call_text(self._call["name"], arguments))
            return
        self._has_calls = True
        yield from self._open("tool_use", **self._call)
        if arguments:
            yield self._delta("input_json_delta", partial_json=arguments)

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._kind == _CALL:
            yield from self._open_call()
        if self._kind is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks}
            self._num_blocks += 1
            self._kind = None

    def _delta(self, kind: str, **fields: str) -> dict[str, Any]:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
