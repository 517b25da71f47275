"""Stop patterns: regular expressions that end a text, matched in time linear in its bytes.

A pattern is an llguidance automaton over bytes, without backtracking; one with too many states is
rejected, either at once or when a text reaches them.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from functools import lru_cache

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from tidemill.protocol.errors import RequestError

_PARAM = "stop_regex"
_MAX_REASON_CHARS = 200
_END = 256


class _Bytes:
    """A vocabulary of the 256 bytes, for a matcher that reads bytes."""

    eos_token_id = bos_token_id = _END
    special_token_ids = (_END,)
    tokens = (*(bytes([byte]) for byte in range(_END)), b"<end>")

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return list(text.encode())


@dataclass(frozen=True, slots=True)
class StopPattern:
    """A compiled pattern; raises `RequestError` for an unsupported one."""

    pattern: str

    def __post_init__(self) -> None:
        """Compile the pattern."""
        if _matcher(self.pattern).is_accepting():
            raise _refusal(self.pattern, "it matches the empty text")

    def search(self) -> PatternSearch:
        """Return the search of one text."""
        return PatternSearch(self.pattern)


class PatternSearch:
    """Searches one text, as a response would show it, for the first end of a match."""

    __slots__ = ("_decoder", "_matcher", "_pattern")

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._matcher = _matcher(pattern).deep_copy()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> bool:
        """Append bytes; return whether a match ends in them.

        Raises `RequestError` if the text drives the pattern into too many states.
        """
        ends = False
        for byte in self._decoder.decode(data).encode():
            if not self._matcher.consume_token(byte):
                raise _refusal(self._pattern, "the text drives it into too many states")
            ends = ends or self._matcher.is_accepting()
        return ends


@lru_cache(maxsize=1)
def _vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Bytes()))


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> LLMatcher:
    """Return the cached matcher of a pattern at the beginning of a text; callers copy it."""
    grammar = LLMatcher.grammar_from_regex(f"(?s:.*)(?:{pattern})")
    matcher = LLMatcher(_vocabulary(), grammar, log_level=0)
    if matcher.is_error():
        raise _refusal(pattern, _reason(matcher.get_error()))
    return matcher


def _reason(error: str) -> str:
    """Return the line of an llguidance error that describes a pattern's fault."""
    lines = [line.strip() for line in error.splitlines()]
    message = next((line for line in lines if line.startswith("error: ")), lines[0])
    message = message.removeprefix("error: ")
    return message.partition(" (in regex): ")[2] or message[:_MAX_REASON_CHARS]


def _refusal(pattern: str, reason: str) -> RequestError:
    return RequestError(
        f"`{_PARAM}` {pattern[:_MAX_REASON_CHARS]!r} is not supported: {reason}.",
        param=_PARAM,
    )
