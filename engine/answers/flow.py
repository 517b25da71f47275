"""A text that comes in stretches, read by generators as if it were all there.

A generator that needs more text yields, and goes on once there is some or the text has ended. What
it decides never hangs on how much happened to be there: so it reads a text in the same way however
it is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from engine.answers.answer import CallPiece, Piece

Waiting = Generator[None, None, None]
"""Reads on, and yields whenever it waits for text."""

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[A-Za-z0-9_.:/-]*")
_MAX_WORD_CHARS = 1_000
_UNKNOWN = "The model called `{}`, which is none of the tools."
_ONLY_ONE = "The model made several calls; `parallel_tool_calls` is false: the first alone stands."


class Flow:
    """The text so far, how far it was read, and what came of it that was not told yet.

    `text[at:]` is unread, `base` characters came before `text`. `thinking` has the stretches of the
    whole text in which the model thought, with their marks. `tools` has the schemas of what may be
    called, by name, and `types` is for what readers find out of those. An answer that
    `is_held` to a grammar has calls only where that has them.
    """

    __slots__ = (
        "_ids",
        "_is_single",
        "_num_calls",
        "_pieces",
        "_said",
        "_thoughts",
        "_warned",
        "at",
        "base",
        "has_ended",
        "is_held",
        "text",
        "thinking",
        "tools",
        "types",
    )

    def __init__(
        self,
        ids: Callable[[int], str],
        *,
        tools: Mapping[str, Mapping[str, Any]],
        is_single: bool = False,
        is_held: bool = False,
    ) -> None:
        self._ids = ids
        self.is_held = is_held
        self.tools = tools
        self.types: dict[str, Any] = {}
        self._is_single = is_single
        self.text = ""
        self.at = 0
        self.base = 0
        self.has_ended = False
        self.thinking: list[tuple[int, int]] = []
        self._pieces: list[Piece] = []
        self._thoughts = _Trimmed("\r\n")
        self._said = _Trimmed()
        self._num_calls = 0
        self._warned: set[str] = set()

    # What generators read.

    def peek(self, size: int) -> Generator[None, None, str]:
        """Return the next characters, fewer only at the end of the text."""
        while len(self.text) - self.at < size and not self.has_ended:
            yield
        return self.text[self.at : self.at + size]

    def takes(self, wanted: str) -> Generator[None, None, bool]:
        """Move past what is written here, if it is `wanted`."""
        while True:
            there = self.text[self.at : self.at + len(wanted)]
            if there == wanted:
                self.at += len(wanted)
                return True
            if self.has_ended or not wanted.startswith(there):
                return False
            yield

    def takes_any(self, wanted: Sequence[str]) -> Generator[None, None, str | None]:
        """Move past the first of `wanted` that is written here, and return it."""
        for mark in wanted:
            if (yield from self.takes(mark)):
                return mark
        return None

    def word(self) -> Generator[None, None, str]:
        """Move past a name, and return it."""
        while True:
            match = _WORD.match(self.text, self.at)
            assert match is not None  # nothing is a match, too
            is_whole = match.end() < len(self.text) or self.has_ended
            if is_whole or len(match[0]) > _MAX_WORD_CHARS:
                self.at = match.end()
                return match[0]
            yield

    def skip_space(self) -> Waiting:
        """Move past white space."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None  # nothing is a match, too
            self.at = match.end()
            if self.at < len(self.text) or self.has_ended:
                return
            yield

    def until(self, marks: Sequence[str]) -> Generator[None, None, tuple[str, str | None]]:
        """Move past the first of the marks, and return what stood before it, and it.

        At the end of a text without one, that is the rest and None.
        """
        start = self.at
        looked = start
        while True:
            place, mark = first_of(marks, self.text, looked)
            if mark is not None:
                self.at = place + len(mark)
                return self.text[start:place], mark
            if self.has_ended:
                self.at = len(self.text)
                return self.text[start:], None
            looked = max(start, len(self.text) - max(map(len, marks)) + 1)
            yield

    def pass_on(
        self, marks: Sequence[str], sink: Callable[[str], None]
    ) -> Generator[None, None, str | None]:
        """Hand what comes to `sink` up to the first of the marks; move past that and return it.

        What may be the beginning of a mark is held back.
        """
        while True:
            place, mark = first_of(marks, self.text, self.at)
            end = place if mark is not None else len(self.text)
            if mark is None and not self.has_ended:
                end -= _begun(marks, self.text, self.at)
            sink(self.text[self.at : end])
            self.at = end + len(mark or "")
            self.drop()
            if mark is not None or self.has_ended:
                return mark
            yield

    def drop(self) -> None:
        """Forget the text that was read: nobody will go back to it."""
        self.base += self.at
        self.text = self.text[self.at :]
        self.at = 0

    def unread(self, mark: str) -> None:
        """Go back before a mark that `pass_on` or `until` has moved past, and that was dropped."""
        self.text = mark + self.text
        self.base -= len(mark)

    # What they tell.

    def think(self, text: str) -> None:
        """Tell more of what the model thinks."""
        if shown := self._thoughts.more(text):
            self._pieces.append(Piece(reasoning=shown))

    def end_thinking(self) -> None:
        """Leave out white space at the end of a thought, and lines before what comes next."""
        self._thoughts.cut(next_strips="\r\n")
        self._said.cut(next_strips="\r\n")

    def part_thinking(self) -> None:
        """Begin another thought, on a line of its own."""
        if self._thoughts.has_any:
            self._pieces.append(Piece(reasoning="\n"))

    def part_saying(self) -> None:
        """Begin another part of the answer, on a line of its own."""
        if self._said.has_any:
            self._said.cut(next_strips=None)
            self._pieces.append(Piece(content="\n"))

    def say(self, text: str) -> None:
        """Tell more of the answer."""
        if shown := self._said.more(text):
            self._pieces.append(Piece(content=shown))

    def call(self, name: str, arguments: str, call_id: str | None = None) -> None:
        """Tell a whole call; white space around it is no part of the answer."""
        self._said.cut(next_strips=None)
        if self._is_single and self._num_calls:
            self.warn(_ONLY_ONE)
            return
        if name not in self.tools:
            self.warn(_UNKNOWN.format(name))
        index = self._num_calls
        piece = CallPiece(index, arguments, name, call_id or self._ids(index))
        self._pieces.append(Piece(calls=(piece,)))
        self._num_calls += 1

    def warn(self, words: str) -> None:
        """Tell once that something is not as it should be."""
        if words not in self._warned:
            self._warned.add(words)
            self._pieces.append(Piece(warning=words))

    def finish(self) -> None:
        """Tell the white space that no call followed."""
        if shown := self._said.rest():
            self._pieces.append(Piece(content=shown))

    def told(self) -> list[Piece]:
        """Return what is certain now, once."""
        pieces, self._pieces = self._pieces, []
        return pieces


