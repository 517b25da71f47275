"""Lower bound of a text's number of tokens from its bytes; tokenizing takes 160 bytes per byte.

No token represents more bytes than the longest one of the vocabulary, so a text has at least bytes
/ longest tokens. This holds if every byte appears in some token: for byte-level BPE, and for BPE or
Unigram with a token for each byte. It does not hold for tokenizers that may drop text (accents,
runs of spaces, control characters) or that write one unknown token for many characters; those have
no bound here.

The longest tokens are runs of spaces and of dashes, which are rare in texts. So letters, digits and
non-ASCII bytes are also counted separately, and compared with the token that has the most of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .token_bytes import BYTE_OF_CHAR, METASPACE

_SLICE_CHARS = 2**16
# Factor by which these may shrink bytes: the mathematical bold A becomes an A, and iota with two
# accents, 7 bytes, becomes one character of 2. ASCII keeps its length.
_SHRINKING = dict.fromkeys(["NFC", "NFD", "NFKC", "NFKD", "Lowercase"], 4)
_KEEPING_NORMALIZERS = {"Prepend", "ByteLevel"}
_KEEPING_SPLITTERS = {"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
_OTHERS = bytes(byte for byte in range(0x80) if not chr(byte).isalnum())


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The most bytes of text in one token, and the most `letters` among them.

    `shrink` is the number of bytes of a text that the normalizer may turn into one. With
    `drops_spaces`, a special token absorbs all spaces next to it.
    """

    most_bytes: int
    most_letters: int
    shrink: int
    drops_spaces: bool

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text."""
        num_bytes = num_letters = 0
        for start in range(0, len(text), _SLICE_CHARS):
            part = text[start : start + _SLICE_CHARS]
            if self.drops_spaces:
                part = "".join(part.split())
            data = part.encode("utf-8", "surrogatepass")
            num_bytes += len(data)
            num_letters += _letters(data)
        if self.shrink > 1 and not text.isascii():
            return -(-num_bytes // (self.most_bytes * self.shrink))
        return max(-(-num_bytes // self.most_bytes), -(-num_letters // self.most_letters))


def token_bound(backend: Any) -> TokenBound | None:
    """Return the bound of a fast tokenizer, or None if there is none."""
    normalizers = _steps(backend.normalizer, "normalizers")
    splitters = _steps(backend.pre_tokenizer, "pretokenizers")
    shrink = 1
    for step in normalizers:
        if not _keeps_text(step):
            return None
        shrink *= _SHRINKING.get(step["type"], 1)
    if not all(map(_splits_only, splitters)):
        return None
    is_byte_level = any(step["type"] == "ByteLevel" for step in [*normalizers, *splitters])
    vocab = backend.get_vocab(with_added_tokens=False)
    if not _has_all_bytes(backend.model, vocab, is_byte_level=is_byte_level):
        return None
    added = backend.get_added_tokens_decoder().values()
    pieces = [_piece(token, is_byte_level=is_byte_level) for token in vocab]
    pieces += [token.content.encode() for token in added]
    return TokenBound(
        most_bytes=max(1, *map(len, pieces)),
        most_letters=max(1, *map(_letters, pieces)),
        shrink=shrink,
        drops_spaces=any(token.lstrip or token.rstrip for token in added),
    )


def _letters(data: bytes) -> int:
    return len(data.translate(None, _OTHERS))


def _steps(part: Any, name: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return _flat(json.loads(part.__getstate__()), name)


def _flat(state: dict[str, Any], name: str) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    return [step for inner in state[name] for step in _flat(inner, name)]


def _keeps_text(step: dict[str, Any]) -> bool:
    """Return whether a normalizer never deletes text, and shrinks it by a known factor at most."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"] == METASPACE)
    return step["type"] in _KEEPING_NORMALIZERS or step["type"] in _SHRINKING


def _splits_only(step: dict[str, Any]) -> bool:
    if step["type"] in ("Split", "Punctuation"):
        return bool(step["behavior"] != "Removed")
    return step["type"] in _KEEPING_SPLITTERS


def _has_all_bytes(model: Any, vocab: dict[str, int], *, is_byte_level: bool) -> bool:
    """Return whether no character is ever unknown, and so dropped or merged with others."""
    state = json.loads(model.__getstate__())
    if state.get("continuing_subword_prefix") or state.get("end_of_word_suffix"):
        return False
    if is_byte_level:
        return state["type"] == "BPE" and vocab.keys() >= BYTE_OF_CHAR.keys()
    has_bytes = vocab.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    return has_bytes and bool(state.get("byte_fallback"))


def _piece(token: str, *, is_byte_level: bool) -> bytes:
    """Return the bytes of text that a token of the vocabulary represents."""
    if is_byte_level:
        try:
            return bytes([BYTE_OF_CHAR[char] for char in token])
        except KeyError:
            return token.encode()
    return token.replace(METASPACE, " ").encode()
