"""Streamed text, parsed by coroutines as if it were complete.

A parser that needs more text yields, and resumes once there is more or the text has ended. Its
decisions never depend on the amount that has arrived, so the parts of a text do not affect the
result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from .parsed_output import DeltaMessage, DeltaToolCall

ParserCoroutine = Generator[None, None, None]
"""A parser that yields whenever it waits for text."""

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z0-9_.:/-]*")
_MAX_WORD_CHARS = 1_000
_UNKNOWN = "The model called `{}`, which is not in `tools`."
_ONLY_ONE = (
    "The model made several calls; only the first is returned (`parallel_tool_calls` is false)."
)


class TextStream:
    """The text so far, the parser's position in it, and the deltas not yet returned.

    `text[at:]` is unread; `base` characters came before `text`. `reasoning_spans` are character
    ranges of the whole text, marks included. `tools` maps tool names to argument schemas, and
    `types` caches the argument types that parsers derive from them. An answer that
    `is_constrained` has calls only where its grammar allows them. `call_ends` are the marks that
    end a call with invalid arguments; None where a call is not certain before its end. With
    `needs_tools`, only calls of tools are calls.
    """

    __slots__ = (
        "_content",
        "_ids",
        "_is_after_call",
        "_is_single",
        "_num_calls",
        "_pieces",
        "_reasoning",
        "_takes_arguments",
        "_warned",
        "at",
        "base",
        "call_ends",
        "has_ended",
        "is_constrained",
        "needs_tools",
        "reasoning_spans",
        "text",
        "tools",
        "types",
    )

    def __init__(
        self,
        ids: Callable[[int], str],
        *,
        tools: Mapping[str, Mapping[str, Any]],
        is_single: bool = False,
        is_constrained: bool = False,
    ) -> None:
        self._ids = ids
        self.is_constrained = is_constrained
        self.needs_tools = is_constrained
        self.tools = tools
        self.types: dict[str, Any] = {}
        self._is_single = is_single
        self.text = ""
        self.at = 0
        self.base = 0
        self.has_ended = False
        self.reasoning_spans: list[tuple[int, int]] = []
        self._pieces: list[DeltaMessage] = []
        self._reasoning = _Trimmed("\r\n")
        self._content = _Trimmed()
        self._num_calls = 0
        self._is_after_call = False
        self._takes_arguments = False
        self._warned: set[str] = set()
        self.call_ends: tuple[str, ...] | None = None

    # Input of parsers.

    def peek(self, size: int) -> Generator[None, None, str]:
        """Return the next characters, fewer only at the end of the text."""
        while len(self.text) - self.at < size and not self.has_ended:
            yield
        return self.text[self.at : self.at + size]

    def accept(self, wanted: str) -> Generator[None, None, bool]:
        """Move past `wanted` if it is at this position; return whether it is."""
        while True:
            text = self.text[self.at : self.at + len(wanted)]
            if text == wanted:
                self.at += len(wanted)
                return True
            if self.has_ended or not wanted.startswith(text):
                return False
            yield

    def accept_end(self, wanted: str, *, least: int = 2) -> Generator[None, None, bool]:
        """Move past `wanted` if it is at this position; return whether it is.

        At the end of the text its first `least` characters or more are enough.
        """
        if (yield from self.accept(wanted)):
            return True
        rest = self.text[self.at :]
        if self.has_ended and len(rest) >= least and wanted.startswith(rest):
            self.at = len(self.text)
            return True
        return False

    def accept_any(self, wanted: Sequence[str]) -> Generator[None, None, str | None]:
        """Move past the first of `wanted` at this position, and return it."""
        for mark in wanted:
            if (yield from self.accept(mark)):
                return mark
        return None

    def read_name(self) -> Generator[None, None, str]:
        """Read a name."""
        while True:
            match = _WORD.match(self.text, self.at)
            assert match is not None  # the empty string matches, too
            is_whole = match.end() < len(self.text) or self.has_ended
            if is_whole or len(match[0]) > _MAX_WORD_CHARS:
                self.at = match.end()
                return match[0]
            yield

    def skip_space(self) -> ParserCoroutine:
        """Move past whitespace."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None  # the empty string matches, too
            self.at = match.end()
            if self.at < len(self.text) or self.has_ended:
                return
            yield

    def read_until(self, marks: Sequence[str]) -> Generator[None, None, tuple[str, str | None]]:
        """Move past the first of the marks; return the text before it, and the mark.

        Without a mark, return the rest and None at the end of the text.
        """
        start = self.at
        searched = start
        while True:
            place, mark = find_first(marks, self.text, searched)
            if mark is not None:
                self.at = place + len(mark)
                return self.text[start:place], mark
            if self.has_ended:
                self.at = len(self.text)
                return self.text[start:], None
            searched = max(start, len(self.text) - max(map(len, marks)) + 1)
            yield

    def forward_until(
        self, marks: Sequence[str], sink: Callable[[str], None]
    ) -> Generator[None, None, str | None]:
        """Pass text to `sink` up to the first of the marks; move past it and return it.

        A possible beginning of a mark is held back. At the end of the text it is dropped if it is
        all that follows a call.
        """
        while True:
            place, mark = find_first(marks, self.text, self.at)
            end = place if mark is not None else len(self.text)
            if mark is None and not self.has_ended:
                end -= partial_mark_size(marks, self.text, self.at)
            rest = self.text[self.at : end].lstrip()
            is_cut = mark is None and self.has_ended and self._is_after_call
            if not (is_cut and partial_mark_size(marks, rest, 0) == len(rest)):
                sink(self.text[self.at : end])
            self.at = end + len(mark or "")
            self.discard()
            if mark is not None or self.has_ended:
                return mark
            yield

    def discard(self) -> None:
        """Discard the text that was read."""
        self.base += self.at
        self.text = self.text[self.at :]
        self.at = 0

    @property
    def position(self) -> int:
        """Return the position in the whole text."""
        return self.base + self.at

    def rewind(self, position: int) -> None:
        """Move back to a position of the whole text that has not been discarded."""
        self.at = position - self.base

    def push_back(self, mark: str) -> None:
        """Unread a mark that `forward_until` or `read_until` consumed and discarded."""
        self.text = mark + self.text
        self.base -= len(mark)

    @property
    def has_content(self) -> bool:
        """Return whether content was emitted."""
        return self._content.has_any

    # Output of parsers.

    def emit_reasoning(self, text: str) -> None:
        """Emit more reasoning."""
        if shown := self._reasoning.more(text):
            self._pieces.append(DeltaMessage(reasoning=shown))

    def end_reasoning(self) -> None:
        """Strip whitespace at the end of the reasoning, and newlines before the content."""
        self._reasoning.cut(next_strips="\r\n")
        self._content.cut(next_strips="\r\n")

    def start_reasoning(self) -> None:
        """Start another block of reasoning, on a new line."""
        if self._reasoning.has_any:
            self._pieces.append(DeltaMessage(reasoning="\n"))

    def start_content(self) -> None:
        """Start another block of content, on a new line."""
        if self._content.has_any:
            self._content.cut(next_strips=None)
            self._pieces.append(DeltaMessage(content="\n"))

    def strip_from_content(self, tags: tuple[str, str] | None) -> None:
        """Strip these tags from around the content, which has not started."""
        self._content.tags = tags

    def emit_content(self, text: str) -> None:
        """Emit more content; on a new line after a call."""
        had_any = self._content.has_any
        if shown := self._content.more(text):
            separator = "\n" if self._is_after_call and had_any else ""
            self._is_after_call = False
            self._pieces.append(DeltaMessage(content=separator + shown))

    def emit_call(self, name: str, arguments: str, call_id: str | None = None) -> None:
        """Emit a call; whitespace around it is not content."""
        if held := self._content.rest().rstrip():  # the beginning of a tag
            self._pieces.append(DeltaMessage(content=held))
        self._content.cut(next_strips=None)
        self._is_after_call = True
        self._takes_arguments = not (self._is_single and self._num_calls)
        if not self._takes_arguments:
            self.warn(_ONLY_ONE)
            return
        if name not in self.tools:
            self.warn(_UNKNOWN.format(name))
        index = self._num_calls
        piece = DeltaToolCall(index, arguments, name, call_id or self._ids(index))
        self._pieces.append(DeltaMessage(calls=(piece,)))
        self._num_calls += 1

    def emit_arguments(self, text: str) -> None:
        """Emit more arguments of the last call."""
        if text and self._takes_arguments:
            piece = DeltaToolCall(self._num_calls - 1, text)
            self._pieces.append(DeltaMessage(calls=(piece,)))

    def warn(self, words: str) -> None:
        """Emit a warning, once."""
        if words not in self._warned:
            self._warned.add(words)
            self._pieces.append(DeltaMessage(warning=words))

    def finish(self) -> None:
        """Emit trailing whitespace that is not followed by a call."""
        if shown := self._content.rest():
            self._pieces.append(DeltaMessage(content=shown))

    def pop_deltas(self) -> list[DeltaMessage]:
        """Return the deltas that are certain, once."""
        pieces, self._pieces = self._pieces, []
        return pieces


