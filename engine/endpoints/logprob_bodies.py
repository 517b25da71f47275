r"""Log-probabilities as responses show them: in chats, in completions and for prompts.

A token that is not valid text (a part of a character) is written as bytes, as OpenAI does:
`\xe2\x82` in chat, `bytes:\xe2\x82` in completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, proxy

from ..scheduling.token_logprobs import LogprobRow, TokenLogprobs
from ..text.tokenizer import Tokenizer

# JSON has no infinity; this is what OpenAI and vLLM write for an impossible token.
LEAST_LOGPROB = -9999.0


_TEXTS: WeakKeyDictionary[Tokenizer, dict[bool, _TokenTexts]] = WeakKeyDictionary()


class _TokenText(NamedTuple):
    """A token in responses: its text, or escaped bytes if it is not valid text.

    Its `data` is a tuple, so that garbage collection skips the million objects that contain it.
    """

    text: str
    is_whole: bool
    data: tuple[int, ...]


class _TokenTexts(dict[int, _TokenText]):
    """A cache of one tokenizer's token texts, for the tokenizer's lifetime.

    With `as_ids` each text is `token_id:` and the token's number, as in vLLM; bytes do not change.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        super().__init__()
        self._tokenizer = proxy(tokenizer)  # the cache must not keep it alive
        self._as_ids = as_ids

    def __missing__(self, token_id: int) -> _TokenText:
        piece = self._tokenizer.piece(token_id)
        if self._as_ids:
            token = _TokenText(f"token_id:{token_id}", is_whole=True, data=tuple(piece))
            self[token_id] = token
            return token
        try:
            token = _TokenText(piece.decode("utf-8"), is_whole=True, data=tuple(piece))
        except UnicodeDecodeError:
            text = "".join(f"\\x{byte:02x}" for byte in piece)
            token = _TokenText(text, is_whole=False, data=tuple(piece))
        self[token_id] = token
        return token

    def in_chat(self, token_id: int, logprob: float) -> dict[str, Any]:
        """Return a token of a chat choice."""
        token = self[token_id]
        return {"token": token.text, "logprob": logprob, "bytes": token.data}

    def in_text(self, token_id: int) -> str:
        """Return a token of a text choice."""
        token = self[token_id]
        return token.text if token.is_whole else f"bytes:{token.text}"


def chat_logprobs(
    logprobs: TokenLogprobs, tokenizer: Tokenizer, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""
    texts = _token_texts(tokenizer, as_ids=as_ids)
    content = []
    for token_id, logprob, _, top in filter(None, logprobs.rows(LEAST_LOGPROB)):
        shown = texts.in_chat(token_id, logprob)
        content.append(shown | {"top_logprobs": [texts.in_chat(*pair) for pair in top]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    rows: Sequence[LogprobRow | None],
    token_ids: Sequence[int],
    offsets: Sequence[int],
    tokenizer: Tokenizer,
    *,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Return the `logprobs` object of a text choice.

    `rows` correspond to `token_ids`; None is a token without a score. The top logprobs always
    include the sampled token, so there may be one more than requested.
    """
    texts = _token_texts(tokenizer, as_ids=as_ids)
    top_logprobs: list[dict[str, float] | None] = []
    for row in rows:
        if row is None:
            top_logprobs.append(None)
            continue
        token_id, logprob, _, best = row
        text, top = texts.in_text(token_id), dict[str, float]()
        for other, value in best:
            top.setdefault(texts.in_text(other), value)
        top_logprobs.append(top if text in top else {text: logprob, **top})
    return {
        "text_offset": list(offsets),
        "token_logprobs": [None if row is None else row[1] for row in rows],
        "tokens": [texts.in_text(token_id) for token_id in token_ids],
        "top_logprobs": top_logprobs,
    }


def prompt_logprobs(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token a mapping from token ids to their values.

    `rank` counts from 1 among all tokens.
    """
    texts = _token_texts(tokenizer)
    return [
        None if row is None else _prompt_entry(row, texts) for row in logprobs.rows(LEAST_LOGPROB)
    ]


class TextOffsets:
    """Offsets of tokens in a text, counted in characters from `start`.

    A token inside a character has that character's offset. Skipped special tokens have no length,
    but `markers` do.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        start: int = 0,
        skip_special_tokens: bool,
        markers: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._markers = markers
        self._position = start
        self._pending = b""

    def next_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._position)
            is_skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
            if is_skipped and token_id not in self._markers:
                continue
            data = self._pending + self._tokenizer.piece(token_id)
            self._pending = _unfinished_character(data)
            whole = data[: len(data) - len(self._pending)]
            self._position += len(whole.decode("utf-8", "replace"))
        return offsets


def _unfinished_character(data: bytes) -> bytes:
    """Return the bytes at the end that begin a character but do not complete it."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[-length:] if length < needed else b""
        if byte < 0x80:
            break
    return b""


def _token_texts(tokenizer: Tokenizer, *, as_ids: bool = False) -> _TokenTexts:
    caches = _TEXTS.setdefault(tokenizer, {})
    if as_ids not in caches:
        caches[as_ids] = _TokenTexts(tokenizer, as_ids=as_ids)
    return caches[as_ids]


def _prompt_entry(row: LogprobRow, texts: _TokenTexts) -> dict[str, Any]:
    token_id, logprob, rank, top = row
    entry = {str(token_id): _scored_token(texts[token_id], logprob, rank)}
    for place, (token_id, value) in enumerate(top, start=1):
        entry[str(token_id)] = _scored_token(texts[token_id], value, place)
    return entry


def _scored_token(token: _TokenText, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token.text}
