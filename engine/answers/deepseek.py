"""Calls of tools as DeepSeek's models write them: one by one between marks, all between others."""

from __future__ import annotations

from collections.abc import Generator

from engine.answers.calls import Calls, MarkedCalls, Said, following_object
from engine.answers.flow import Flow
from engine.answers.written import NAME, Written


def _deepseek(flow: Flow) -> Calls:
    said = []
    while True:
        yield from flow.skip_space()
        if (yield from flow.takes("<｜tool▁calls▁end｜>")):
            break
        is_next = yield from flow.takes("<｜tool▁call▁begin｜>")
        if not is_next:
            break
        call = yield from _deepseek_call(flow)
        if call is None:
            return None
        said.append(call)
    return said or None


def _deepseek_call(flow: Flow) -> Generator[None, None, Said | None]:
    """Read a call: `function`, name and a block of JSON, or with V3.1 the name and JSON alone."""
    yield from flow.skip_space()
    name = yield from flow.word()
    if not (yield from flow.takes("<｜tool▁sep｜>")):
        return None
    yield from flow.skip_space()
    is_block = (yield from flow.peek(1)) != "{"
    if is_block:
        name = yield from flow.word()
        yield from flow.skip_space()
        if not (yield from flow.takes("```json")):
            return None
        yield from flow.skip_space()
    arguments = yield from following_object(flow)
    yield from flow.skip_space()
    if is_block:
        yield from flow.takes("```")
        yield from flow.skip_space()
    has_end = yield from flow.takes("<｜tool▁call▁end｜>")
    if not name or arguments is None or not (has_end or flow.has_ended):
        return None
    return Said(name, arguments)


DEEPSEEK = MarkedCalls(
    ("<｜tool▁calls▁begin｜>",),
    _deepseek,
    Written(
        prefix="<｜tool▁calls▁begin｜>",
        head=f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>",
        tail="<｜tool▁call▁end｜>",
        suffix="<｜tool▁calls▁end｜>",
    ),
    ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    sign="```json",
    writes_with_sign=Written(
        prefix="<｜tool▁calls▁begin｜>",
        head=f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n",
        tail="\n```<｜tool▁call▁end｜>",
        between="\n",
        suffix="<｜tool▁calls▁end｜>",
    ),
)