class StreamParser:
    """Drives a parser over its text stream; a `ChoiceParser`."""

    __slots__ = ("_flow", "_reading")

    def __init__(self, stream: TextStream, reading: ParserCoroutine) -> None:
        self._flow = stream
        self._reading = reading

    def push(self, text: str) -> Sequence[DeltaMessage]:
        """Parse the next piece of text, and return the deltas that are certain."""
        if not text:
            return ()
        self._flow.text += text
        next(self._reading, None)
        return self._flow.pop_deltas()

    def end(self) -> Sequence[DeltaMessage]:
        """Return the last deltas, at the end of the text."""
        self._flow.has_ended = True
        for _ in self._reading:
            raise AssertionError("a generator waits for text after its end")
        self._flow.finish()
        return self._flow.pop_deltas()

    @property
    def reasoning_spans(self) -> Sequence[tuple[int, int]]:
        """Return the character ranges of reasoning in the text."""
        return self._flow.reasoning_spans


class _Trimmed:
    """A text without trailing whitespace, and without certain leading characters.

    `tags` around the text, if any, are stripped, too.
    """

    __slots__ = ("_closes", "_held", "_strips", "has_any", "tags")

    def __init__(self, strips: str | None = "") -> None:
        self.has_any = False
        self.tags: tuple[str, str] | None = None
        self._closes = ""
        self._held = ""
        self._strips = strips

    def more(self, text: str) -> str:
        """Return the certain part: whitespace and tags are held until something follows."""
        if self._strips != "":
            text = text.lstrip(self._strips)
        if not text:
            return ""
        self._strips = ""
        whole = self._held + text
        if self.tags is not None:
            opens, closes = self.tags
            begin = whole.lstrip()
            if begin != opens and opens.startswith(begin):
                self._held = whole
                return ""
            self.tags = None
            if begin.startswith(opens):
                self._held, self._strips, self._closes = "", "\r\n", closes
                return self.more(begin.removeprefix(opens))
        shown = whole.rstrip()
        if self._closes:
            size = partial_mark_size((self._closes,), shown, 0)
            is_closed = shown.endswith(self._closes)
            shown = shown[: len(shown) - (len(self._closes) if is_closed else size)].rstrip()
        self._held = whole[len(shown) :]
        self.has_any = self.has_any or bool(shown)
        return shown

    def cut(self, *, next_strips: str | None) -> None:
        """Drop held whitespace; strip these characters of the next text (None: any space)."""
        self._held, self._strips = "", next_strips

    def rest(self) -> str:
        """Return the held text, which is whitespace or the beginning of a tag."""
        return "" if self._closes and self._held.strip() == self._closes else self._held


def find_first(marks: Sequence[str], text: str, start: int) -> tuple[int, str | None]:
    """Return the place of the first mark, and the mark; no mark may be a prefix of another."""
    first: tuple[int, str | None] = (len(text), None)
    for mark in marks:
        # Only before the last match: a long text may be searched repeatedly.
        place = text.find(mark, start, first[0] + len(mark) - 1 if first[1] else len(text))
        if place >= 0:
            first = place, mark
    return first


def partial_mark_size(marks: Sequence[str], text: str, start: int) -> int:
    """Return the number of characters at the text's end that may begin a mark."""
    longest = min(max(map(len, marks), default=1) - 1, len(text) - start)
    for size in range(longest, 0, -1):
        tail = text[len(text) - size :]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0
