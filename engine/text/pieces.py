"""How vocabularies write bytes and spaces."""

from __future__ import annotations

METASPACE = "▁"  # LOWER ONE EIGHTH BLOCK, SentencePiece's mark for a space


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for which each character of a byte-level vocabulary stands.

    GPT-2's convention: printable Latin-1 characters stand for themselves, the other bytes for the
    characters from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


BYTE_OF_CHAR = _byte_alphabet()
