"""Tokenization of texts and pairs with truncation, special tokens around them.

A text is truncated before special tokens are added, so that these stay. A document is truncated,
but not its query: half a question is another question, but half a document still has its subject.
Other pairs lose tokens of the longer text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tokenizers.normalizers import Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from tidemill.protocol.errors import RequestError
from tidemill.protocol.fields import Side

from .tokenizer import Tokenizer

# Shorter texts are tokenized completely: it takes a few milliseconds at most.
_LONG_CHARS = 20_000
# Characters per token that limit the first tokenized part of a long text, and the last: a text with
# more characters per token is tokenized completely. English has four or five.
_CHARS_OF_TOKEN, _MAX_CHARS_OF_TOKEN = 8, 32


class TokenPair(NamedTuple):
    """The ids of a sequence of one or two texts, and the segment (token type) of each token."""

    ids: list[int]
    type_ids: list[int]


@dataclass(frozen=True, slots=True)
class TruncatedEncoding:
    """A truncated encoding with its special tokens, as an encoding of tokenizers.

    `whole` has them. `text` is without them: a byte-level tokenizer trims the spaces of offsets
    whenever it adds special tokens, and trimmed those of `text` when it read it.
    """

    whole: Any
    text: Any

    @property
    def ids(self) -> list[int]:
        """Return the ids."""
        return list(self.whole.ids)

    @property
    def tokens(self) -> list[str]:
        """Return the names of the tokens."""
        return list(self.whole.tokens)

    @property
    def special_tokens_mask(self) -> list[int]:
        """Return 1 for each special token, 0 for each of the text."""
        return list(self.whole.special_tokens_mask)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Return the positions of the tokens in the text."""
        own = iter(self.text.offsets)
        return [(0, 0) if is_special else next(own) for is_special in self.special_tokens_mask]


@dataclass(frozen=True, slots=True)
class Truncation:
    """Limits and side of a truncation; `max_tokens` None truncates nothing.

    `max_tokens` counts a whole sequence, including special tokens; the others one text of a pair.
    With `is_longest_first` the longer text of a pair is truncated, as transformers does by default.
    """

    max_tokens: int | None = None
    max_first: int | None = None
    max_second: int | None = None
    side: Side = "right"
    is_longest_first: bool = False


