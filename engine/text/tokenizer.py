"""Tokenizer: text to token ids, and token ids to bytes, exactly and one token at a time.

`decode` of a whole sequence cannot attribute bytes to tokens, and decoding again for each new token
costs more than sampling it. So every token has a piece, its own bytes, and the text of a sequence
is its joined pieces. For byte-level BPE and for SentencePiece vocabularies this equals `decode`,
except that a SentencePiece piece keeps the space that `decode` drops before the first word, since
the text continues a prompt. For other vocabularies a piece is the text that `decode` adds after a
plain letter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from tidemill.protocol.contract import EngineError
from tidemill.protocol.errors import RequestError

from ..errors import first_line_of
from .token_bound import TokenBound, token_bound
from .token_bytes import BYTE_OF_CHAR, METASPACE, decoder_kind
from .vocabulary import Vocabulary, reraise_unless_broken

_TRIAL = "A text, 1 line.\n"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def load_tokenizer(model: str, vocabulary: Vocabulary, vocab_size: int) -> Tokenizer:
    """Return the tokenizer of a folder or hub id, tested; raise `EngineError` if it does not work.

    Its vocabulary must match a model of `vocab_size` tokens. Tokens added later may exceed it: a
    prompt that contains one is rejected with an error naming it.
    """
    try:
        tokenizer = Tokenizer(vocabulary)
        tokenizer.text(tokenizer.encode(_TRIAL, add_special_tokens=True))
    except BaseException as exc:
        reraise_unless_broken(exc)
        raise EngineError(f"{model}: the tokenizer does not work: {first_line_of(exc)}") from exc
    if vocabulary.highest_id >= vocab_size:
        raise EngineError(
            f"{model}: the tokenizer belongs to another model: it has token "
            f"{vocabulary.highest_id:,}, but the model has tokens 0 to {vocab_size - 1:,}."
        )
    return tokenizer


class Tokenizer:
    """A tokenizer over a model's vocabulary; safe to use from threads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._backend = vocabulary.backend
        self._added = vocabulary.added
        self._special = vocabulary.special_ids
        self._special_ids = {self._added[i]: i for i in self._special if i in self._added}
        self._pieces: dict[int, bytes] = {}
        self._piece_of = self._piece_reader()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text; raises `RequestError` for invalid Unicode."""
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as exc:
                raise RequestError(
                    "The prompt is not valid Unicode: it contains lone surrogates."
                ) from exc
        if self._backend is None:
            ids = self.vocabulary.pretrained.encode(text, add_special_tokens=add_special_tokens)
            return [int(token_id) for token_id in ids]
        # The batch form releases the GIL, and computes no offsets.
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids_of_text: list[int] = encodings[0].ids
        return ids_of_text

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens of a text, without tokenizing it.

        It is 0 if this vocabulary allows no such bound.
        """
        return 0 if self._bound is None else self._bound.least_tokens(text)

    @cached_property
    def _bound(self) -> TokenBound | None:
        return None if self._backend is None else token_bound(self._backend)

    def piece(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be special; an unused id has none."""
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._piece_of(token_id)
        return piece

    def is_special(self, token_id: int) -> bool:
        """Return whether the token is special (`<|im_end|>`) and not part of the text."""
        return token_id in self._special

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token with exactly this text, if there is one."""
        return self._special_ids.get(text)

    def text_bytes(
        self,
        token_ids: Iterable[int],
        *,
        skip_special_tokens: bool = True,
        markers: frozenset[int] = frozenset(),
    ) -> bytes:
        """Return the bytes of a sequence; they may end inside a character.

        `markers` are special tokens that stay even if others are skipped.
        """
        if skip_special_tokens:
            special = self._special
            return b"".join([self.piece(i) for i in token_ids if i not in special or i in markers])
        return b"".join([self.piece(i) for i in token_ids])

    def text(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of a sequence; invalid UTF-8 becomes U+FFFD."""
        data = self.text_bytes(token_ids, skip_special_tokens=skip_special_tokens)
        return data.decode("utf-8", "replace")

    def _piece_reader(self) -> Callable[[int], bytes]:
        match decoder_kind(self._backend):
            case "byte-level":
                return self._byte_level_piece
            case "sentencepiece":
                return self._sentencepiece_piece
        anchor = self.vocabulary.pretrained.encode("a", add_special_tokens=False)
        return lambda token_id: self._decoded_piece(anchor, token_id)

    def _token(self, token_id: int) -> str | None:
        if self._backend is not None:
            token: str | None = self._backend.id_to_token(token_id)
            return token
        pretrained = self.vocabulary.pretrained
        return None if token_id >= len(pretrained) else _one_token(pretrained, token_id)

    def _byte_level_piece(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        try:
            return bytes([BYTE_OF_CHAR[char] for char in token])
        except KeyError:
            return token.encode()

    def _sentencepiece_piece(self, token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace(METASPACE, " ").encode()

    def _decoded_piece(self, anchor: Sequence[int], token_id: int) -> bytes:
        token = self._token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return token.encode()
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        pretrained = self.vocabulary.pretrained
        before: str = pretrained.decode([*anchor])
        after: str = pretrained.decode([*anchor, token_id])
        if after.startswith(before):
            return after[len(before) :].encode()
        alone: str = pretrained.decode([token_id])
        return alone.encode()


def _one_token(pretrained: Any, token_id: int) -> str | None:
    token: str | None = pretrained.convert_ids_to_tokens(token_id)
    return token
