"""Stop strings that may span tokens: watched byte by byte, in constant memory."""

from __future__ import annotations

from collections.abc import Sequence

from engine.text.tokenizer import Tokenizer


class StopStrings:
    """Watches one sequence for the first of its stop strings; a `StopText`.

    UTF-8 keeps its place: the bytes of one text lie in those of another only where its characters
    do. So the search is in bytes and needs no token to end at a character. A match that ends
    before `min_tokens` tokens is none. A special token that is written like a stop string ends the
    sequence too, though its text is skipped.
    """

    __slots__ = (
        "_min_tokens",
        "_num_bytes",
        "_num_tokens",
        "_skip_special_tokens",
        "_special_stops",
        "_stops",
        "_tail",
        "_tokenizer",
        "_window",
        "match",
    )

    def __init__(
        self,
        stops: Sequence[str],
        tokenizer: Tokenizer,
        *,
        min_tokens: int = 0,
        skip_special_tokens: bool = True,
    ) -> None:
        self._stops = [(stop, stop.encode()) for stop in stops]
        self._window = max(len(data) for _, data in self._stops) - 1
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._skip_special_tokens = skip_special_tokens
        self._special_stops = {
            token_id: stop
            for stop in stops
            if skip_special_tokens and (token_id := tokenizer.special_id(stop)) is not None
        }
        self._num_tokens = 0
        self._num_bytes = 0
        self._tail = b""
        self.match: tuple[int, int] | None = None  # the match's first byte and the one after it

    def push(self, token_id: int) -> str | None:
        """Append one generated token and return the stop string that is now complete, if any.

        Of several that become complete at once it is the one that begins first.
        """
        self._num_tokens += 1
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return self._push_special(token_id)
        tail, piece = self._tail, self._tokenizer.piece(token_id)
        data = tail + piece
        found = None
        if self._num_tokens >= self._min_tokens:
            found = self._first_match(data, len(tail))
        start = self._num_bytes - len(tail)
        self._num_bytes += len(piece)
        self._tail = data[-self._window :] if self._window else b""
        if found is None:
            return None
        stop, position, length = found
        self.match = (start + position, start + position + length)
        return stop

    def _push_special(self, token_id: int) -> str | None:
        stop = self._special_stops.get(token_id)
        if stop is None or self._num_tokens < self._min_tokens:
            return None
        self.match = (self._num_bytes, self._num_bytes)
        return stop

    def _first_match(self, data: bytes, num_old_bytes: int) -> tuple[str, int, int] | None:
        """Return the earliest match that ends in the new bytes: stop string, start, length."""
        first = None
        for stop, wanted in self._stops:
            position = data.find(wanted, max(0, num_old_bytes - len(wanted) + 1))
            if position >= 0 and (first is None or position < first[1]):
                first = (stop, position, len(wanted))
        return first