class FlowReader:
    """Drives what reads a flow; a `Reader`."""

    __slots__ = ("_flow", "_reading")

    def __init__(self, flow: Flow, reading: Waiting) -> None:
        self._flow = flow
        self._reading = reading

    def push(self, text: str) -> Sequence[Piece]:
        """Read the next stretch, and return what is certain now."""
        if not text:
            return ()
        self._flow.text += text
        next(self._reading, None)
        return self._flow.told()

    def end(self) -> Sequence[Piece]:
        """Return the rest, once the text has ended."""
        self._flow.has_ended = True
        for _ in self._reading:
            raise AssertionError("a generator waits for text after its end")
        self._flow.finish()
        return self._flow.told()

    @property
    def thinking(self) -> Sequence[tuple[int, int]]:
        """Return from which to which character of the text the model was thinking."""
        return self._flow.thinking


class _Trimmed:
    """A text that is told without the white space before what is not part of it."""

    __slots__ = ("_held", "_strips", "has_any")

    def __init__(self, strips: str | None = "") -> None:
        self.has_any = False
        self._held = ""
        self._strips = strips

    def more(self, text: str) -> str:
        """Return what of it is certain: white space is held until something follows."""
        if self._strips != "":
            text = text.lstrip(self._strips)
        if not text:
            return ""
        self._strips = ""
        whole = self._held + text
        shown = whole.rstrip()
        self._held = whole[len(shown) :]
        self.has_any = self.has_any or bool(shown)
        return shown

    def cut(self, *, next_strips: str | None) -> None:
        """Leave out what is held; of what comes next, strip these (None: all white space)."""
        self._held, self._strips = "", next_strips

    def rest(self) -> str:
        """Return what is held."""
        return self._held


def first_of(marks: Sequence[str], text: str, start: int) -> tuple[int, str | None]:
    """Return where the first of the marks stands, and which; none may begin as another does."""
    first: tuple[int, str | None] = (len(text), None)
    for mark in marks:
        # Only before what was found: a text may be long, and be looked through again and again.
        place = text.find(mark, start, first[0] + len(mark) - 1 if first[1] else len(text))
        if place >= 0:
            first = place, mark
    return first


def _begun(marks: Sequence[str], text: str, start: int) -> int:
    """Return how many characters at the text's end may be the beginning of a mark."""
    longest = min(max(map(len, marks), default=1) - 1, len(text) - start)
    for size in range(longest, 0, -1):
        tail = text[len(text) - size :]
        if any(mark.startswith(tail) for mark in marks):
            return size
    return 0
