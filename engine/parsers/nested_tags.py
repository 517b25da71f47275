"""Tool call parser of MiniMax-M3, whose tags follow a namespace mark and may be nested."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from tidemill.protocol.constraints.schema_facts import Facts

from .tagged_calls import ArgumentTypes, CallArguments, CallTags, json_string, json_text, parser_of
from .text_stream import TextStream
from .tool_calls import CallsCoroutine

_SPACE = "]<]minimax[>["
_MAX_DEPTH = 64
_ITEM = "item"  # the tag of an array's items


@dataclass(frozen=True, slots=True)
class NestedTags(CallTags):
    """Tags of calls whose parameters are elements, named like the parameter, with elements in them.

    An element with others in it is an object, or an array if its schema requires one or they are
    items.
    """

    def _parameters(self, stream: TextStream, arguments: CallArguments) -> CallsCoroutine:
        """Parse the elements of a call, and its end."""
        while True:
            yield from stream.skip_space()
            if not (yield from stream.peek(1)) or (yield from stream.accept_end(self.function_end)):
                return arguments.end()
            if not (yield from stream.accept(self.parameter)):
                follows = yield from stream.peek(len(self.closes))
                return arguments.abandon(is_whole=len(follows) == len(self.closes))
            key = yield from stream.read_name()
            if not key or not (yield from stream.accept(">")):
                return arguments.abandon()
            begin = (yield from stream.peek(4)) if arguments.streams else ""
            if begin and arguments.types().is_text(key, begin):
                is_ended = yield from self._stream_element(stream, arguments, key)
            else:
                types = arguments.types()
                value = yield from _value(stream, key, types, types.allowed(key))
                is_ended = value is not None
                if value is not None:
                    arguments.add(key, value)
            if not is_ended:
                return arguments.abandon()

    def _stream_element(
        self, stream: TextStream, arguments: CallArguments, key: str
    ) -> Generator[None, None, bool]:
        """Write a string as it streams; return whether it ends before the end of the text."""
        arguments.add(key, '"')
        end = f"{_SPACE}</{key}>"
        ends = (end, self.function_end, self.closes)
        mark = yield from stream.forward_until(ends, arguments.extend)
        if mark is None:
            return False
        arguments.end_string()
        if mark != end:
            stream.push_back(mark)
        return True


def _value(
    stream: TextStream, name: str, types: ArgumentTypes, allowed: Facts, depth: int = 0
) -> Generator[None, None, str | None]:
    """Read an element after its tag as JSON; None if it is malformed or does not end."""
    text, elements = "", list[tuple[str, str]]()
    is_list = "array" in allowed and "object" not in allowed
    while True:
        part, mark = yield from stream.read_until((_SPACE,))
        text += part
        if mark is None or depth == _MAX_DEPTH:
            return None
        if (yield from stream.accept(f"</{name}>")):
            break
        child = (yield from stream.read_name()) if (yield from stream.accept("<")) else ""
        if not child or not (yield from stream.accept(">")):
            return None
        is_list = is_list or (child == _ITEM and not elements and "array" in allowed)
        inside = types.allowed_in(allowed, len(elements) if is_list else child)
        value = yield from _value(stream, child, types, inside, depth + 1)
        if value is None:
            return None
        elements.append((child, value))
    if elements:
        return None if text.strip() else _container(elements, is_list=is_list)
    if "string" not in allowed and not text.strip() and allowed.keys() & {"array", "object"}:
        return _container([], is_list=is_list)
    return json_text(text, allowed)


def _container(elements: Sequence[tuple[str, str]], *, is_list: bool) -> str:
    """Return elements as a JSON array, or as an object; repeated names make an array in it."""
    if is_list:
        return _array([value for _, value in elements])
    grouped: dict[str, list[str]] = {}
    for name, value in elements:
        grouped.setdefault(name, []).append(value)
    members = (
        f"{json_string(name)}: {values[0] if len(values) == 1 else _array(values)}"
        for name, values in grouped.items()
    )
    return f"{{{', '.join(members)}}}"


def _array(values: Sequence[str]) -> str:
    return f"[{', '.join(values)}]"


MINIMAX_M3 = parser_of(
    NestedTags(
        f"{_SPACE}<tool_call>",
        f"{_SPACE}</tool_call>",
        function=f'{_SPACE}<invoke name="',
        function_end=f"{_SPACE}</invoke>",
        parameter=f"{_SPACE}<",
        name_end='">',
    )
)
