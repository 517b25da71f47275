"""Tool call parser of calls between marks, in a marked section: DeepSeek and Kimi K2."""

from __future__ import annotations

import re
from typing import NamedTuple

from .call_grammar import INDEX, NAME, CallSyntax
from .text_stream import TextStream
from .tool_calls import (
    CallsCoroutine,
    MarkedCallParser,
    RawCall,
    emit_calls,
    parse_object,
    stream_call,
)

_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>.+):[0-9]+")


class SectionMarks(NamedTuple):
    """Marks of a section of calls; `arguments` is the mark between a call's name and its arguments.

    With `has_ids` the name is an id, such as `functions.f:0`.
    """

    opens: str
    call: str
    arguments: str
    call_end: str
    closes: str
    has_ids: bool = False

    def parse_calls(self, stream: TextStream) -> CallsCoroutine:
        """Parse the calls of a section, whose end may be missing."""
        num_calls = 0
        while True:
            yield from stream.skip_space()
            before = stream.position
            if (yield from stream.accept(self.closes)) or not (yield from stream.accept(self.call)):
                return [] if num_calls else None
            calls = yield from self._call(stream)
            if calls is None:
                stream.rewind(before)
                return [] if num_calls else None
            emit_calls(stream, calls)
            num_calls += 1

    def _call(self, stream: TextStream) -> CallsCoroutine:
        """Parse a call: a name and JSON, or in V3's format `function`, the name and JSON."""
        yield from stream.skip_space()
        name = yield from stream.read_name()
        yield from stream.skip_space()
        if not (yield from stream.accept(self.arguments)):
            return None
        yield from stream.skip_space()
        is_block = (yield from stream.peek(1)) != "{"
        if is_block:
            name = yield from stream.read_name()
            yield from stream.skip_space()
            if not (yield from stream.accept("```json")):
                return None
            yield from stream.skip_space()
        call_id = None
        if self.has_ids and (match := _KIMI_ID.fullmatch(name)) is not None:
            name, call_id = match["name"], name
        is_emitted = (yield from stream_call(stream, name, call_id)) is not None
        arguments = None if is_emitted else (yield from parse_object(stream))
        yield from stream.skip_space()
        if is_block:
            yield from stream.accept_end("```", least=1)
            yield from stream.skip_space()
        has_end = yield from stream.accept(self.call_end)
        if is_emitted:
            return []
        if not name or arguments is None or not (has_end or stream.has_ended):
            return None
        return [RawCall(name, arguments, call_id)]


_DEEPSEEK = SectionMarks(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_KIMI = SectionMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    has_ids=True,
)
DEEPSEEK = MarkedCallParser(
    (_DEEPSEEK.opens,),
    _DEEPSEEK.parse_calls,
    CallSyntax(
        prefix=_DEEPSEEK.opens,
        head=f"{_DEEPSEEK.call}{NAME}{_DEEPSEEK.arguments}",
        tail=_DEEPSEEK.call_end,
        suffix=_DEEPSEEK.closes,
    ),
    _DEEPSEEK[1:5],
    sign="```json",
    syntax_with_sign=CallSyntax(
        prefix=_DEEPSEEK.opens,
        head=f"{_DEEPSEEK.call}function{_DEEPSEEK.arguments}{NAME}\n```json\n",
        tail=f"\n```{_DEEPSEEK.call_end}",
        between="\n",
        suffix=_DEEPSEEK.closes,
    ),
)
KIMI = MarkedCallParser(
    (_KIMI.opens,),
    _KIMI.parse_calls,
    CallSyntax(
        prefix=_KIMI.opens,
        head=f"{_KIMI.call}functions.{NAME}:{INDEX}{_KIMI.arguments}",
        tail=_KIMI.call_end,
        suffix=_KIMI.closes,
    ),
    _KIMI[1:5],
)
