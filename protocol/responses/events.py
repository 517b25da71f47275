"""Streamed responses: the chunks of a chat as OpenAI's typed events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .response import OutputItems, ended_body, reasoning_part, text_part

# The type of a part, and the prefix of its events.
_EVENTS = {"reasoning_text": "response.reasoning_text", "output_text": "response.output_text"}


class ResponseEvents:
    """Events of one response; `body` is the response without output, `name` is in its items' IDs.

    Each event has its number. The last one contains the whole response.
    """

    def __init__(self, body: Mapping[str, Any], name: str) -> None:
        self._body = body
        self._output = OutputItems(name)
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
            self._add_delta(choice["delta"], (choice.get("logprobs") or {}).get("content") or [])
            self._finish_reason = choice["finish_reason"] or self._finish_reason
        return self._taken()

    def end(self) -> list[dict[str, Any]]:
        """Return the last events, with the whole response."""
        is_truncated = self._finish_reason == "length"
        self._close("incomplete" if is_truncated else "completed")
        response = ended_body(
            self._body, self._output.items, self._usage, is_truncated=is_truncated
        )
        self._emit(f"response.{response['status']}", response=response)
        return self._taken()

    def _add_delta(self, delta: Mapping[str, Any], logprobs: Sequence[Any]) -> None:
        if delta.get("reasoning"):
            self._add_text("reasoning", reasoning_part(), delta["reasoning"])
        text = delta.get("content")
        if text or (text == "" and not self._output.items):
            self._add_text("message", text_part(), text, logprobs)
        elif logprobs and self._output.items and self._item["type"] == "message":
            self._item["content"][0]["logprobs"] += logprobs  # of the token that ends the text
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            if "name" in function:
                self._close("completed")
                self._open(self._output.call(call["id"], function["name"]))
            if function["arguments"]:
                self._item["arguments"] += function["arguments"]
                self._emit_item(
                    "response.function_call_arguments.delta", delta=function["arguments"]
                )

    def _add_text(
        self, kind: str, new_part: dict[str, Any], text: str, logprobs: Sequence[Any] = ()
    ) -> None:
        if not self._output.items or self._item["type"] != kind:
            self._close("completed")
            add = self._output.reasoning if kind == "reasoning" else self._output.message
            self._open(add())
            self._item["content"].append(new_part)
            self._emit_item("response.content_part.added", content_index=0, part={**new_part})
        part = self._item["content"][0]
        part["text"] += text
        further: dict[str, Any] = {}
        if kind == "message":
            part["logprobs"] += logprobs
            further["logprobs"] = [*logprobs]
        if text:
            self._emit_item(
                f"{_EVENTS[part['type']]}.delta", content_index=0, delta=text, **further
            )

    @property
    def _item(self) -> dict[str, Any]:
        """The item that is being written."""
        return self._output.items[-1]

    def _open(self, item: dict[str, Any]) -> None:
        self._emit(
            "response.output_item.added",
            output_index=len(self._output.items) - 1,
            item={**item, "content": []} if "content" in item else {**item},
        )

    def _close(self, status: str) -> None:
        """End the item that is being written, if there is one."""
        if not self._output.items:
            return
        item = self._item
        item["status"] = status
        if "arguments" in item:
            self._emit_item(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        else:
            part = item["content"][0]
            words = {"text": part["text"]}
            if "logprobs" in part:
                words["logprobs"] = part["logprobs"]
            self._emit_item(f"{_EVENTS[part['type']]}.done", content_index=0, **words)
            self._emit_item("response.content_part.done", content_index=0, part=part)
        place = len(self._output.items) - 1
        self._emit("response.output_item.done", output_index=place, item=item)

    def _emit_item(self, kind: str, **fields: Any) -> None:
        place = len(self._output.items) - 1
        self._emit(kind, item_id=self._item["id"], output_index=place, **fields)

    def _emit(self, kind: str, **fields: Any) -> None:
        self._events.append({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1

    def _taken(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events
