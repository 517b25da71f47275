r"""Log-probabilities as responses show them: the forms of chat, of completions and of prompts.

A token that is no whole text (a piece of a character) is written by its bytes, as OpenAI does:
`\xe2\x82` in chat, `bytes:\xe2\x82` in completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.scheduling.sequence import TokenLogprob
from engine.text.tokenizer import Tokenizer

# JSON has no infinity; this is what OpenAI and vLLM write for a token that cannot come.
_LEAST_LOGPROB = -9999.0


def chat_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the `logprobs` object of a chat choice."""
    return {
        "content": [
            {
                **_chat_token(entry.token_id, entry.logprob, tokenizer),
                "top_logprobs": [
                    _chat_token(token_id, logprob, tokenizer) for token_id, logprob in entry.top
                ],
            }
            for entry in logprobs
        ],
        "refusal": None,
    }


def completion_logprobs(
    entries: Sequence[TokenLogprob | None],
    token_ids: Sequence[int],
    offsets: Sequence[int],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Return the `logprobs` object of a text choice.

    `entries` goes with `token_ids`, None where nothing predicts the token. The likeliest tokens at
    a place always hold the one that came, so there may be one more than was asked for.
    """
    top_logprobs: list[dict[str, float] | None] = []
    for entry in entries:
        if entry is None:
            top_logprobs.append(None)
            continue
        pairs = [(entry.token_id, entry.logprob), *entry.top]
        top = {_completion_text(token_id, tokenizer): _finite(lp) for token_id, lp in pairs[::-1]}
        top_logprobs.append(dict(reversed(top.items())))
    return {
        "text_offset": list(offsets),
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "tokens": [_completion_text(token_id, tokenizer) for token_id in token_ids],
        "top_logprobs": top_logprobs,
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprob | None], tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """Return vLLM's `prompt_logprobs`: for each token a table from token ids to their values.

    `rank` counts from 1; it is null for a token that is not among the likeliest.
    """
    return [None if entry is None else _prompt_entry(entry, tokenizer) for entry in entries]


def text_offsets(
    token_ids: Sequence[int], tokenizer: Tokenizer, *, start: int = 0, skip_special_tokens: bool
) -> list[int]:
    """Return where in the text each token begins, counting characters from `start`.

    A token inside a character begins where the character does; markup takes no room when the text
    is without it.
    """
    offsets, position, pending = [], start, b""
    for token_id in token_ids:
        offsets.append(position)
        if skip_special_tokens and tokenizer.is_special(token_id):
            continue
        data = pending + tokenizer.piece(token_id)
        pending = _unfinished_character(data)
        position += len(data[: len(data) - len(pending)].decode("utf-8", "replace"))
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


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)


def _text_or_bytes(token_id: int, tokenizer: Tokenizer) -> tuple[str, bool]:
    """Return a token's text and whether it is whole; if not, its bytes as escapes."""
    piece = tokenizer.piece(token_id)
    try:
        return piece.decode("utf-8"), True
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in piece), False


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text, _ = _text_or_bytes(token_id, tokenizer)
    return {"token": text, "logprob": _finite(logprob), "bytes": list(tokenizer.piece(token_id))}


def _completion_text(token_id: int, tokenizer: Tokenizer) -> str:
    text, whole = _text_or_bytes(token_id, tokenizer)
    return text if whole else f"bytes:{text}"


def _prompt_entry(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(entry.top, start=1)}
    pairs = [(entry.token_id, entry.logprob), *entry.top]
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": _text_or_bytes(token_id, tokenizer)[0],
        }
        for token_id, logprob in pairs
    }