class TruncatingTokenizer:
    """Tokenizes and truncates with a fast tokenizer; thread-safe.

    At most `max_tokens` of a text are needed. With `is_lower_case` the tokenizer lowercases from
    now on, for all users. With `has_offsets` encodings have the positions of tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_tokens: int,
        *,
        is_lower_case: bool = False,
        has_offsets: bool = False,
    ) -> None:
        backend = tokenizer.vocabulary.backend
        if backend is None:
            raise ValueError("a slow tokenizer does not support pairs")
        if is_lower_case:
            steps = [Lowercase(), *([] if backend.normalizer is None else [backend.normalizer])]
            backend.normalizer = NormalizerSequence(steps)
        self._backend = backend
        # The batch form releases the GIL; the fast one computes no offsets.
        self._encode_batch = backend.encode_batch if has_offsets else backend.encode_batch_fast
        self._max_tokens = max_tokens
        self._most_chars = max(_LONG_CHARS, max_tokens * _MAX_CHARS_OF_TOKEN)
        self.max_chars = max(_LONG_CHARS, max_tokens * _CHARS_OF_TOKEN)
        """Only the beginning or the end of a longer text may be tokenized."""
        self._num_special = int(backend.num_special_tokens_to_add(is_pair=False))
        self._num_special_of_pair = int(backend.num_special_tokens_to_add(is_pair=True))

    def encode(
        self, texts: Sequence[str], cut: Truncation, *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        """Return the token ids of each text; a far too long one may stop early."""
        texts = self.relevant_parts(texts, cut)
        encodings = self.read(texts, add_special_tokens=add_special_tokens)
        return self.truncated_ids(texts, encodings, cut, add_special_tokens=add_special_tokens)

    def read(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Any]:
        """Return the encoding of each text, which is not truncated."""
        encodings: list[Any] = self._encode_batch(
            list(texts), add_special_tokens=add_special_tokens
        )
        return encodings

    def relevant_parts(self, texts: Sequence[str], cut: Truncation) -> list[str]:
        """Return each text, or the part of a far too long one that exceeds the limit."""
        return [self._relevant_part(text, cut.side) for text in texts]

    def truncated_ids(
        self,
        texts: Sequence[str],
        encodings: Sequence[Any],
        cut: Truncation,
        *,
        add_special_tokens: bool,
    ) -> list[list[int]]:
        """Return the token ids of texts that were read."""
        kept = self.truncated(texts, encodings, cut, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in kept]

    def truncated(
        self,
        texts: Sequence[str],
        encodings: Sequence[Any],
        cut: Truncation,
        *,
        add_special_tokens: bool,
    ) -> list[Any]:
        """Return the encodings of texts that were read."""
        return [
            encoding
            if cut.max_tokens is None or len(encoding) <= cut.max_tokens
            else self._shortened(text, cut, add_special_tokens=add_special_tokens)
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def joined_pairs(
        self, num_firsts: int, encodings: Sequence[Any], cut: Truncation
    ) -> list[TokenPair]:
        """Return each second text after its first one, or after the only one.

        `encodings` are those of the first texts and of the second ones, without special tokens.
        Raises `RequestError` if no token of a truncated text would remain.
        """
        heads, tails = list(encodings[:num_firsts]), list(encodings[num_firsts:])
        for side, limit in ((heads, cut.max_first), (tails, cut.max_second)):
            for encoding in side if limit else ():
                encoding.truncate(limit, direction=cut.side)
        if len(heads) == 1:
            heads *= len(tails)
        return [self._pair(head, tail, cut) for head, tail in zip(heads, tails, strict=True)]

    def truncated_text(self, text: str, num_tokens: int) -> str:
        """Return the part of a text that its first tokens represent."""
        text = self._relevant_part(text, "right") if num_tokens <= self._max_tokens else text
        encoding = self._backend.encode(text, add_special_tokens=False)
        return text if len(encoding) <= num_tokens else text[: encoding.offsets[num_tokens][0]]

    def num_prefix_tokens(self, text: str, *, add_special_tokens: bool) -> int:
        """Return the number of tokens of a prefix, including opening special tokens.

        It excludes the closing special token, as in sentence-transformers.
        """
        [encoding] = self.read([text], add_special_tokens=add_special_tokens)
        return len(encoding) - bool(encoding.special_tokens_mask[-1])

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text without special tokens."""
        [encoding] = self.read([text], add_special_tokens=False)
        return len(encoding)

    def least_tokens_of_longer(self, text: str) -> int | None:
        """Return a lower bound above the limit for a long text, None for a short one.

        Tokenization of a long text stops once it is known to be too long.
        """
        part = self._too_long_part(text, "right")
        return None if part is None else part[1]

    def _relevant_part(self, text: str, side: Side) -> str:
        """Return a text, or words at one end of a long one that already exceed the limit."""
        part = self._too_long_part(text, side)
        return text if part is None else part[0]

    def _too_long_part(self, text: str, side: Side) -> tuple[str, int] | None:
        """Return words at one end of a long text that exceed the limit, and their number of tokens.

        A tokenizer takes about 160 bytes per byte of text. It splits a text between words in any
        case, so the tokens of a part are those of the whole text. Parts of doubling length are
        tried, so that little more is tokenized than needed.
        """
        num_chars = self.max_chars
        while num_chars < len(text) and num_chars <= self._most_chars:
            part = text[:num_chars] if side == "right" else text[-num_chars:]
            words = part.rsplit(None, 1) if side == "right" else part.split(None, 1)
            if len(words) < 2:
                return None
            part = words[0] if side == "right" else words[1]
            if (num_tokens := self.count_tokens(part)) > self._max_tokens:
                return part, num_tokens
            num_chars *= 2
        return None

    def _shortened(
        self, text: str, cut: Truncation, *, add_special_tokens: bool
    ) -> TruncatedEncoding:
        [encoding] = self.read([text], add_special_tokens=False)
        num_special = self._num_special if add_special_tokens else 0
        room = (cut.max_tokens or 0) - num_special
        if room < 1:
            raise _no_room(f"the {num_special} special tokens leave no room for the text")
        encoding.truncate(room, direction=cut.side)
        whole = self._backend.post_process(encoding, add_special_tokens=add_special_tokens)
        return TruncatedEncoding(whole, encoding)

    def _pair(self, head: Any, tail: Any, cut: Truncation) -> TokenPair:
        num_special = self._num_special_of_pair
        num_tokens = len(head) + len(tail) + num_special
        if cut.max_tokens is not None and num_tokens > cut.max_tokens:
            room = cut.max_tokens - num_special
            num_first = len(head)
            if cut.is_longest_first:
                if room < 2:
                    raise _no_room(f"the {num_special} special tokens leave no room for two texts")
                shorter = min(num_first, len(tail), room // 2)
                num_first = room - shorter if num_first > len(tail) else shorter
            elif room <= num_first:
                num_others = num_first + num_special
                raise _no_room(f"the parts that are not truncated have {num_others} tokens")
            head.truncate(num_first, direction=cut.side)
            tail.truncate(room - num_first, direction=cut.side)
        joined = self._backend.post_process(head, tail)
        return TokenPair(joined.ids, joined.type_ids)


def _no_room(reason: str) -> RequestError:
    return RequestError(
        f"`truncate_prompt_tokens` is too small: {reason}.", param="truncate_prompt_tokens"
    )
