"""Tool call parser of DeepSeek's models: each call between marks, all calls between others."""

from __future__ import annotations

from collections.abc import Generator

from .call_grammar import NAME, CallSyntax
from .text_stream import TextStream
from .tool_calls import CallsCoroutine, MarkedCallParser, RawCall, parse_object


def _deepseek(stream: TextStream) -> CallsCoroutine:
    said = []
    while True:
        yield from stream.skip_space()
        if (yield from stream.accept("<｜tool▁calls▁end｜>")):
            break
        is_next = yield from stream.accept("<｜tool▁call▁begin｜>")
        if not is_next:
            break
        call = yield from _deepseek_call(stream)
        if call is None:
            return None
        said.append(call)
    return said or None


def _deepseek_call(stream: TextStream) -> Generator[None, None, RawCall | None]:
    """Parse a call: `function`, name and a block of JSON, or in V3.1 the name and JSON alone."""
    yield from stream.skip_space()
    name = yield from stream.read_name()
    if not (yield from stream.accept("<｜tool▁sep｜>")):
        return None
    yield from stream.skip_space()
    is_block = (yield from stream.peek(1)) != "{"
    if is_block:
        name = yield from stream.read_name()
        yield from stream.skip_space()
        if not (yield from stream.accept("```json")):
            return None
        yield from stream.skip_space()
    arguments = yield from parse_object(stream)
    yield from stream.skip_space()
    if is_block:
        yield from stream.accept("```")
        yield from stream.skip_space()
    has_end = yield from stream.accept("<｜tool▁call▁end｜>")
    if not name or arguments is None or not (has_end or stream.has_ended):
        return None
    return RawCall(name, arguments)


DEEPSEEK = MarkedCallParser(
    ("<｜tool▁calls▁begin｜>",),
    _deepseek,
    CallSyntax(
        prefix="<｜tool▁calls▁begin｜>",
        head=f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
        tail="<｜tool▁call▁end｜>",
        suffix="<｜tool▁calls▁end｜>",
    ),
    ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    sign="```json",
    syntax_with_sign=CallSyntax(
        prefix="<｜tool▁calls▁begin｜>",
        head=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n",
        tail="\n```<｜tool▁call▁end｜>",
        between="\n",
        suffix="<｜tool▁calls▁end｜>",
    ),
)
