"""Token bytes: the encodings of bytes and spaces in vocabularies."""

from __future__ import annotations

import json
from typing import Any, Literal

METASPACE = "▁"  # LOWER ONE EIGHTH BLOCK, SentencePiece's mark for a space


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character in a byte-level vocabulary.

    GPT-2's convention: printable Latin-1 characters represent themselves, the other bytes are
    represented by the characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR = _byte_alphabet()


def decoder_kind(backend: Any) -> Literal["byte-level", "sentencepiece"] | None:
    """Return the encoding of a fast tokenizer's tokens, from its decoder; None for others."""
    if backend is None or backend.decoder is None:
        return None
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = state.get("decoders", [state])
    if any(step["type"] == "ByteLevel" for step in steps):
        return "byte-level"
    return "sentencepiece" if steps and all(map(_is_of_sentencepiece, steps)) else None


def _is_of_sentencepiece(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": METASPACE} and step["content"] == " ")
    if step["type"] == "Metaspace":
        return bool(step["replacement"] == METASPACE)
    return step["type"] in {"ByteFallback", "Fuse", "Strip"}
