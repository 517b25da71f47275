"""Harmony parser: gpt-oss's channels of reasoning, function calls and final answer.

`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.f
<|constrain|>json<|message|>{…}<|call|>`, `<|channel|>final<|message|>…<|return|>`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from .call_grammar import NAME, TEXT, CallSyntax
from .json_text import members
from .text_stream import ParserCoroutine, TextStream
from .tool_calls import UNREAD, stream_call

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADS = (_START, _CHANNEL)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class Harmony:
    """Parses the Harmony format; a `ToolCallParser` that also parses reasoning."""

    marks = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
    final = f"{_CHANNEL}final{_MESSAGE}"

    def syntax_for(self, template: str) -> CallSyntax:
        """Return the call syntax of every template: one call, after reasoning and preambles."""
        del template
        begins = f"{_ENDS[0]}{_START}assistant"
        return CallSyntax(
            head=f"{_CHANNEL}commentary to=functions.{NAME} {_CONSTRAIN}json{_MESSAGE}",
            between=None,
            introduces=tuple(
                f"{_CHANNEL}{name}{_MESSAGE}{TEXT}{begins}" for name in ("analysis", "commentary")
            ),
            says=f"{self.final}{TEXT}",
        )

    def read(self, stream: TextStream) -> ParserCoroutine:
        """Parse one message after the other; text without a header is content."""
        while True:
            mark = yield from stream.forward_until((*_HEADS, *_ENDS), stream.emit_content)
            if mark is None:
                return
            if mark in _HEADS:
                yield from self._message(stream, mark)

    def _message(self, stream: TextStream, mark: str) -> ParserCoroutine:
        begin = stream.base - len(mark)
        head, body = yield from stream.read_until((_MESSAGE, *_ENDS))
        head = mark + head
        if body != _MESSAGE:
            stream.discard()
            return
        channel, recipient = _CHANNEL_NAME.search(head), _RECIPIENT.search(head)
        if recipient is not None:
            yield from _call(stream, recipient[1])
        elif channel is not None and channel[1] == "analysis":
            stream.start_reasoning()
            yield from _body(stream, stream.emit_reasoning)
            stream.end_reasoning()
            stream.reasoning_spans.append((begin, stream.base))
        else:
            stream.start_content()
            yield from _body(stream, stream.emit_content)


def _body(stream: TextStream, sink: Callable[[str], None]) -> ParserCoroutine:
    """Emit a message, whose end may be missing before the next one."""
    stream.discard()
    mark = yield from stream.forward_until((*_ENDS, _START), sink)
    if mark == _START:
        stream.push_back(mark)


def _call(stream: TextStream, name: str) -> ParserCoroutine:
    ends = (*_ENDS, _START)
    stream.discard()
    stream.call_ends = ends
    yield from stream.skip_space()
    if (yield from stream_call(stream, name)) is not None:
        mark = yield from stream.forward_until(ends, stream.emit_content)
        if mark == _START:
            stream.push_back(mark)
        return
    text, mark = yield from stream.read_until(ends)
    try:
        members(text.strip() or "{}")
    except ValueError:
        stream.warn(UNREAD)
        stream.start_content()
        stream.emit_content(text)
    else:
        stream.emit_call(name, text.strip() or "{}")
    stream.discard()
    if mark == _START:
        stream.push_back(mark)


HARMONY = Harmony()
