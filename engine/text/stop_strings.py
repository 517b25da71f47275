"""Stop strings that may span tokens: matched byte by byte, in constant memory."""

from __future__ import annotations

from dataclasses import dataclass

from .stop_patterns import StopPattern
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class StopStrings:
    """Stop strings and patterns: a text ends at the first match; a `StopText`.

    UTF-8 is self-synchronizing: the bytes of one text occur in those of another only where its
    characters do. So the search is in bytes, across tokens that end inside characters. A match
    within the first `min_tokens` tokens does not count. A special token with the same text as a
    stop string also ends the sequence, even if its text is skipped. `markers` are special tokens
    that are never skipped. A pattern's match stays in the text, up to the end of the token that
    completes it, as in SGLang.
    """

    stops: tuple[str, ...]
    tokenizer: Tokenizer
    patterns: tuple[StopPattern, ...] = ()
    min_tokens: int = 0
    skip_special_tokens: bool = True
    markers: frozenset[int] = frozenset()

    def watch(self) -> StopStringState:
        """Return the matcher of one sequence."""
        return StopStringState(self)

    def kept(self, token_ids: list[int], stop: str, *, with_stop: bool = False) -> bytes:
        """Return the bytes of a text whose last token completed `stop`, up to it or with it."""
        last = token_ids[-1]
        data = self.tokenizer.text_bytes(
            token_ids, skip_special_tokens=self.skip_special_tokens, markers=self.markers
        )
        if self.skips(last) or stop not in self.stops:
            return data
        wanted = stop.encode()
        earliest = len(data) - len(self.tokenizer.piece(last)) - len(wanted) + 1
        start = data.index(wanted, max(0, earliest))
        return data[: start + len(wanted) if with_stop else start]

    def skips(self, token_id: int) -> bool:
        """Return whether a token is skipped in the text."""
        is_special = self.skip_special_tokens and self.tokenizer.is_special(token_id)
        return is_special and token_id not in self.markers


class StopStringState:
    """Matches one sequence against its stop strings."""

    __slots__ = (
        "_min_tokens",
        "_num_tokens",
        "_searches",
        "_special_stops",
        "_stops",
        "_tail",
        "_tokenizer",
        "_wanted",
        "_window",
    )

    def __init__(self, wanted: StopStrings) -> None:
        self._stops = [(stop, stop.encode()) for stop in wanted.stops]
        self._window = max((len(data) for _, data in self._stops), default=1) - 1
        self._searches = [(one.pattern, one.search()) for one in wanted.patterns]
        self._tokenizer = wanted.tokenizer
        self._min_tokens = wanted.min_tokens
        self._wanted = wanted
        self._special_stops = {
            token_id: stop
            for stop in wanted.stops
            if (token_id := self._tokenizer.special_id(stop)) is not None and wanted.skips(token_id)
        }
        self._num_tokens = 0
        self._tail = b""

    def push(self, token_id: int) -> str | None:
        """Append one generated token and return the stop string that is now complete, if any.

        If several are completed at once, it is the one that begins first; patterns come after all
        strings.
        """
        self._num_tokens += 1
        is_early = self._num_tokens < self._min_tokens
        if self._wanted.skips(token_id):
            return None if is_early else self._special_stops.get(token_id)
        piece = self._tokenizer.piece(token_id)
        data = self._tail + piece
        match = None if is_early else self._first_match(data, len(self._tail))
        self._tail = data[-self._window :] if self._window else b""
        ended = [pattern for pattern, search in self._searches if search.push(piece)]
        return ended[0] if match is None and ended and not is_early else match

    def _first_match(self, data: bytes, num_old_bytes: int) -> str | None:
        """Return the earliest stop string among those that end in the new bytes."""
        first = None
        for stop, wanted in self._stops:
            position = data.find(wanted, max(0, num_old_bytes - len(wanted) + 1))
            if position >= 0 and (first is None or position < first[1]):
                first = (stop, position)
        return None if first is None else first[0]
