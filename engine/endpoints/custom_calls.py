"""Streamed calls of custom tools: their inputs in place of arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from tidemill.protocol.custom_tools import InputStream


class CustomCalls:
    """The calls of one choice, of which some are of custom tools with these names."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._index = 0
        self._input: InputStream | None = None  # of the last call, if its tool is a custom one

    def add(self, call: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield new output of a function's call as that of its tool."""
        index, function = call["index"], call["function"]
        name = function.get("name")
        if name is not None:
            yield from self.end()
            self._index = index
            self._input = InputStream() if name in self._names else None
        if self._input is None:
            yield call
            return
        text = self._input.add(function["arguments"])
        if name is not None:
            custom = {"name": name, "input": text}
            yield {"index": index, "id": call["id"], "type": "custom", "custom": custom}
        elif text:
            yield {"index": index, "custom": {"input": text}}

    def end(self) -> Iterator[dict[str, Any]]:
        """Yield the rest of the last call's input, if any is left."""
        rest = "" if self._input is None else self._input.end()
        self._input = None
        if rest:
            yield {"index": self._index, "custom": {"input": rest}}
